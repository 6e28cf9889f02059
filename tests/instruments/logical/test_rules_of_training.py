"""Bytes of losses, norms, pooling, attention and optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpbench.instruments.logical.counter import without_data
from dpbench.training.kernels import put_product, without_dropped
from dpbench.training.phases import observed_step
from tests.instruments.logical.test_rules import INT64, E, Moved, cost, indices, moved


class TestLossAndNorm:
    def test_cross_entropy_reads_one_logarithm_for_each_target(self) -> None:
        n, v = 6, 50
        softmax = Moved(E * n * v, E * n * v)
        loss = Moved(E * n + INT64 * n, E * 2)  # the mean, and the weight that it divides by
        moved = cost(F.cross_entropy, (n, v), indices(n))
        assert moved == (softmax.read + loss.read, softmax.write + loss.write)

    def test_loss_backward_writes_a_whole_gradient_without_reading_logits(self) -> None:
        n, v = 6, 50

        def work(gradient: Tensor, logits: Tensor, target: Tensor, weight: Tensor) -> None:
            torch.ops.aten.nll_loss_backward(gradient, logits, target, None, 1, -100, weight)

        assert cost(work, (), (n, v), indices(n), ()) == (INT64 * n + E * 2, E * n * v)

    def test_layer_norm_and_its_backward(self) -> None:
        n, h = 6, 8
        with without_data() as counter:
            layer, x = nn.LayerNorm(h), torch.empty(n, h, requires_grad=True)
            with observed_step(counter):
                y = layer(x)
            assert moved(counter) == (E * (n * h + 2 * h), E * (n * h + 2 * n))
            gradient = torch.empty_like(y)
            with observed_step(counter):
                y.backward(gradient)
            assert moved(counter) == (E * (2 * n * h + 2 * n + h), E * (n * h + 2 * h))


def test_products_into_float32_and_examples_that_are_not_dropped() -> None:
    n, i, j = 6, 3, 5
    with without_data() as counter:
        a, b = (torch.empty(n, each, dtype=torch.bfloat16) for each in (i, j))
        total, factors = torch.empty(i, j), torch.empty(n)
        for adds in (False, True):
            with observed_step(counter):
                put_product(total, a.t(), b, adds=adds)
            assert moved(counter) == (2 * n * (i + j) + E * i * j * adds, E * i * j)
        with observed_step(counter):
            without_dropped(b, factors, in_place=True)
        assert moved(counter) == (E * n, 0)


def test_group_norm_and_its_backward() -> None:
    b, c, hw, groups = 2, 6, 20, 3
    n = b * c * hw
    with without_data() as counter:
        layer, x = nn.GroupNorm(groups, c), torch.empty(b, c, 4, 5, requires_grad=True)
        with observed_step(counter):
            y = layer(x)
        assert moved(counter) == (E * (n + 2 * c), E * (n + 2 * b * groups))
        gradient = torch.empty_like(y)
        with observed_step(counter):
            y.backward(gradient)
        assert moved(counter) == (E * (2 * n + 2 * b * groups + c), E * (n + 2 * c))


def test_pooling_reads_the_largest_ones_places_in_backward_and_not_its_input() -> None:
    n = 2 * 3 * 8 * 8
    with without_data() as counter:
        x = torch.empty(2, 3, 8, 8, requires_grad=True)
        with observed_step(counter):
            y = F.max_pool2d(x, 2)
        assert moved(counter) == (E * n, (E + INT64) * n // 4)
        gradient = torch.empty_like(y)
        with observed_step(counter):
            y.backward(gradient)
        assert moved(counter) == ((E + INT64) * n // 4, E * n)


def test_attention_reads_its_three_inputs_and_keeps_logsumexp() -> None:
    shape = (2, 3, 7, 4)  # batch, heads, length, width
    n, rows = 2 * 3 * 7 * 4, 2 * 3 * 7
    with without_data() as counter:
        q, k, v = (torch.empty(shape, requires_grad=True) for _ in range(3))
        with observed_step(counter):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        assert moved(counter) == (E * 3 * n, E * (n + rows))
        gradient = torch.empty_like(y)
        with observed_step(counter):
            y.backward(gradient)
        operator = "_scaled_dot_product_flash_attention_for_cpu_backward"
        assert moved(counter, operator) == (E * (5 * n + rows), E * 3 * n)


class TestClipping:
    """Bytes of gradients of N elements in two tensors."""

    N = 40

    def clip(self, clip: Callable[..., Any], **options: Any) -> Moved:
        with without_data() as counter:
            parameters = [nn.Parameter(torch.empty(self.N // 2)) for _ in range(2)]
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
            with observed_step(counter):
                clip(parameters, 1.0, **options)
        return moved(counter)

    def test_clipping_by_value_passes_over_gradients_twice(self) -> None:
        """CUDA's multi-tensor kernels clamp in two passes: from below, then from above."""
        twice = Moved(E * 2 * self.N, E * 2 * self.N)
        assert self.clip(nn.utils.clip_grad_value_) == twice
        assert self.clip(nn.utils.clip_grad_value_, foreach=True) == twice
        once = Moved(E * self.N, E * self.N)
        assert self.clip(nn.utils.clip_grad_value_, foreach=False) == once

    @pytest.mark.parametrize("options", [{}, {"foreach": True}])
    def test_clipping_by_norm_reads_gradients_for_their_norms_and_scales_them(
        self, options: dict[str, Any]
    ) -> None:
        read, write = self.clip(nn.utils.clip_grad_norm_, **options)
        assert 0 < read - E * 2 * self.N <= E * 12, "a few operators on two norms"
        assert 0 < write - E * self.N <= E * 12


class TestOptimizers:
    """Bytes per parameter element of a later step, when optimizer state exists."""

    N = 40

    def step(self, optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> Moved:
        with without_data() as counter:
            parameter = torch.empty(self.N, requires_grad=True)
            parameter.grad = torch.empty(self.N)
            built = optimizer([parameter], lr=0.1, **options)
            built.step()
            with observed_step(counter):
                built.step()
        return moved(counter)

    @pytest.mark.parametrize("kind", ["foreach", "fused", ""])
    def test_sgd_reads_parameter_and_gradient(self, kind: str) -> None:
        options = {kind: True} if kind else {"foreach": False}
        assert self.step(torch.optim.SGD, **options) == (E * 2 * self.N, E * self.N)

    @pytest.mark.parametrize("foreach", [True, False])
    def test_momentum_adds_its_buffer(self, foreach: bool) -> None:
        moved = self.step(torch.optim.SGD, momentum=0.9, foreach=foreach)
        assert moved == (E * 5 * self.N, E * 3 * self.N)  # scaled; gradient added; applied

    def test_fused_momentum_passes_over_memory_once(self) -> None:
        moved = self.step(torch.optim.SGD, momentum=0.9, fused=True)
        assert moved == (E * 3 * self.N, E * 2 * self.N)

    @pytest.mark.parametrize("foreach", [True, False])
    def test_adam_passes_over_memory_seven_times(self, foreach: bool) -> None:
        moved = self.step(torch.optim.Adam, foreach=foreach)
        step_number = 4 * E  # incremented, and read by Python once or twice
        assert moved.write == E * 7 * self.N + E
        assert E * 11 * self.N < moved.read <= E * 11 * self.N + step_number

    def test_fused_adam_passes_over_memory_once_and_leaves_the_gradient(self) -> None:
        moved = self.step(torch.optim.Adam, fused=True)
        assert moved == (E * (4 * self.N + 2), E * (3 * self.N + 1))
