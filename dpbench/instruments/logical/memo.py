"""Remembers the effects of operator calls, because layers, trainers and cases repeat them.

Two calls are equal if they run one operator on tensors of the same shapes, strides and dtypes that
share memory in the same way. Without this memo, counting the ``1b`` model takes two to four times
as long: the cache of `FakeTensorMode` is slow, because it handles every kind of tensor. Calls with
complex tensors, or whose result depends on data, are not remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

from dpbench.instruments.logical.costs import Cost

Given: TypeAlias = Sequence[FakeTensor]
"""The tensors among a call's arguments, in order."""

Answer: TypeAlias = Callable[[FakeTensorMode, Given], Any]
"""Makes the result of a call from the mode and the call's tensors."""

UNUSUAL = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,  # changes the shape of its argument
)


@dataclass
class Effect:
    """The result and cost of a call; None until known."""

    answer: Answer | None = None
    cost: Cost | None = None


@lru_cache(maxsize=1 << 15)  # a step has a thousand different calls
def effect_of(*call: object) -> Effect:
    """The effect of a call: one object for all equal calls in this process."""
    return Effect()


class Memo:
    """Looks up the effects of calls on the tensors of one mode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode

    def look_up(
        self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], in_step: bool
    ) -> tuple[Effect, Given | None]:
        """The effect of a call, and its tensors, which are None if it cannot be remembered.

        ``in_step`` says that a step runs. Otherwise constants keep their values.
        """
        if not is_usual(func):
            return Effect(), None
        given: list[FakeTensor] = []
        settings = in_step, torch.is_inference_mode_enabled(), torch.get_default_dtype()
        try:
            arguments = self._describe((args, *kwargs, *kwargs.values()), given, {})
            return effect_of(func, *settings, arguments), given
        except TypeError:  # from `_describe`, or not hashable
            return Effect(), None

    def _describe(self, value: Any, given: list[FakeTensor], storages: dict[int, int]) -> Any:
        """Describe an argument by all that a result depends on.

        ``storages`` numbers storages, which tensors may share. A TypeError says that a tensor is
        of a kind that is not remembered.
        """
        kind = type(value)
        if kind is FakeTensor:
            if not _is_plain(value) or value.fake_mode is not self._mode:
                raise TypeError
            given.append(value)
            storage = value.untyped_storage()
            number = storages.setdefault(storage._cdata, len(storages))
            layout = value.shape, value.stride(), value.storage_offset(), value.dtype
            return *layout, value.fake_device, number, storage.nbytes()
        if isinstance(value, Tensor):
            raise TypeError
        if kind is list or kind is tuple:
            return kind, *(self._describe(each, given, storages) for each in value)
        return kind, value  # with its type, because 1 == 1.0 == True


@cache
def is_usual(func: OpOverload) -> bool:
    """Whether an operator's result depends on its arguments' layout, not on their values."""
    return (
        func.namespace == "aten"
        and not any(tag in func.tags for tag in UNUSUAL)
        and not any(argument.is_out for argument in func._schema.arguments)
        and "lift" not in func.name()  # takes a tensor from outside
    )


def answer(out: Any, given: Given) -> Answer | None:
    """Make a function that returns a result like ``out`` for an equal call; None if impossible."""
    if isinstance(out, (list, tuple)):
        kind, parts = type(out), [part for each in out if (part := answer(each, given))]
        whole = len(parts) == len(out)
        return (lambda *call: kind(part(*call) for part in parts)) if whole else None
    if not isinstance(out, Tensor):
        return lambda mode, given: out
    for place, tensor in enumerate(given):
        if tensor is out:
            return lambda mode, given: given[place]
    if type(out) is not FakeTensor or not _is_plain(out):
        return None
    storage = out.untyped_storage()
    bases = [n for n, each in enumerate(given) if each.untyped_storage()._cdata == storage._cdata]
    layout, offset = (tuple(out.shape), out.stride()), out.storage_offset()
    dtype, device = out.dtype, out.fake_device

    def make(mode: FakeTensorMode, given: Given) -> FakeTensor:
        with no_dispatch():
            if bases:
                empty = torch.empty(0, dtype=dtype, device="meta")
                data = empty.set_(given[bases[0]].untyped_storage(), offset, *layout)
            else:
                data = torch.empty_strided(*layout, dtype=dtype, device="meta")
            return FakeTensor(mode, data, device)

    same_size = make(out.fake_mode, given).untyped_storage().nbytes() == storage.nbytes()
    return make if same_size else None  # None: parts of a result share a storage


def _is_plain(tensor: FakeTensor) -> bool:
    return tensor.constant is None and not (tensor.is_complex() or tensor.is_neg())
