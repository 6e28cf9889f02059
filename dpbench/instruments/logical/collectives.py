"""Computes how many bytes one rank sends in a collective, from the operator and its arguments.

The bytes do not depend on the values of tensors. Therefore the bytes can also be computed for
PyTorch's fake process group, which moves no data.

The message
    The message of a collective is the larger of its input and its output. The message of an
    all-gather is its output. The message of a reduce-scatter, all-reduce or broadcast is its input.

Collectives among W ranks
    In an all-gather, reduce-scatter or all-to-all (with equal parts), each rank sends (W - 1)/W of
    the message. In an all-reduce, which is a reduce-scatter and an all-gather, each rank sends
    twice as much. Unless the network itself copies or adds up data, no algorithm lets every rank
    send less. A broadcast is counted as a ring, in which each rank sends the message to the next
    rank, except the rank before the root. In a reduction to one rank, each rank except the root
    sends the message. The sources are Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms
    for clusters of workstations" (2009), and "Performance reported by NCCL tests" in NVIDIA's
    nccl-tests.

Other operators
    In a send, the sender sends the message and the receiver sends nothing. In a gather, each rank
    except the root sends its part. In a scatter, the root sends one part to each of the
    other ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch._C._distributed_c10d import ProcessGroup, _resolve_process_group

from dpbench.instruments.logical.memory import region_of, tensors
from dpbench.instruments.logical.stand_ins import UnsupportedOperation

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")

REDUCE_TO_ALL = re.compile("::all_?reduce")
SHARE_WITH_ALL = re.compile("all_?gather|::_?reduce_scatter|all_?to_?all")
PASS_ON = re.compile("::(broadcast|reduce_$|i?send)")
BY_ROOT = re.compile("::(gather|scatter)_$")
SEND_NOTHING = re.compile(
    "barrier|::i?recv|wait_tensor|check_for_nan|_wrap_tensor_autograd|mesh_get_process_group"
)
"""The five patterns match the names of operators, because PyTorch has several names for most
collectives."""


def sent_bytes(name: str, given: Mapping[str, Any], out: Any) -> int:
    """Return how many bytes this rank sends to other ranks in a call of an operator.

    Args:
        name: name of the operator, with its namespace.
        given: arguments of the call, by name.
        out: result of the call.

    Raises:
        UnsupportedOperation: the collective is unknown.
    """
    if not name.startswith(tuple(f"{each}::" for each in NAMESPACES)) or SEND_NOTHING.search(name):
        return 0
    whole = max(_bytes(value) for value in (*given.values(), out))
    if "send" in name:
        return whole
    ranks = _group(given).size()
    if PASS_ON.search(name):
        last = _root(given) - ("broadcast" in name)
        return 0 if _group(given).rank() == last % ranks else whole
    if BY_ROOT.search(name):
        if is_root(given) == ("gather" in name):
            return 0
        return whole * (ranks - 1) // ranks if is_root(given) else whole
    if REDUCE_TO_ALL.search(name):
        return 2 * whole * (ranks - 1) // ranks
    if SHARE_WITH_ALL.search(name):
        return whole * (ranks - 1) // ranks
    raise UnsupportedOperation(f"dpbench has no formula for the bytes that {name} sends")


def _bytes(value: Any) -> int:
    return sum(region_of(tensor)[1] for tensor in tensors(value))


def is_root(given: Mapping[str, Any]) -> bool:
    """Return True if this rank is the root of a collective with these arguments."""
    return _group(given).rank() == _root(given)


def _root(given: Mapping[str, Any]) -> int:
    return int(given["root_rank"] if "root_rank" in given else given["src"])


def _group(given: Mapping[str, Any]) -> ProcessGroup:
    """Return the process group of a collective with these arguments."""
    if (group := given.get("process_group")) is not None:
        return ProcessGroup.unbox(group)
    named = given["group_name"]
    return named if isinstance(named, ProcessGroup) else _resolve_process_group(named)
