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

from collections.abc import Mapping
from typing import Any

from torch._C._distributed_c10d import ProcessGroup, _resolve_process_group
from torch._ops import OpOverload

from dpbench.instruments.logical.regions import region_of, tensors
from dpbench.instruments.logical.rules import arguments_of, names, operator_name
from dpbench.instruments.logical.stand_ins import UnsupportedOperation

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")

REDUCE_TO_ALL = names(
    """
    c10d::allreduce_ c10d::allreduce_coalesced_
    _c10d_functional::all_reduce _c10d_functional::all_reduce_
    _c10d_functional::all_reduce_coalesced _c10d_functional::all_reduce_coalesced_
    """
)

SHARE_WITH_ALL = names(
    """
    c10d::_allgather_base_ c10d::allgather_ c10d::allgather_coalesced_
    c10d::allgather_into_tensor_coalesced_
    c10d::_reduce_scatter_base_ c10d::reduce_scatter_ c10d::reduce_scatter_tensor_coalesced_
    c10d::alltoall_base_ c10d::alltoall_
    _c10d_functional::all_gather_into_tensor _c10d_functional::all_gather_into_tensor_out
    _c10d_functional::all_gather_into_tensor_coalesced _c10d_functional::reduce_scatter_tensor
    _c10d_functional::reduce_scatter_tensor_out _c10d_functional::reduce_scatter_tensor_coalesced
    _c10d_functional::all_to_all_single _c10d_functional_autograd::all_to_all_single
    _c10d_functional_autograd::all_gather_into_tensor
    _c10d_functional_autograd::reduce_scatter_tensor _dtensor::shard_dim_alltoall
    """
)

PASS_ON = names(
    """
    c10d::broadcast_ c10d::reduce_ c10d::send
    _c10d_functional::broadcast _c10d_functional::broadcast_ _c10d_functional::isend
    """
)

SEND_NOTHING = names(
    """
    c10d::barrier c10d::monitored_barrier_ c10d::recv_ c10d::recv_any_source_ c10d::check_for_nan
    _c10d_functional::irecv _c10d_functional::wait_tensor _c10d_functional::_wrap_tensor_autograd
    _dtensor::mesh_get_process_group
    """
)


def sent(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    """The bytes that this rank sends in a finished call; ``out`` is what it returned.

    Raises:
        UnsupportedOperation: a collective that is not known here.
    """
    name = operator_name(func)
    if func.namespace not in NAMESPACES or name in SEND_NOTHING:
        return 0
    given = arguments_of(func, args, kwargs)
    whole = max(_bytes(value) for value in (*given.values(), out))
    if name in PASS_ON:
        return whole
    ranks = _ranks(given)
    if name in REDUCE_TO_ALL:
        return 2 * whole * (ranks - 1) // ranks
    if name in SHARE_WITH_ALL:
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
