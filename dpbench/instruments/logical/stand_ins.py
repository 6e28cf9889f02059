"""Values and shapes that are assumed where the real ones depend on data, which does not exist.

A result whose *shape* depends on data (``unique``, ``nonzero``) is the largest that it can be. A
*value* that Python asks for (``loss.item()``) is 1, or true. Both are noted, with the number that
was assumed. A loop that waits for another value would never end: see `AssumedValues`.
"""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

MOST_ASKED = 10_000
"""How often one line may ask for values in a step before its loop is taken to be endless."""

PATIENCE = 100  # how often one line is told, while a model is built, that a condition holds
BETWEEN = (*(f"{Path(path).parent}/" for path in (__file__, torch.__file__)), "<")
"""How the paths of PyTorch's and of this package's files begin, which are not a user's lines."""


class UnsupportedOperation(Exception):
    """A step does something that cannot be counted without running it for real."""


class AssumedValues:
    """Answers code that asks for a tensor's value; ``asked`` counts by line since a step began.

    While a model is built, its loops must end: ``nn.init.trunc_normal_`` draws again until *no*
    value is out of bounds. So a line that was told `PATIENCE` times that a condition holds is told
    false and true in turn from then on. In a step every answer is the same, and a line that asks
    more than `MOST_ASKED` times ends in an error that names it.
    """

    def __init__(self) -> None:
        self.asked = Counter[tuple[str, int]]()

    def value(self, tensor: Tensor, *, counted: bool) -> bool | int | float:
        """What a tensor of one element is taken to hold; ``counted`` within a step."""
        frames = ((f.f_code.co_filename, line) for f, line in traceback.walk_stack(sys._getframe()))
        place = next(place for place in frames if not place[0].startswith(BETWEEN))
        self.asked[place] += 1
        times = self.asked[place]
        if times > MOST_ASKED:
            raise UnsupportedOperation(
                f"asked {MOST_ASKED} times for the value of a tensor, which does not exist here "
                f"and is taken to be 1: a loop that waits for another value does not end"
            )
        if tensor.dtype is torch.bool:
            return counted or times <= PATIENCE or times % 2 == 0
        return 1.0 if tensor.is_floating_point() or tensor.is_complex() else 1


def from_the_first(func: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a norm with its dimensions counted from the first.

    Without data, PyTorch before 2.13 keeps one of length 1 that is counted from the last.
    """
    if func is not torch.ops.aten.linalg_vector_norm.default or len(args) < 3 or args[2] is None:
        return args
    tensor, order, dims, *others = args
    return tensor, order, [dim % max(tensor.dim(), 1) for dim in dims], *others


def _unique_dim(
    self: Tensor, dim: int, sorted: bool = True, inverse: bool = False, counts: bool = False
) -> tuple[Any, str]:
    rows = self.shape[dim]
    out = (torch.empty_like(self), *(_index(rows if wanted else 0) for wanted in (inverse, counts)))
    return out, f"all {rows} rows were taken to be distinct"


def _unique(
    self: Tensor, sorted: bool = True, inverse: bool = False, counts: bool = False
) -> tuple[Any, str]:
    size = self.numel()
    wheres = _index(*self.shape) if inverse else _index(0)
    out = (self.new_empty(size), wheres, _index(size if counts else 0))
    return out, f"all {size} values were taken to be distinct"


def _unique_consecutive(
    self: Tensor, inverse: bool = False, counts: bool = False, dim: int | None = None
) -> tuple[Any, str]:
    if dim is None:
        return _unique(self, True, inverse, counts)
    return _unique_dim(self, dim, True, inverse, counts)


def _nonzero(self: Tensor) -> tuple[Any, str]:
    return _index(self.numel(), self.dim()), f"all {self.numel()} were taken to be nonzero"


def _masked_select(self: Tensor, mask: Tensor) -> tuple[Any, str]:
    size = torch.broadcast_shapes(self.shape, mask.shape).numel()
    return self.new_empty(size), f"all {size} were taken to be selected"


def _select(self: Tensor, indices: list[Tensor | None]) -> tuple[Any, str]:
    positions: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            positions += [_index(index.numel())] * index.dim()
        else:
            positions.append(index)
    out = torch.ops.aten.index.Tensor(self, positions)
    return out, "every element of a mask was taken to be true"


def _index(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device="cpu")


_aten = torch.ops.aten
STAND_INS: Mapping[OpOverload, Callable[..., tuple[Any, str]]] = {
    _aten.unique_dim.default: _unique_dim,
    _aten._unique2.default: _unique,
    _aten.unique_consecutive.default: _unique_consecutive,
    _aten.nonzero.default: _nonzero,
    _aten.masked_select.default: _masked_select,
    _aten.index.Tensor: _select,
}
"""For operators whose result depends on data: a result of the largest possible shape, and what
that assumes. The parameters are those of the operator's schema, in its order."""
