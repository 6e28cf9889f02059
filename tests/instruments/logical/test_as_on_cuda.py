"""Operators are counted as CUDA runs them; others are refused by name.

Sizes are in elements of four bytes unless a test says otherwise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from dpbench.core.errors import CaseFailed
from dpbench.instruments.logical.counter import OperatorCounter, without_data
from dpbench.instruments.logical.stand_ins import UnsupportedOperation
from dpbench.training.base import Batch
from dpbench.training.phases import observed_step
from dpbench.training.standard import StandardTrainer
from tests.instruments.logical.cases import count, tiny, totals
from tests.instruments.logical.test_rules import E, Moved, moved

B, HEADS, T, WIDTH = 2, 3, 32, 8
"""Batch, heads, length and head width of attention. T is a multiple of 32, because the
memory-efficient kernel pads its logsumexp to that."""

QK, LSE = B * HEADS * T * WIDTH, B * HEADS * T
SEEDS = 2 * 8
"""Bytes of seed and offset (int64), from which a kernel redraws dropout."""

Step = Callable[..., Tensor]


def forward_and_backward(
    step: Step, *inputs: tuple[int, ...], **like: Any
) -> list[OperatorCounter]:
    """The counts of a function of tensors with these shapes, and of its backward pass."""
    counters = []
    with without_data() as counter:
        tensors = [torch.empty(shape, requires_grad=True, **like) for shape in inputs]
        with observed_step(counter):
            output = step(*tensors)
        counters.append(copy.copy(counter))
        gradient = torch.empty_like(output)
        with observed_step(counter):
            output.backward(gradient)
    return [*counters, counter]


def operators(counter: OperatorCounter) -> set[str]:
    return {name for _, name in totals(counter)}


class TestDropout:
    def test_it_keeps_a_mask_of_one_byte_an_element(self) -> None:
        n = 40
        forward, backward = forward_and_backward(lambda x: F.dropout(x, 0.1), (n,))
        assert moved(forward) == (E * n, E * n + n)
        assert moved(backward) == (E * n + n, E * n)

    def test_that_drops_nothing_it_is_free(self) -> None:
        for step in (lambda x: F.dropout(x, 0.0), lambda x: F.dropout(x, 0.1, training=False)):
            assert moved(forward_and_backward(step, (40,))[0]) == (0, 0)


@pytest.mark.parametrize("activation", [F.silu, F.mish, F.gelu])
def test_an_activation_has_one_kernel_in_each_direction(activation: Step) -> None:
    n = 40
    forward, backward = forward_and_backward(activation, (n,))
    assert (moved(forward), moved(backward)) == ((E * n, E * n), (E * 2 * n, E * n))


class TestRMSNorm:
    ROWS, WIDTH = 6, 8

    def test_it_keeps_one_number_a_row(self) -> None:
        n, h = self.ROWS, self.WIDTH
        step = lambda x, w: F.rms_norm(x, (h,), w)  # noqa: E731
        forward, backward = forward_and_backward(step, (n, h), (h,))
        assert moved(forward) == (E * (n * h + h), E * (n * h + n))
        assert moved(backward) == (E * (2 * n * h + n + h), E * (n * h + h))

    def test_the_layer_and_inference_count_the_same(self) -> None:
        n, h = self.ROWS, self.WIDTH
        with without_data() as counter:
            layer, x = nn.RMSNorm(h), torch.empty(n, h)
            for context in (torch.no_grad(), torch.inference_mode()):
                with context, observed_step(counter):
                    layer(x)
                assert moved(counter) == (E * (n * h + h), E * (n * h + n))

    @pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch says so
    def test_a_weight_of_another_dtype_is_not_fused(self) -> None:
        step = lambda x: F.rms_norm(x, (8,), torch.ones(8))  # noqa: E731
        forward, _ = forward_and_backward(step, (6, 8), dtype=torch.bfloat16)
        assert "aten._fused_rms_norm" not in operators(forward)


class TestAttention:
    SHAPE = (B, HEADS, T, WIDTH)

    def test_dropout_moves_nothing_more(self) -> None:
        def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)

        forward, backward = forward_and_backward(step, *[self.SHAPE] * 3)
        assert moved(forward) == (E * 3 * QK, E * (QK + LSE))
        name = "_scaled_dot_product_flash_attention_for_cpu_backward"
        assert moved(backward, name) == (E * (5 * QK + LSE), E * 3 * QK)

    def test_values_of_another_width_stay_fused(self) -> None:
        v = B * HEADS * T * 16
        shapes = [self.SHAPE, self.SHAPE, (B, HEADS, T, 16)]
        forward, backward = forward_and_backward(F.scaled_dot_product_attention, *shapes)
        assert moved(forward) == (E * (2 * QK + v), E * (v + LSE) + SEEDS)
        assert moved(backward, "_scaled_dot_product_efficient_attention_backward") == (
            E * (2 * QK + 3 * v + LSE) + SEEDS,  # the output and its gradient are as wide
            E * (2 * QK + v),
        )

    def test_a_mask_is_read_once_by_each_pass(self) -> None:
        def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, torch.empty(T, T), dropout_p=0.1)

        forward, _ = forward_and_backward(step, *[self.SHAPE] * 3)
        assert moved(forward) == (E * (3 * QK + T * T), E * (QK + LSE))

    @pytest.mark.parametrize(
        ("dtype", "fused"), [(torch.float32, False), (torch.bfloat16, True)], ids=str
    )
    def test_shared_keys_are_fused_in_half_precision_only(
        self, dtype: torch.dtype, fused: bool
    ) -> None:
        def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        shapes = [self.SHAPE, *[(B, 1, T, WIDTH)] * 2]
        forward, _ = forward_and_backward(step, *shapes, dtype=dtype)
        assert ("aten.bmm" in operators(forward)) is not fused
        assert sum(each.flops for each in forward.operators) == 2 * 2 * QK * T
        if fused:
            kept = 4 * LSE  # logsumexp stays float32
            assert moved(forward) == Moved(2 * (QK + 2 * QK // HEADS), 2 * QK + kept)


class SwitchesAutocastOn(StandardTrainer):
    def train_step(self, batch: Batch) -> Tensor:
        torch.set_autocast_enabled("cuda", True)
        return super().train_step(batch)


class Compiles(StandardTrainer):
    def train_step(self, batch: Batch) -> Tensor:
        self.model.compile()
        return super().train_step(batch)


class TestRefused:
    @pytest.mark.parametrize(
        ("trainer", "reason"),
        [
            (SwitchesAutocastOn, r"set_autocast_enabled cannot be simulated.*context manager"),
            (Compiles, r"uses torch\.compile.*count the step without"),
        ],
    )
    def test_what_changes_the_bytes_is_refused_by_name(self, trainer: type, reason: str) -> None:
        with pytest.raises(CaseFailed, match=reason):
            count(tiny(trainer))

    def test_a_function_compiled_before_is_refused(self) -> None:
        compiled = torch.compile(lambda x: x + 1)
        with without_data(), pytest.raises(UnsupportedOperation, match=r"torch\.compile"):
            compiled(torch.ones(3))


@contextmanager
def noted(place: Any, *names: str) -> Iterator[None]:
    """The patched attributes, to compare before and after."""
    before = [vars(place).get(name) for name in names]
    yield
    assert [vars(place).get(name) for name in names] == before


def test_nothing_is_left_afterwards() -> None:
    with (
        noted(FakeTensorMode, "__deepcopy__"),
        noted(torch.autocast, "__init__", "__enter__", "__exit__"),
        noted(torch.amp.GradScaler, "__init__", "_maybe_opt_step"),
        noted(torch._dynamo.eval_frame, "_callback_from_stance"),
    ):
        assert F.dropout(torch.ones(1000), 0.5).unique().tolist() == [0.0, 2.0]
        with without_data():
            copied = copy.deepcopy(nn.Linear(3, 3))
            assert copied.weight.shape == (3, 3)
    x = torch.ones(2, 3, requires_grad=True)
    assert "Native" not in str(F.dropout(x, 0.5).grad_fn)
    assert "Fused" not in str(F.rms_norm(x, (3,)).grad_fn)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x.T).dtype is torch.bfloat16
