"""What the graphs of clip read is a copy of what was seen, if that is like the first time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dpbench.training import reductions
from dpbench.training.clip_graphs import FixedInputs, Turns, tensors_in
from dpbench.training.per_layer import Seen

FIRST, SECOND, NORM = nn.Linear(2, 2), nn.Linear(2, 2), nn.LayerNorm(2)


def seen(value: float, tokens: int = 3, *, shared: bool = True) -> dict[nn.Module, Seen]:
    """Of two layers that were given the same, or not, and of one whose gradients are kept."""
    x = torch.full((1, tokens, 2), value)
    other = x if shared else x.clone()
    calls: list[Any] = [
        [(x, x + 1)],
        [(other, x + 2)],
        [{NORM.weight: x[:, 0], NORM.bias: x[:, 1]}],
    ]
    return dict(zip((FIRST, SECOND, NORM), calls, strict=True))


def values(of: dict[nn.Module, Seen]) -> list[Tensor]:
    return [*tensors_in(of)]


def test_each_step_is_copied_to_the_same_memory() -> None:
    fixed = FixedInputs(seen(1.0))
    places = [tensor.data_ptr() for tensor in values(fixed.seen)]
    for value in (2.0, 3.0):
        assert fixed.take(seen(value))
        assert all(map(torch.equal, values(fixed.seen), values(seen(value))))
        assert [tensor.data_ptr() for tensor in values(fixed.seen)] == places
    assert [*fixed.seen[NORM][0]] == [NORM.weight, NORM.bias]


def test_a_tensor_that_two_layers_were_given_is_copied_once() -> None:
    fixed = FixedInputs(seen(1.0))
    assert fixed.seen[FIRST][0][0] is fixed.seen[SECOND][0][0]


def test_steps_that_are_not_alike_are_not_copied() -> None:
    fixed = FixedInputs(seen(1.0))
    without = seen(4.0)
    del without[NORM]
    for other in (seen(4.0, tokens=4), seen(4.0, shared=False), without):
        assert not fixed.take(other)
    assert all(map(torch.equal, values(fixed.seen), values(seen(1.0))))


def test_sums_have_memory_apart_from_those_that_are_sent() -> None:
    turns = Turns(5, torch.empty(0))
    groups = []
    for _ in range(3):
        groups.append({turns(5).data_ptr(), turns(reductions.REDUCED_TOGETHER // 4).data_ptr()})
        turns.swap()
    assert len(groups[0]) == 2
    assert groups[0] == groups[2]
    assert not groups[0] & groups[1]
