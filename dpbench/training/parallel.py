"""How a model is spread over ranks: processes of one GPU each that share a step.

Each rank trains its part of a batch with a trainer of its own. The mean gradient of all parts is
that of the batch, because they are equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dpbench.workloads.base import Workload


def mesh_of_all(device_type: str) -> DeviceMesh:
    """All ranks in a row, as FSDP2 wants them."""
    return init_device_mesh(device_type, (distributed.get_world_size(),))


def replicated(model: nn.Module) -> nn.Module:
    """The model under PyTorch's DDP, which reduces gradients in buckets during backward."""
    return DistributedDataParallel(model)


def sharded(
    model: nn.Module, workload: Workload, apart: Sequence[type[nn.Module]] = ()
) -> nn.Module:
    """The model under FSDP2, each of its blocks, and layers ``apart``, gathered before it runs."""
    mesh = mesh_of_all(next(model.parameters()).device.type)
    layers = [layer for layer in model.modules() if isinstance(layer, tuple(apart))]
    for each in [*layers, *workload.blocks(model)]:
        fully_shard(each, mesh=mesh)
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


def gathered(tensor: Tensor) -> Tensor:
    """A parameter or gradient as a whole; of a shard all ranks must ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def begun_together(model: nn.Module) -> nn.Module:
    """The model with the parameters that it has in rank 0."""
    for parameter in model.parameters():
        distributed.broadcast(parameter.data, 0)
    return model


def summed(buffers: Sequence[Tensor]) -> Iterator[Tensor]:
    """Sum buffers over the ranks, in place; each is ready when it comes."""
    reductions = [distributed.all_reduce(buffer, async_op=True) for buffer in buffers]
    for reduction, buffer in zip(reductions, buffers, strict=True):
        reduction.wait()
        yield buffer


def own_part(gradient: Any, parallel: str) -> Tensor:
    """The part of a gradient for which this rank draws the noise: its shard, or a share of rows.

    So each element's noise is drawn once, and together ranks draw no more than one would. It is
    known to the rank that drew it: all must be trusted, where with noise of rank 0 that one must.
    """
    if parallel == "fsdp2":
        gradient = gradient.to_local()
    if parallel == "ddp":
        rank, ranks = rank_and_ranks()
        gradient = torch.atleast_1d(gradient).tensor_split(ranks)[rank]
    part: Tensor = gradient
    return part


def own_generator(device: torch.device) -> torch.Generator | None:
    """A generator that no other rank has, even if all were given the same seed.

    None, the default one, where operators are counted without data.
    """
    seed = torch.randint(2**62, (1,)).to(device)
    distributed.broadcast(seed, 0)
    if isinstance(seed, FakeTensor):
        return None
    return torch.Generator(device).manual_seed(int(seed) + rank_and_ranks()[0])
