"""The cost of one operator call: bytes moved, operations, bytes sent."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch._ops import HigherOrderOperator, OpOverload

from dpbench.instruments.logical import rules
from dpbench.instruments.logical.collectives import sent
from dpbench.instruments.logical.flops import flops, is_unknown
from dpbench.instruments.logical.memory import region_of, tensors
from dpbench.instruments.logical.stand_ins import UnsupportedOperation


class Cost(NamedTuple):
    """Bytes read and written, floating-point operations, and bytes sent to other ranks.

    ``dtype`` is the type of the operands where there are operations, else empty.
    """

    read_bytes: int
    write_bytes: int
    flops: int
    collective_bytes: int
    dtype: str = ""


def cost(
    func: OpOverload | HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> Cost:
    """The cost of a call that returned ``out``.

    An operator that takes functions (``flex_attention``) is counted by the general rule, as the one
    kernel that torch.compile makes of it. Its FLOP formula must be known.
    """
    if isinstance(func, HigherOrderOperator):
        if is_unknown(func):
            raise UnsupportedOperation("the functions that it calls are not counted")
        sizes = ({*map(region_of, tensors(value))} for value in ((args, *kwargs.values()), out))
        read, written = (sum(size for _, size in regions) for regions in sizes)
        return Cost(read, written, flops(func, args, kwargs, out), 0, _dtype(args))
    moved = rules.traffic(func, args, kwargs, out)
    crossed = sent(rules.operator_name(func), rules.arguments_of(func, args, kwargs), out)
    operations = flops(func, args, kwargs, out)
    return Cost(*moved, operations, crossed, _dtype(args) if operations else "")


def _dtype(args: Any) -> str:
    """The type of the first operand with floating-point numbers, e.g. ``float32``."""
    operands = (each for each in tensors(args) if each.is_floating_point())
    return str(next((each.dtype for each in operands), "")).removeprefix("torch.")
