"""How a model is spread over ranks: processes of one GPU each that share a step.

Each rank trains its part of a batch with a trainer of its own. The mean gradient of all parts is
that of the batch, because they are equal.
"""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dpbench.workloads.base import Workload


def kind_of(layer: nn.Module) -> type[nn.Module]:
    """A layer's class; FSDP2 derives another from it for the layers that it shards as a block."""
    kinds: list[Any] = [*type(layer).__mro__]
    kind: type[nn.Module] = next(each for each in kinds if not issubclass(each, FSDPModule))
    return kind


GRAPHS: WeakSet[Any] = WeakSet()
"""CUDA graphs that may hold collectives."""


@atexit.register
def reset_graphs() -> None:
    """End the graphs of all trainers, which cannot train any more.

    ``destroy_process_group`` waits for the end of graphs that hold the group's collectives:
    https://github.com/pytorch/pytorch/issues/115388.
    """
    for graph in [*GRAPHS]:
        graph.reset()


def leave_group() -> None:
    """Destroy the process group, and before it the graphs for which it would wait."""
    reset_graphs()
    distributed.destroy_process_group()


def mesh_of_all(device_type: str) -> DeviceMesh:
    """A one-dimensional mesh of all ranks, for FSDP2."""
    return init_device_mesh(device_type, (distributed.get_world_size(),))


def sharded(
    model: nn.Module, workload: Workload, apart: Sequence[type[nn.Module]] = ()
) -> nn.Module:
    """The model under FSDP2, each of its blocks, and layers ``apart``, gathered before it runs.

    Raises:
        ConfigurationError: the workload does not say which blocks there are.
    """
    mesh = mesh_of_all(next(model.parameters()).device.type)
    layers = [layer for layer in model.modules() if isinstance(layer, tuple(apart))]
    for each in [*layers, *workload.blocks(model)]:
        fully_shard(each, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def reduce_gradients(model: nn.Module, wanted: bool) -> None:
    """Have the next passes reduce gradients over the ranks, or add them up in each rank."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = wanted  # as its no_sync() does
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(wanted)


def rank_and_ranks() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks; (0, 1) without a process group."""
    if not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def part_of_rank(examples: int, rank: int, ranks: int) -> slice:
    """Which examples of a joint batch a rank trains, along the first dimension of each tensor."""
    size = examples // ranks
    return slice(rank * size, (rank + 1) * size)


def gathered(tensor: Tensor) -> Tensor:
    """A whole parameter or gradient; for a shard, all ranks must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def broadcast_parameters(model: nn.Module) -> nn.Module:
    """The model with the parameters of rank 0."""
    for parameter in model.parameters():
        distributed.broadcast(parameter.data, 0)
    return model


def own_part(gradient: Any, parallel: str) -> Tensor:
    """The part of a gradient for which this rank draws the noise: its shard, or a share of rows.

    Each element's noise is drawn once, by a rank that then knows it, so every rank must be trusted.
    If rank 0 drew all of it, only rank 0 would have to be trusted.
    """
    if parallel == "fsdp2":
        gradient = gradient.to_local()
    if parallel == "ddp":
        rank, ranks = rank_and_ranks()
        gradient = torch.atleast_1d(gradient).tensor_split(ranks)[rank]
    part: Tensor = gradient
    return part


def own_generator(device: torch.device) -> torch.Generator:
    """A generator that differs between ranks, even if all were given the same seed."""
    seed = torch.randint(2**62, (1,)).to(device)
    distributed.broadcast(seed, 0)
    return torch.Generator(device).manual_seed(int(seed) + rank_and_ranks()[0])
