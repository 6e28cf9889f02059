"""Computes the cost of an operator call: bytes moved, FLOPs, and bytes sent to other ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch._ops import HigherOrderOperator, OpOverload

from dpbench.instruments.logical import rules
from dpbench.instruments.logical.collectives import sent_bytes
from dpbench.instruments.logical.flops import flops, lacks_formula
from dpbench.instruments.logical.memory import is_wrapper, parts, region_of, tensors
from dpbench.instruments.logical.stand_ins import UnsupportedOperation


class Cost(NamedTuple):
    """The cost of an operator call.

    Attributes:
        read_bytes: bytes that the operator reads.
        write_bytes: bytes that the operator writes.
        flops: number of floating-point operations.
        collective_bytes: bytes that this rank sends to other ranks.
        dtype: dtype of the first floating-point operand, or "" if the call has no FLOPs or no
            floating-point operand.
    """

    read_bytes: int
    write_bytes: int
    flops: int
    collective_bytes: int
    dtype: str = ""


def cost(
    func: OpOverload | HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> Cost:
    """Return the cost of a call with the result ``out``.

    An operator that takes functions as arguments, such as ``flex_attention``, is counted by the
    general rule of `rules`, because torch.compile makes one kernel from the operator. If the
    operator has no FLOP formula, an error is raised.
    """
    if isinstance(func, HigherOrderOperator):
        if lacks_formula(func):
            raise UnsupportedOperation("the operator calls functions that are not counted")
        sizes = ({*map(region_of, tensors(value))} for value in ((args, *kwargs.values()), out))
        read, written = (sum(size for _, size in regions) for regions in sizes)
        return Cost(read, written, flops(func, args, kwargs, out), 0, _dtype(args))
    moved = rules.bytes_moved(func, args, kwargs, out)
    crossed = sent_bytes(rules.operator_name(func), rules.arguments_of(func, args, kwargs), out)
    operations = flops(func, args, kwargs, out)
    return Cost(*moved, operations, crossed, _dtype(args) if operations else "")


def cost_by_subclass(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> Cost:
    """Return the cost of a call that a tensor subclass ran without operators that were received.

    Raises:
        UnsupportedOperation: the result has new data, but its tensors have no memory of their own.
    """
    used, made = [*tensors([*args, *kwargs.values()])], [*tensors(out)]
    if not any(map(is_wrapper, (*used, *made))):
        return cost(func, args, kwargs, out)
    old, new = ({id(part) for each in all_ for part in parts(each)} for all_ in (used, made))
    if new - old and not rules.is_free(func):
        raise UnsupportedOperation("a subclass of Tensor ran operators that were not seen")
    return Cost(0, 0, 0, 0)


def _dtype(args: Any) -> str:
    """Return the name of the dtype of the first floating-point operand, such as ``float32``."""
    operands = (each for each in tensors(args) if each.is_floating_point())
    return str(next((each.dtype for each in operands), "")).removeprefix("torch.")
