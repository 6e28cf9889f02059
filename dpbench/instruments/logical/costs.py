"""What a finished call has moved, computed and sent."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from dpbench.instruments.logical import rules
from dpbench.instruments.logical.collectives import sent


class Cost(NamedTuple):
    """What one call moves, computes and sends to other ranks."""

    read_bytes: int
    write_bytes: int
    flops: int
    collective_bytes: int


def cost(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Cost:
    """What a call moves, computes and sends."""
    formula = flop_formula(func)
    flops = int(formula(*with_own_keys(func, args), **kwargs, out_val=out)) if formula else 0
    moved = rules.traffic(func, args, kwargs, out)
    return Cost(*moved, flops, sent(func, args, kwargs, out))


@cache
def flop_formula(func: OpOverload) -> Callable[..., int] | None:
    """PyTorch's own formula for an operator's floating-point operations, if it has one.

    There are some for matrix products, convolutions and attention (`torch.utils.flop_counter`).
    They count a multiply-add as two, and do not halve causal attention.
    """
    # The CPU's fused attention takes its operands in the same order as CUDA's.
    name = str(func.overloadpacket).replace("_for_cpu", "")
    return next((formula for known, formula in flop_registry.items() if str(known) == name), None)


def with_own_keys(func: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The operands of attention as shapes, with a key for each head, which computes as much.

    PyTorch's formulas refuse keys that several heads share before 2.12.
    """
    if "scaled_dot_product" not in str(func):
        return args
    heads = args[0].shape[1]  # of the query, or in backward of the output's gradient

    def shape(value: Any) -> Any:
        return (value.shape[0], heads, *value.shape[2:]) if isinstance(value, Tensor) else value

    return *map(shape, args[:4]), *args[4:]
