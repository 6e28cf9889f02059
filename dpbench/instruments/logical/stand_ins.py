"""Assumed values and shapes where the real ones depend on data.

A result whose *shape* depends on data (``unique``, ``nonzero``) gets its largest possible shape. A
*value* that Python asks for (``loss.item()``) is 1 or true. Notes report both. `AssumedValues` ends
loops that wait for another value.
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
"""The most values that one line may ask for in a step. Beyond these it is taken for an endless
loop."""

PATIENCE = 100  # number of true answers to one line, while a model is built
NOT_USER_CODE = (*(f"{Path(path).parent}/" for path in (__file__, torch.__file__)), "<")
"""Path prefixes of PyTorch's files and of this package's."""


class UnsupportedOperation(Exception):
    """A step cannot be counted without real data or a real device."""


class AssumedValues:
    """Answers code that asks for a tensor's value; ``asked`` counts the questions of each line.

    While a model is built, loops must end: ``nn.init.trunc_normal_`` redraws until no value is out
    of bounds. So after `PATIENCE` true answers a line gets false and true in turn. In a step every
    answer is the same, and a line that asks more than `MOST_ASKED` times gets an error.
    """

    def __init__(self) -> None:
        self.asked = Counter[tuple[str, int]]()

    def value(self, tensor: Tensor, *, counted: bool) -> bool | int | float:
        """The assumed value of a tensor with one element; ``counted`` says whether in a step."""
        frames = ((f.f_code.co_filename, line) for f, line in traceback.walk_stack(sys._getframe()))
        place = next(place for place in frames if not place[0].startswith(NOT_USER_CODE))
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


def with_positive_dims(func: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a norm with dimensions that are not negative.

    On fake tensors, PyTorch before 2.13 does not remove a reduced dimension from the result if its
    length is 1 and its index is negative.
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
"""Functions for operators whose result depends on data, by operator.

Each takes the operator's arguments. It returns a result of the largest possible shape, and a note.
"""
