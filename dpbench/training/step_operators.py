"""Records the operators of a part of a step, to compare a captured step with an eager one."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

READ = torch.ops.aten._local_scalar_dense.default
"""The operator by which Python reads one number from a tensor, e.g. with ``item()``."""

Call = tuple[Any, tuple[object, ...]]
"""An operator, and its arguments: of a tensor, its shape and dtype; of a float, its text, because
NaN is unequal to itself."""


class StepOperators(TorchDispatchMode):
    """Records the operators that run in this context, and the numbers that Python reads.

    Args:
        numbers: numbers that Python has read from the GPU in an eager step. If given, they answer
            the reads in this context, because a read from the GPU would end a capture. The tensors
            that would have been read are kept, so that a later step can compare them.
    """

    supports_higher_order_operators = True

    def __init__(self, numbers: Sequence[Any] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.numbers: list[Any] = []
        self.unread: list[Tensor] = []
        """For each read that ``numbers`` answered, a copy of the tensor."""
        self.places: list[str] = []
        """File and line of each read."""
        self.draws_on_cpu = ""
        """An operator that drew random numbers on the CPU, which a replay does not draw again."""
        self._answers = numbers

    def __torch_dispatch__(
        self,
        function: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        self.calls.append((function, (*map(described, pytree.tree_leaves((args, kwargs))),)))
        if function is READ and args[0].is_cuda:
            return self._read(args[0])
        returned = function(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in getattr(function, "tags", ()):
            # Attention on a GPU also returns its seed, which is on the CPU.
            tensors = [each for each in pytree.tree_leaves(returned) if isinstance(each, Tensor)]
            if all(each.device.type == "cpu" for each in tensors):
                self.draws_on_cpu = name_of(function)
        return returned

    def _read(self, tensor: Tensor) -> Any:
        if self._answers is None or len(self.numbers) >= len(self._answers):
            number = READ(tensor)
        else:
            number = self._answers[len(self.numbers)]
            self.unread.append(tensor.clone())
        self.numbers.append(number)
        self.places.append(place_of_user(traceback.extract_stack()))
        return number


def described(argument: object) -> object:
    """Return what must be equal about an operator's argument at capture and in an eager step."""
    if isinstance(argument, Tensor):
        return argument.shape, argument.dtype
    if argument is None or isinstance(argument, (bool, int, str, torch.dtype, torch.device)):
        return argument
    return str(argument) if isinstance(argument, float) else type(argument)


def place_of_user(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return file and line of the last frame outside torch and dpbench, or an empty text."""
    own = tuple(str(Path(file).parent) for file in (torch.__file__, __file__))
    of_user = [frame for frame in frames if not frame.filename.startswith(own)]
    return f"{of_user[-1].filename}:{of_user[-1].lineno}" if of_user else ""


def first_difference(captured: Sequence[Call], eager: Sequence[Call]) -> str:
    """Return where captured operators differ from those of an eager step, or an empty text."""
    for ours, theirs in zip_longest(captured, eager):
        if ours != theirs:
            return f"{shown(ours)} instead of {shown(theirs)}"
    return ""


def shown(call: Call | None) -> str:
    """Return an operator and its arguments for a message."""
    if call is None:
        return "no operator"
    function, arguments = call
    each = [
        f"{str(a[1]).removeprefix('torch.')}{[*a[0]]}" if isinstance(a, tuple) else str(a)
        for a in arguments
    ]
    return f"{name_of(function)}({', '.join(each)})"


def name_of(function: Any) -> str:
    """Return an operator's name without its overload, e.g. ``aten.mm``."""
    packet = getattr(function, "overloadpacket", function)
    return str(packet)
