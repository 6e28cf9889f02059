"""Remembers the results and costs of operator calls, because the layers of a model repeat calls.

Two calls are equal if they run the same operator with equal arguments, inference mode and default
dtype. Tensors are equal arguments if they have the same layout and dtype, and share memory in the
same way. Without this module, counting the ``1b`` model takes two to four times as long. PyTorch's
own cache in `FakeTensorMode` is slower, because it supports all kinds of tensors. Some calls are
not remembered, for example calls with complex tensors, and calls whose result depends on values of
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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

Inputs: TypeAlias = Sequence[FakeTensor]
"""The tensors in the arguments of a call, in order."""

ResultMaker: TypeAlias = Callable[[Inputs], Any]
"""A function that creates the result of a call from the tensors in the arguments."""

NOT_MEMOIZABLE = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,  # the operator changes the shape of its argument
)


@dataclass
class Effect:
    """The result and cost of a call. A field is None until its value is known."""

    make_result: ResultMaker | None = None
    cost: Cost | None = None


class Memo:
    """Stores the results and costs of earlier calls with tensors of one `FakeTensorMode`."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._effects: dict[tuple[Any, ...], Effect] = {}

    def look_up(
        self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Effect, Inputs | None]:
        """Return the stored effect of a call, and the tensors in its arguments.

        For a new call, the fields of the effect are None. If the call cannot be remembered, the
        second value is None.
        """
        if not is_memoizable(func):
            return Effect(), None
        inputs: list[FakeTensor] = []
        settings = torch.is_inference_mode_enabled(), torch.get_default_dtype()
        try:
            arguments = self._describe((args, *kwargs, *kwargs.values()), inputs, {})
            return self._effects.setdefault((func, *settings, arguments), Effect()), inputs
        except TypeError:  # an argument is not supported or not hashable
            return Effect(), None

    def _describe(self, value: Any, inputs: list[FakeTensor], storages: dict[int, int]) -> Any:
        """Return a hashable description of an argument, with all properties that affect a result.

        Args:
            value: the argument.
            inputs: list to which the tensors in the argument are appended.
            storages: number of each storage that occurred so far. Tensors that share a storage get
                the same number.

        Raises:
            TypeError: calls with this argument cannot be remembered.
        """
        kind = type(value)
        if kind is FakeTensor:
            if not _is_plain(value) or value.fake_mode is not self._mode:
                raise TypeError
            inputs.append(value)
            storage = value.untyped_storage()
            number = storages.setdefault(storage._cdata, len(storages))
            layout = value.shape, value.stride(), value.storage_offset(), value.dtype
            return *layout, value.fake_device, number, storage.nbytes()
        if isinstance(value, Tensor):
            raise TypeError
        if kind is list or kind is tuple:
            return kind, *(self._describe(each, inputs, storages) for each in value)
        return kind, value  # the type is needed, because 1 == 1.0 == True


@cache
def is_memoizable(func: OpOverload) -> bool:
    """Return True if calls of an operator can be remembered.

    The results of such an operator depend on the layout of tensors, not on values.
    """
    return (
        func.namespace == "aten"
        and not any(tag in func.tags for tag in NOT_MEMOIZABLE)
        and not any(argument.is_out for argument in func._schema.arguments)
        and "lift" not in func.name()  # `lift` takes a tensor that is not fake
    )


def result_maker(out: Any, inputs: Inputs) -> ResultMaker | None:
    """Return a function that creates a result like ``out`` for an equal call.

    Returns None for results that no such function can create, such as complex tensors.
    """
    if isinstance(out, (list, tuple)):
        kind, parts = type(out), [part for each in out if (part := result_maker(each, inputs))]
        whole = len(parts) == len(out)
        return (lambda inputs: kind(part(inputs) for part in parts)) if whole else None
    if not isinstance(out, Tensor):
        return lambda inputs: out
    for place, tensor in enumerate(inputs):
        if tensor is out:
            return itemgetter(place)
    if type(out) is not FakeTensor or not _is_plain(out):
        return None
    storage = out.untyped_storage()
    bases = [n for n, each in enumerate(inputs) if each.untyped_storage()._cdata == storage._cdata]
    layout, offset = (tuple(out.shape), out.stride()), out.storage_offset()
    dtype, device, mode = out.dtype, out.fake_device, out.fake_mode

    def make(inputs: Inputs) -> FakeTensor:
        with no_dispatch():
            if bases:
                empty = torch.empty(0, dtype=dtype, device="meta")
                data = empty.set_(inputs[bases[0]].untyped_storage(), offset, *layout)
            else:
                data = torch.empty_strided(*layout, dtype=dtype, device="meta")
            return FakeTensor(mode, data, device)

    same_size = make(inputs).untyped_storage().nbytes() == storage.nbytes()
    return make if same_size else None  # the sizes differ if several results share a storage


def _is_plain(tensor: FakeTensor) -> bool:
    return tensor.constant is None and not (tensor.is_complex() or tensor.is_neg())
