"""The memory of tensors: the region that each addresses, and the live bytes of all."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
from torch import Tensor

Region: TypeAlias = tuple[int, int, tuple[tuple[int, int], ...]]
"""Storage, offset in elements, and ``(size, stride)`` of each dimension that cannot be merged."""


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in an argument or a result, also in lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


def region_of(tensor: Tensor) -> tuple[Region, int]:
    """The region that a tensor addresses, and its bytes; transposing changes neither."""
    dims, elements = _layout(tuple(tensor.shape), tensor.stride())
    storage = tensor.untyped_storage()._cdata
    return (storage, int(tensor.storage_offset()), dims), elements * tensor.itemsize


@lru_cache(maxsize=8192)
def _layout(
    shape: tuple[int, ...], stride: tuple[int, ...]
) -> tuple[tuple[tuple[int, int], ...], int]:
    """The addressed elements in a normal form, and their number.

    Dimensions are sorted by falling stride and merged where contiguous, so that `view`, `expand`
    and `transpose` change nothing.
    """
    if 0 in shape:
        return (), 0
    merged: list[tuple[int, int]] = []
    dims = [(size, step) for size, step in zip(shape, stride, strict=True) if size > 1 and step]
    for size, step in sorted(dims, key=lambda dim: -dim[1]):
        if merged and merged[-1][1] == size * step:
            merged[-1] = (merged[-1][0] * size, step)
        else:
            merged.append((size, step))
    span = 1 + sum((size - 1) * step for size, step in merged)
    return tuple(merged), min(span, math.prod(size for size, _ in merged))


ALLOCATION_BYTES = 512  # block size of PyTorch's CUDA allocator

UNSHARED = 4, 2
"""Reference counts, seen in `in_place`, of a gradient and its storage that only autograd holds."""


class LiveMemory:
    """Live bytes ``now``, their ``peak``, and the ``largest`` storage.

    A storage lives from the operator that returns it until nothing refers to it. (PyTorch's
    ``MemTracker`` has one peak for all phases, and rounds sizes to blocks only on CUDA.)
    """

    def __init__(self) -> None:
        self.now = self.peak = self.largest = 0
        self._known: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}

    def see(self, tensor: Tensor) -> None:
        """Track a tensor's storage at its present size."""
        self.see_storage(tensor.untyped_storage())

    def see_storage(self, storage: torch.UntypedStorage) -> None:
        """Track a storage, whose size may have changed."""
        key = storage._cdata
        size = -(-storage.nbytes() // ALLOCATION_BYTES) * ALLOCATION_BYTES
        before, reference = self._known.get(key, (0, None))
        if size != before or reference is None:
            reference = reference or weakref.ref(storage, lambda _: self._freed(key))
            self._known[key] = size, reference
            self.now += size - before
            self.peak = max(self.peak, self.now)
            self.largest = max(self.largest, size)

    def _freed(self, key: int) -> None:
        self.now -= self._known.pop(key)[0]


@contextmanager
def resizing_seen(memory: LiveMemory) -> Iterator[None]:
    """Track storages that are resized without an operator, as FSDP2 does to gather parameters."""
    by_torch = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        resized = by_torch(storage, size)
        memory.see_storage(storage)
        return resized

    with patch.object(torch.UntypedStorage, "resize_", resize):
        yield


def in_place(func: Any, args: tuple[Any, ...]) -> Any:
    """The operator that would run without a dispatch mode: ``add_`` where autograd saves memory.

    Autograd adds a second gradient of a tensor in place if nothing else holds the first, but not
    under a mode. (``accumulate`` in ``torch/csrc/autograd/input_buffer.cpp``)
    """
    if func is not torch.ops.aten.add.Tensor or torch._C._current_graph_task_id() == -1:
        return func
    first, second = args[:2]
    like = isinstance(second, Tensor) and (first.shape, first.dtype) == (second.shape, second.dtype)
    if torch.is_grad_enabled() or not like:
        return func
    storage = first.untyped_storage()
    uses = first._use_count(), torch._C._storage_Use_Count(storage._cdata)
    whole = region_of(first)[1] == storage.nbytes()  # a view without gaps
    return torch.ops.aten.add_.Tensor if whole and uses == UNSHARED else func
