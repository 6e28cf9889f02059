"""How many bytes one rank sends in a collective, by its operator and what that is given.

Sizes come from tensors' shapes, not from what a network moved: a count with a fake process group
and one of ranks that train for real are the same.

The whole
    A collective is about a whole tensor: what a gather makes, what a scatter is given, what an
    all-reduce or broadcast is given. So it is the larger of what goes in and what comes out.

The ring
    Of W ranks each sends (W - 1)/W of the whole in an all-gather, reduce-scatter or all-to-all, and
    twice that in an all-reduce, which is a scatter and a gather: no algorithm sends less by rank. A
    broadcast sends the whole, which each rank but the last passes on to the next, as does a
    reduction to one rank. (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for
    clusters of workstations", 2009; "Performance reported by NCCL tests" in NVIDIA's nccl-tests.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch._C._distributed_c10d import ProcessGroup, _resolve_process_group
from torch._ops import OpOverload

from dpbench.instruments.logical.regions import region_of, tensors
from dpbench.instruments.logical.rules import arguments_of, operator_name
from dpbench.instruments.logical.stand_ins import UnsupportedOperation

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")

REDUCE_TO_ALL = re.compile("::all_?reduce")
SHARE_WITH_ALL = re.compile("all_?gather|::_?reduce_scatter|all_?to_?all")
PASS_ON = re.compile("::(broadcast|reduce_$|i?send)")
SEND_NOTHING = re.compile(
    "barrier|::i?recv|wait_tensor|check_for_nan|_wrap_tensor_autograd|mesh_get_process_group"
)
"""What the names of operators have in them, in all spellings of a collective."""


def sent(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    """The bytes that this rank sends in a finished call; ``out`` is what it returned.

    Raises:
        UnsupportedOperation: a collective that is not known here.
    """
    name = operator_name(func)
    if func.namespace not in NAMESPACES or SEND_NOTHING.search(name):
        return 0
    given = arguments_of(func, args, kwargs)
    whole = max(_bytes(value) for value in (*given.values(), out))
    if PASS_ON.search(name):
        return whole
    ranks = _ranks(given)
    if REDUCE_TO_ALL.search(name):
        return 2 * whole * (ranks - 1) // ranks
    if SHARE_WITH_ALL.search(name):
        return whole * (ranks - 1) // ranks
    raise UnsupportedOperation(f"nothing is known of what {name} sends")


def _bytes(value: Any) -> int:
    return sum(region_of(tensor)[1] for tensor in tensors(value))


def _ranks(given: Mapping[str, Any]) -> int:
    """How many ranks take part in a collective with these arguments."""
    if (group := given.get("process_group")) is not None:
        return ProcessGroup.unbox(group).size()
    named = given["group_name"]
    return (named if isinstance(named, ProcessGroup) else _resolve_process_group(named)).size()
