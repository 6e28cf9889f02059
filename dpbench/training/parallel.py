"""How a model is spread over ranks: processes of one GPU each that share a step.

Each rank trains its part of a batch with a trainer of its own. The mean gradient of all parts is
that of the batch, because they are equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from dpbench.workloads.base import Workload


def mesh_of_all(device_type: str) -> DeviceMesh:
    """All ranks in a row, as FSDP2 wants them."""
    return init_device_mesh(device_type, (distributed.get_world_size(),))


def replicated(model: nn.Module) -> nn.Module:
    """The model under PyTorch's DDP, which reduces gradients in buckets during backward."""
    return DistributedDataParallel(model)


def sharded(model: nn.Module, workload: Workload) -> nn.Module:
    """The model under FSDP2, each of its blocks gathered before it runs."""
    mesh = mesh_of_all(next(model.parameters()).device.type)
    for block in workload.blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@contextmanager
def reducing(model: Any, wanted: bool) -> Iterator[None]:
    """Reduce the gradients of a backward pass over the ranks only if it is wanted."""
    if isinstance(model, DistributedDataParallel) and not wanted:
        with model.no_sync():
            yield
        return
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(wanted)
    yield


def rank_and_ranks() -> tuple[int, int]:
    """Which rank this process is, and of how many; the only one if there is no process group."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()
