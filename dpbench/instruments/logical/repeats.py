"""Remembers what operators did, so that the same call again need not be worked out.

A model of many layers makes the same calls over and over: with tensors of the same shapes, strides
and dtypes that share memory in the same way, an operator returns the same kinds of tensors, moves
as many bytes and does as much arithmetic. `FakeTensorMode` has a cache as well, but its keys and
results, made for every kind of tensor, take three quarters of the time of counting. Here unusual
calls (complex tensors, results that depend on data) are not remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

from dpbench.instruments.logical.costs import Cost

Given: TypeAlias = Sequence[FakeTensor]
"""The tensors that a call is given, those in lists too, in order."""

Answer: TypeAlias = Callable[[Given], Any]
"""Makes the result of a call."""

UNUSUAL = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,  # changes the shape of its argument
)


@dataclass
class Effect:
    """What a call does, as far as it is known."""

    answer: Answer | None = None
    cost: Cost | None = None


class Unusual(Exception):
    """A call that is not remembered."""


class Repeats:
    """The effects of the calls on the tensors of one mode."""

    def __init__(self, fake: FakeTensorMode) -> None:
        self._fake = fake
        self._effects: dict[tuple[Any, ...], Effect] = {}

    def look_up(
        self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Effect, Given | None]:
        """The effect of such a call, and its tensors, None if it is unusual."""
        if not is_usual(func):
            return Effect(), None
        given: list[FakeTensor] = []
        key = [id(func), torch.is_inference_mode_enabled(), torch.get_default_dtype(), *kwargs]
        try:
            self._describe((*args, *kwargs.values()), key, given, {})
            effect = self._effects.get(call := tuple(key))
        except (Unusual, TypeError):  # not hashable
            return Effect(), None
        if effect is None:
            effect = self._effects[call] = Effect()
        return effect, given

    def _describe(
        self, values: Iterable[Any], key: list[Any], given: list[FakeTensor], ids: dict[int, int]
    ) -> None:
        """Add to a key what a result can depend on; ``ids`` number the storages."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                foreign = value.fake_mode is not self._fake
                if foreign or value.constant is not None or value.is_neg():
                    raise Unusual
                storage = value.untyped_storage()
                memory = ids.setdefault(storage._cdata, len(ids))
                key += (value.shape, value.stride(), value.storage_offset(), value.dtype)
                key += (value.fake_device, memory, storage.nbytes())
                given.append(value)
            elif kind is list or kind is tuple:
                key += (kind, len(value))
                self._describe(value, key, given, ids)
            elif isinstance(value, Tensor):
                raise Unusual
            else:
                key += (kind, value)  # with its type, for 1 == 1.0 == True


@cache
def is_usual(func: OpOverload) -> bool:
    """Whether what an operator returns depends on what its arguments are, not on their values."""
    return (
        func.namespace == "aten"
        and not any(tag in func.tags for tag in UNUSUAL)
        and not any(argument.is_out for argument in func._schema.arguments)
        and "lift" not in func.name()  # takes a tensor from outside
    )


def answer(out: Any, given: Given) -> Answer | None:
    """What makes a result like this one from the tensors of another call; None if it is unusual."""
    try:
        return _answer(out, given, set())
    except Unusual:
        return None


def _answer(out: Any, given: Given, made: set[int]) -> Answer:
    """See `answer`; ``made`` are the new storages in the result so far."""
    if type(out) in (list, tuple):
        kind, parts = type(out), [_answer(each, given, made) for each in out]
        return lambda given: kind(part(given) for part in parts)
    if not isinstance(out, Tensor):
        return lambda given: out
    place = next((place for place, tensor in enumerate(given) if tensor is out), None)
    if place is not None:
        return itemgetter(place)
    if not isinstance(out, FakeTensor) or out.constant is not None:
        raise Unusual
    if out.requires_grad or out.is_complex() or out.is_neg():
        raise Unusual
    storage = out.untyped_storage()
    storages = [tensor.untyped_storage()._cdata for tensor in given]
    if storage._cdata in storages:
        return _view(out, storages.index(storage._cdata))
    new = _new(out)
    if storage._cdata in made or new(()).untyped_storage().nbytes() != storage.nbytes():
        raise Unusual
    made.add(storage._cdata)
    return new


def _new(like: FakeTensor) -> Answer:
    """Makes tensors like one, each with memory of its own."""
    shape, stride, dtype, wrap = tuple(like.shape), like.stride(), like.dtype, _wrapping(like)

    def make(given: Given) -> FakeTensor:
        with no_dispatch():
            return wrap(torch.empty_strided(shape, stride, dtype=dtype, device="meta"))

    return make


def _view(like: FakeTensor, base: int) -> Answer:
    """Makes tensors like one, in the memory of a tensor that is given."""
    where, dtype = (like.storage_offset(), tuple(like.shape), like.stride()), like.dtype
    wrap = _wrapping(like)

    def make(given: Given) -> FakeTensor:
        with no_dispatch():
            data = torch.empty(0, dtype=dtype, device="meta")
            return wrap(data.set_(given[base].untyped_storage(), *where))

    return make


def _wrapping(like: FakeTensor) -> Callable[[Tensor], FakeTensor]:
    """Makes fake tensors of meta tensors, as FakeTensor's constructor does, in less time."""
    state, device = dict(vars(like)), like.fake_device

    def wrap(data: Tensor) -> FakeTensor:
        tensor: FakeTensor = Tensor._make_subclass(
            FakeTensor, data, False, dispatch_device=True, device_for_backend_keys=device
        )
        vars(tensor).update(state)
        return tensor

    return wrap
