"""Sums of clipped gradients: each number counts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpbench import TRAINERS, Workload
from dpbench.training.clipped_sums import (
    LARGE,
    KeptGradients,
    Sums,
    in_buffers,
)


def test_at_bf16_a_row_named_a_thousand_times_has_the_sum() -> None:
    weight = torch.nn.Parameter(torch.zeros(3, 2, dtype=torch.bfloat16))
    sums = Sums([[weight]])
    for _ in range(2):
        sums.add_rows(weight, torch.ones(1000, dtype=torch.long), torch.ones(1000, 2).bfloat16())
    [buffer] = sums.finish()
    assert buffer.places[weight].tolist() == [[0, 0], [2000, 2000], [0, 0]]


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.sampled_from([(), (3,), (5, 400), (2, LARGE // 2)]), min_size=1, max_size=5),
    st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
    st.integers(0, 3),
)
def test_kept_gradients_are_summed_with_the_whole_factor_and_rounded_once(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, examples: int
) -> None:
    """Of two micro-batches, small parameters and large ones."""
    weights = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    sums, factors = (
        Sums(in_buffers(weights, torch.optim.SGD(weights, lr=1.0))),
        torch.linspace(0.3, 1, examples),
    )
    made = [torch.randn(examples, *shape).to(dtype) for shape in shapes]
    for _ in range(2):
        kept = KeptGradients(dict(zip(weights, made, strict=True)))
        norms = torch.stack(kept.squared_norms()).double().sum(0)
        kept.add_small(factors, sums)
        kept.add_large(weights, factors, sums)
    exact = sum(
        each.double().reshape(examples, math.prod(each.shape[1:])).square().sum(1) for each in made
    )
    assert (norms >= exact).all()
    assert (norms <= exact * (1 + 4 * torch.finfo(dtype).eps + 5e-3)).all()
    places = {p: place for buffer in sums.finish() for p, place in buffer.places.items()}
    for weight, samples in zip(weights, made, strict=True):
        expected = 2 * torch.tensordot(factors.double(), samples.double(), 1)
        off = torch.finfo(dtype).eps * expected.abs().clamp(min=1)
        assert ((places[weight].double() - expected).abs() <= 4 * off).all()


@pytest.mark.parametrize("turn", [1, -1])
def test_norms_of_gradients_in_one_type_bound_updates_in_the_narrowest(turn: int) -> None:
    """Layer norms of parameters in bf16 have gradients in float32, like other layers."""
    types = (torch.float32, torch.bfloat16)
    weights = [nn.Parameter(torch.zeros(1000, dtype=each)) for each in types]
    for number in torch.linspace(0, 0.3, 99).tolist():
        made = [torch.full((1, 1000), number), torch.ones(1, 1000)]
        [squared] = KeptGradients(dict([*zip(weights, made, strict=True)][::turn])).squared_norms()
        factor = squared.double().rsqrt()
        moves = [(factor * g).to(p.dtype).double() for p, g in zip(weights, made, strict=True)]
        assert torch.cat(moves).norm() <= 1


class Weighted(Workload):
    """The loss is the sum of outputs × weights."""

    def model(self) -> nn.Module:
        return nn.Linear(256, 1)

    def batches(self, batch_size: int) -> list[Any]:
        return []

    def losses(self, model: Any, batch: Any) -> Tensor:
        losses: Tensor = (model(batch[0]) * batch[1]).flatten(1).sum(1)
        return losses


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("trainer", ["fused", "fused:graphs=false,kernels=false", "micro_batch"])
def test_one_of_many_aligned_examples_moves_the_sum_by_the_threshold(
    trainer: str, autocast: torch.dtype | None, optimizer: Any
) -> None:
    """At bf16, 256 + 1 = 256, and 256 + 1.01 = 258."""

    def total(share: float, examples: int) -> Tensor:
        model = nn.Linear(256, 1)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        model.to(torch.float32 if autocast else torch.bfloat16)
        made = TRAINERS[trainer](
            model,
            batch_size=1,
            workload=Weighted(),
            optimizer=optimizer,
            noise_multiplier=0.0,
            sampling="poisson",
            autocast=autocast,
        )
        made.part_size = 1000  # one part
        inputs = torch.full((examples, 256), 1 / 16)
        weights = torch.cat([torch.full((8, 1), share), torch.ones(examples - 8, 1)])
        seen: list[Tensor] = []
        made.noisy_step = lambda reductions: seen.extend(
            view.flatten() for each in reductions for view in each.views(each.wait())
        )
        made.train_step((inputs.to(model.weight.dtype), weights.to(model.weight.dtype)))
        assert {each.dtype for each in seen} == {torch.float32}
        return torch.cat(seen).double()

    for share in torch.linspace(0.0, 0.9, 4).tolist():
        moved = total(share, 265) - total(share, 264)
        assert 0.9 <= float(moved.norm()) <= 1.001
