"""Sums of clipped gradients: each number counts."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpbench.training.clipped_sums import (
    LARGE,
    KeptGradients,
    Sums,
    in_buffers,
    summed_by_row,
)


@given(st.lists(st.integers(0, 5), max_size=30))
def test_rows_that_are_named_again_are_summed_and_all_others_are_zeros(named: list[int]) -> None:
    rows = torch.tensor(named).long()
    totals = torch.arange(1.0, len(named) + 1)[:, None].repeat(1, 3)
    expected = torch.zeros(6, 3).index_add_(0, rows, totals)
    once, sums = summed_by_row(rows, totals.bfloat16())
    assert torch.equal(torch.zeros(6, 3).index_add_(0, once, sums), expected)
    assert len(once[sums.any(1)].unique()) == int(sums.any(1).sum()) == len({*named})


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
