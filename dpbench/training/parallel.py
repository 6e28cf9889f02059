"""Spreads a model over ranks: processes with one GPU each that share a step.

Each rank has its own trainer and trains its part of a batch. The parts are equally large, so the
mean of their gradients is the gradient of the batch.
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
    """A layer's original class: FSDP2 gives each block that it shards a derived class."""
    kinds: list[Any] = [*type(layer).__mro__]
    kind: type[nn.Module] = next(each for each in kinds if not issubclass(each, FSDPModule))
    return kind


GRAPHS: WeakSet[Any] = WeakSet()
"""CUDA graphs that may hold collectives."""


@atexit.register
def reset_graphs() -> None:
    """Reset the CUDA graphs of all trainers, which then cannot train any more.

    ``destroy_process_group`` would wait for graphs that hold the group's collectives:
    https://github.com/pytorch/pytorch/issues/115388.
    """
    for graph in [*GRAPHS]:
        graph.reset()


def leave_group() -> None:
    """Reset all CUDA graphs, then destroy the process group, which would wait for them."""
    reset_graphs()
    distributed.destroy_process_group()


def mesh_of_all(device_type: str) -> DeviceMesh:
    """A one-dimensional mesh of all ranks, for FSDP2."""
    return init_device_mesh(device_type, (distributed.get_world_size(),))


def sharded(
    model: nn.Module, workload: Workload, apart: Sequence[type[nn.Module]] = ()
) -> nn.Module:
    """Shard the model with FSDP2: each block, and each layer of a class in ``apart``, by itself.

    Raises:
        ConfigurationError: the workload does not name its blocks.
    """
    mesh = mesh_of_all(next(model.parameters()).device.type)
    layers = [layer for layer in model.modules() if isinstance(layer, tuple(apart))]
    for each in [*layers, *workload.blocks(model)]:
        fully_shard(each, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def reduce_gradients(model: nn.Module, wanted: bool) -> None:
    """Choose whether the next backward passes reduce gradients over ranks or only accumulate."""
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
    """The slice of a joint batch that a rank trains, along each tensor's first dimension."""
    size = examples // ranks
    return slice(rank * size, (rank + 1) * size)


def gathered(tensor: Tensor) -> Tensor:
    """Gather a parameter or gradient from its shards; all ranks must call this for a DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def broadcast_parameters(model: nn.Module) -> nn.Module:
    """Broadcast the parameters of rank 0; return the model."""
    for parameter in model.parameters():
        distributed.broadcast(parameter.data, 0)
    return model


def own_part(gradient: Any, parallel: str) -> Tensor:
    """The part of a gradient to which this rank adds noise: its shard, or a share of the rows.

    Each element's noise is drawn by one rank, which then knows it. So every rank must be trusted.
    If rank 0 drew all noise, only rank 0 would have to be trusted.
    """
    if parallel == "fsdp2":
        gradient = gradient.to_local()
    if parallel == "ddp":
        rank, ranks = rank_and_ranks()
        gradient = torch.atleast_1d(gradient).tensor_split(ranks)[rank]
    part: Tensor = gradient
    return part


def own_generator(device: torch.device) -> torch.Generator:
    """A generator whose seed differs between ranks, even if they have the same global seed."""
    seed = torch.randint(2**62, (1,)).to(device)
    distributed.broadcast(seed, 0)
    return torch.Generator(device).manual_seed(int(seed) + rank_and_ranks()[0])
