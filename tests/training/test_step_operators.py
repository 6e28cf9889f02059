"""Operators of a captured step are compared with those of an eager step."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from dpbench.training.step_operators import StepOperators, first_difference


def operators(query: Tensor, *, causal: bool = True, scale: float = 1.0) -> StepOperators:
    with StepOperators() as recorded:
        F.scaled_dot_product_attention(query, query, query, is_causal=causal, scale=scale)
    return recorded


def test_shapes_types_and_plain_values_must_be_equal_and_nothing_else() -> None:
    query = torch.randn(1, 2, 8, 4)
    calls = operators(query).calls
    assert not first_difference(calls, operators(query + 1).calls)
    assert not first_difference(
        operators(query, scale=math.nan).calls, operators(query, scale=math.nan).calls
    )
    for other in (
        operators(query[..., :4, :]),
        operators(query.double()),
        operators(query, causal=False),
        operators(query, scale=0.5),
    ):
        assert first_difference(calls, other.calls)


def test_the_first_difference_is_named_with_its_arguments() -> None:
    ones = torch.ones(2, 3)
    with StepOperators() as eager:
        ones.add(1).mul(2)
    with StepOperators() as captured:
        ones.add(1).sum(0)
    difference = first_difference(captured.calls, eager.calls)
    assert difference == "aten.sum(float32[2, 3], 0) instead of aten.mul(float32[2, 3], 2)"
    assert first_difference(captured.calls, []).endswith("instead of no operator")


def test_backward_operators_are_recorded() -> None:
    weight = torch.ones(2, 3, requires_grad=True)
    loss = (torch.ones(4, 2) @ weight).sum()
    with StepOperators() as recorded:
        loss.backward()
    assert torch.ops.aten.mm.default in [function for function, _ in recorded.calls]


def test_random_numbers_of_the_cpu_are_noticed() -> None:
    with StepOperators() as recorded:
        F.dropout(torch.ones(3), 0.5)
    assert recorded.draws_on_cpu == "aten.bernoulli_"
    with StepOperators() as recorded:
        torch.ones(3) + 1
    assert not recorded.draws_on_cpu
