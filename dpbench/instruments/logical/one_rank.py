"""Simulates many ranks in one process, which acts as the first rank.

Collectives return at once and move no data, because the process uses PyTorch's private fake process
group (``torch.testing``). Some parts of PyTorch fail on fake tensors or are slow for many ranks.
This module replaces these parts:

DistributedDataParallel
    The C++ code of DDP reads values of tensors. `Buckets` executes the same copies and collectives.
Device meshes
    A mesh needs a real tensor with the numbers of its ranks, so fake tensors are switched off while
    a mesh is created. Opacus deep-copies some layers. The copies share the mesh of the originals.
DTensors
    DTensor runs an operator on unsharded tensors to find the shape of the result. dpbench does not
    count the bytes and the memory of this run.
Python objects
    Gathering Python objects raises an error, because the objects of other ranks do not exist.
FSDP2's chunks
    FSDP2 divides a parameter into one chunk per rank. Only the first chunk is created.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import (
    _DEFAULT_FIRST_BUCKET_BYTES,
    _compute_bucket_assignment_by_size,
)
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Variable
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

from dpbench.instruments.logical.stand_ins import UnsupportedOperation

BUCKET = 25 * 1024**2
"""Size in bytes at which a DDP bucket is full. The first bucket is full at 1 MiB."""

WITHOUT_EFFECT = {"device_ids", "output_device", "dim"}
"""Arguments of DDP that do not change the counted bytes."""


@contextmanager
def fake_process_group(ranks: int) -> Iterator[None]:
    """Make this process the first rank of a fake process group within the block.

    If ``ranks`` is 1, this does nothing.
    """
    if ranks == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    shapes = "_propagate_tensor_meta_non_cached"
    replaced: list[tuple[Any, str, Any]] = [
        (DeviceMesh, "__init__", _without_modes(DeviceMesh.__init__)),
        (ShardingPropagator, shapes, _without_modes(getattr(ShardingPropagator, shapes))),
        (_fsdp_param, "_chunk_with_empty", _first_chunk),
        (DistributedDataParallel, "__init__", _replicate),
        (DistributedDataParallel, "forward", _forward),
        (distributed_c10d, "_tensor_to_object", _unknown_object),
    ]
    with ExitStack() as stack:
        distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        stack.callback(distributed.destroy_process_group)
        for place, name, value in replaced:
            stack.enter_context(patch.object(place, name, value))
        same = patch.object(DeviceMesh, "__deepcopy__", lambda mesh, memo: mesh, create=True)
        stack.enter_context(same)
        yield


def _without_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    def real(value: Any) -> Any:
        if not isinstance(value, FakeTensor):  # a fake tensor stands for the numbers of all ranks
            return value
        return torch.arange(value.numel(), dtype=torch.int).view(value.shape)

    def call(*args: Any, **named: Any) -> Any:
        with _disable_current_modes():
            return function(*map(real, args), **{name: real(each) for name, each in named.items()})

    return call


def _unknown_object(*args: Any) -> None:
    raise UnsupportedOperation(
        "a step cannot gather Python objects (for example with all_gather_object), because only "
        "one rank is counted and the objects of other ranks do not exist: gather tensors"
    )


def _first_chunk(tensor: Tensor, number: int, dim: int) -> Sequence[Tensor]:
    """Return the chunk of the first rank. No other chunk is larger."""
    return [tensor.narrow(dim, 0, -(-tensor.shape[dim] // number))]


class Buckets:
    """Executes the copies and collectives of DDP's reducer with default options.

    DDP divides each gradient by the number of ranks, copies it into a bucket, reduces the bucket
    and copies the gradient back. Gradients fill the buckets in the order in which autograd
    computes the gradients in the first step. The first bucket is full at 1 MiB, other buckets at
    25 MiB. Buckets persist from step to step. Before each forward that synchronizes gradients, the
    first rank broadcasts the buffers of its module, such as running statistics.
    """

    def __init__(self, replica: DistributedDataParallel) -> None:
        self._replica = replica
        self._arrived: list[Tensor] = []
        self._memory: list[tuple[Tensor, list[Tensor]]] = []  # buckets and their parameters
        named = replica.module.named_parameters()
        self._trained = {each: name for name, each in named if each.requires_grad}
        for parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(self._arrive)

    def send_buffers(self) -> None:
        """Broadcast the buffers of the first rank, in one call per dtype."""
        buffers = sorted(self._replica.module.buffers(), key=lambda buffer: str(buffer.dtype))
        for _, alike in groupby(buffers, key=lambda buffer: buffer.dtype):
            values = [buffer.detach() for buffer in alike]
            together = torch.cat([value.flatten() for value in values])
            distributed.broadcast(together, 0)
            for value, sent in zip(values, _views(together, values), strict=True):
                value.copy_(sent)

    def _arrive(self, parameter: Tensor) -> None:
        if self._replica.require_backward_grad_sync:
            if not self._arrived:
                Variable._execution_engine.queue_callback(self._reduce)
            self._arrived.append(parameter)

    @torch.no_grad()
    def _reduce(self) -> None:
        arrived, self._arrived = self._arrived, []
        if missing := [self._trained[each] for each in self._trained.keys() - {*arrived}]:
            raise UnsupportedOperation(
                f"DistributedDataParallel waits for the gradient of {min(missing)}, but the loss "
                f"does not depend on this parameter: freeze or remove the parameter"
            )
        self._memory = self._memory or _buckets_for(arrived)
        part = 1 / distributed.get_world_size()
        for memory, parameters in self._memory:
            gradients: list[Any] = [parameter.grad for parameter in parameters]
            places = _views(memory, gradients)
            for gradient, place in zip(gradients, places, strict=True):
                torch.mul(gradient, part, out=place)
            distributed.all_reduce(memory)
            for gradient, place in zip(gradients, places, strict=True):
                gradient.copy_(place)


def _buckets_for(arrived: list[Tensor]) -> list[tuple[Tensor, list[Tensor]]]:
    limits = [_DEFAULT_FIRST_BUCKET_BYTES, BUCKET]
    assigned, _ = _compute_bucket_assignment_by_size(arrived, limits)
    groups = [[arrived[number] for number in numbers] for numbers in assigned]
    return [(g[0].new_empty(sum(p.numel() for p in g)), g) for g in groups]


def _views(memory: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return consecutive views of ``memory`` with the shapes of the tensors."""
    parts = memory.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def _replicate(self: Any, module: nn.Module, **options: Any) -> None:
    if unknown := {*options} - WITHOUT_EFFECT:
        what = ", ".join(sorted(unknown))
        raise UnsupportedOperation(
            f"DistributedDataParallel with the option {what} cannot be counted: leave it out"
        )
    nn.Module.__init__(self)
    self.module = module
    self.require_backward_grad_sync = True
    self.buckets = Buckets(self)


def _forward(self: Any, *inputs: Any, **named: Any) -> Any:
    if self.require_backward_grad_sync:
        self.buckets.send_buffers()
    return self.module(*inputs, **named)
