"""Assumes values of tensors, and shapes that depend on values, because fake tensors have no values.

If the *shape* of a result depends on values (``unique``, ``nonzero``), the result gets its largest
possible shape. If Python code reads a *value* (``loss.item()``) in a step, the value is 1 or True.
Notes report the assumptions of a step. `AssumedValues` ends loops that wait for another value.
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

MAX_QUESTIONS = 10_000
"""Largest number of values that a source line may read in a step, or while a model is built.

A line that reads more values raises an error, because it is probably in an endless loop.
"""

# While a model is built, a source line reads True this many times, then False and True in turn.
TRUE_ANSWERS = 100
NOT_USER_CODE = (*(f"{Path(path).parent}/" for path in (__file__, torch.__file__)), "<")
"""Path prefixes of the files of PyTorch and of this folder, and of code without a file."""


class UnsupportedOperation(Exception):
    """A step cannot be counted without values of tensors or without a GPU."""


class AssumedValues:
    """Returns assumed values to code that reads the value of a tensor.

    While a model is built, loops must end. For example, ``nn.init.trunc_normal_`` draws numbers
    until no number is out of bounds. Therefore, after a source line has read True `TRUE_ANSWERS`
    times, the line reads False and True alternately. In a step, all assumed values of a dtype are
    equal. A line that reads more than `MAX_QUESTIONS` values raises an error.

    Attributes:
        asked: number of values that each source line has read since the last step began.
    """

    def __init__(self) -> None:
        self.asked = Counter[tuple[str, int]]()

    def value(self, tensor: Tensor, *, counted: bool) -> bool | int | float:
        """Return the assumed value of a tensor with one element.

        Args:
            tensor: the tensor.
            counted: True while a step is counted, False while a model is built.
        """
        frames = ((f.f_code.co_filename, line) for f, line in traceback.walk_stack(sys._getframe()))
        place = next(place for place in frames if not place[0].startswith(NOT_USER_CODE))
        self.asked[place] += 1
        times = self.asked[place]
        if times > MAX_QUESTIONS:
            raise UnsupportedOperation(
                f"the code has read the value of a tensor {MAX_QUESTIONS} times. The step is "
                f"counted without values, so each value is assumed to be 1, and a loop that waits "
                f"for another value does not end"
            )
        if tensor.dtype is torch.bool:
            return counted or times <= TRUE_ANSWERS or times % 2 == 0
        return 1.0 if tensor.is_floating_point() or tensor.is_complex() else 1


def with_positive_dims(func: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a norm, with negative indices of dimensions made positive.

    On fake tensors, PyTorch before 2.13 computes a wrong shape for a negative index, because a
    reduced dimension of length 1 stays in the result. For other operators, the arguments are
    returned unchanged.
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
    return out, "all rows differ"


def _unique(
    self: Tensor, sorted: bool = True, inverse: bool = False, counts: bool = False
) -> tuple[Any, str]:
    size = self.numel()
    wheres = _index(*self.shape) if inverse else _index(0)
    out = (self.new_empty(size), wheres, _index(size if counts else 0))
    return out, "all values differ"


def _unique_consecutive(
    self: Tensor, inverse: bool = False, counts: bool = False, dim: int | None = None
) -> tuple[Any, str]:
    if dim is None:
        return _unique(self, True, inverse, counts)
    return _unique_dim(self, dim, True, inverse, counts)


def _nonzero(self: Tensor) -> tuple[Any, str]:
    return _index(self.numel(), self.dim()), "all values are nonzero"


def _masked_select(self: Tensor, mask: Tensor) -> tuple[Any, str]:
    size = torch.broadcast_shapes(self.shape, mask.shape).numel()
    return self.new_empty(size), "all values are selected"


def _select(self: Tensor, indices: list[Tensor | None]) -> tuple[Any, str]:
    positions: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            positions += [_index(index.numel())] * index.dim()
        else:
            positions.append(index)
    out = torch.ops.aten.index.Tensor(self, positions)
    return out, "masks are True everywhere"


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
"""Replacements of operators whose result has a shape that depends on values, by operator.

Each function takes the arguments of the operator, and returns a result with the largest possible
shape and the assumption.
"""
