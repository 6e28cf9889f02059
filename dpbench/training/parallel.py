"""Distributes a model over ranks. Ranks are processes that share a step, usually with one GPU each.

Each rank has its own trainer, and trains a part of the batch. All parts are equally large, so the
mean of the ranks' mean gradients is the mean gradient of the whole batch.
"""

from __future__ import annotations

import atexit
import hashlib
import secrets
import struct
from datetime import timedelta
from functools import lru_cache
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
    """Return a layer's original class, which FSDP2 replaces with a derived class."""
    kinds: list[Any] = [*type(layer).__mro__]
    kind: type[nn.Module] = next(each for each in kinds if not issubclass(each, FSDPModule))
    return kind


GRAPHS: WeakSet[Any] = WeakSet()
"""All CUDA graphs of trainers in this process. They may contain collectives."""


@atexit.register
def reset_graphs() -> None:
    """Reset the CUDA graphs of all trainers, which can then no longer replay them.

    ``destroy_process_group`` would hang on graphs that contain the group's collectives:
    https://github.com/pytorch/pytorch/issues/115388.
    """
    for graph in [*GRAPHS]:
        graph.reset()


def leave_group() -> None:
    """Reset all CUDA graphs, and destroy the process group."""
    reset_graphs()
    distributed.destroy_process_group()


def mesh_of_all(device_type: str) -> DeviceMesh:
    """Return a one-dimensional mesh of all ranks, for FSDP2."""
    return init_device_mesh(device_type, (distributed.get_world_size(),))


def sharded(model: nn.Module, workload: Workload) -> nn.Module:
    """Shard the model with FSDP2.

    Args:
        model: the model.
        workload: names the model's blocks, each of which is sharded separately.

    Raises:
        ConfigurationError: the workload does not name the model's blocks.
    """
    mesh = mesh_of_all(next(model.parameters()).device.type)
    for each in workload.blocks(model):
        fully_shard(each, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def reduce_gradients(model: nn.Module, wanted: bool) -> None:
    """Set whether later backward passes reduce gradients over ranks, or only add them up."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = wanted  # `no_sync` sets the same attribute
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(wanted)


def rank_and_ranks() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks; (0, 1) without a process group."""
    if not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def part_of_rank(examples: int, rank: int, ranks: int) -> slice:
    """Return which examples of a batch a rank trains, as a slice of the first dimension."""
    size = examples // ranks
    return slice(rank * size, (rank + 1) * size)


def gathered(tensor: Tensor) -> Tensor:
    """Return the full tensor of a sharded parameter or gradient, or any other tensor unchanged.

    For a sharded tensor, all ranks must call this function.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def broadcast_parameters(model: nn.Module) -> nn.Module:
    """Broadcast the parameters of rank 0 to all ranks, and return the model."""
    for parameter in model.parameters():
        distributed.broadcast(parameter.data, 0)
    return model


def own_share(gradient: Tensor) -> Tensor:
    """Return the elements of a flat gradient to which this rank adds noise under DDP.

    A rank knows the noise that it draws, so every rank must be trusted to keep it secret. If rank 0
    drew all noise, only rank 0 would know the noise.
    """
    rank, ranks = rank_and_ranks()
    return gradient.tensor_split(ranks)[rank]


def shared_key(seed: int | None, device: torch.device, parallel: str) -> Tensor:
    """Return a key of 256 bits, ``[4]`` int64. All ranks get the key of rank 0.

    Without a seed, the key is random, and new in each process. A key from a seed is repeatable.
    """
    key = secrets.token_bytes(32)
    if seed is not None:
        key = hashlib.sha256(f"dpbench's noise from seed {seed}".encode()).digest()
    words = torch.tensor(struct.unpack("<4q", key), device=device)
    if parallel != "none":
        distributed.broadcast(words, 0)
    return words


class OwnGenerator(torch.Generator):
    """A generator whose copies, also those from a file, have new random seeds."""

    def __reduce__(self) -> tuple[Any, ...]:
        return own_generator, (self.device,)


def own_generator(
    device: torch.device, seed: int | None = None, parallel: str = "none"
) -> torch.Generator:
    """Return a generator whose seed differs between ranks, see `shared_key`.

    Of the key, the generator keeps 64 bits on a GPU and 32 bits on a CPU, and neither Philox nor
    the Mersenne Twister is cryptographically secure. So this noise is weaker than that of
    `dpbench.training.noise_stream`.
    """
    key = int(shared_key(seed, device, parallel)[0])
    return OwnGenerator(device).manual_seed(key + rank_and_ranks()[0])


# --- messages between ranks --------------------------------------------------------------------

FOR_EVER = timedelta(days=30)  # the process that started the ranks ends hanging ranks


@lru_cache(maxsize=1)
def _group(of: Any) -> Any:
    """Return a gloo process group with the ranks of the group ``of``. gloo uses no GPU."""
    return distributed.new_group(backend="gloo", timeout=FOR_EVER)


def all_gather(word: str) -> list[str]:
    """Send a string to all ranks, and return the strings that all ranks sent, by rank.

    All ranks must call this function equally often. The ranks use it to agree whether to take
    another step. A rank that took more steps than another rank would wait in a collective for ever.
    """
    _, ranks = rank_and_ranks()
    if ranks == 1:
        return [word]
    words = [""] * ranks
    distributed.all_gather_object(words, word, group=_group(distributed.group.WORLD))
    return words
