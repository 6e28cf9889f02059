"""Sums of clipped gradients: each number counts."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from dpbench.training.gradient_sums import Sums, summed_by_row


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
        sums.put_rows(weight, torch.ones(1000, dtype=torch.long), torch.ones(1000, 2).bfloat16())
    [buffer] = sums.close()
    assert buffer.places[weight].tolist() == [[0, 0], [2000, 2000], [0, 0]]
