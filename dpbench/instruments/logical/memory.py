"""How many bytes are alive at once, by the storages of the tensors that operators return."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from dpbench.instruments.logical.regions import region_of

ALLOCATION_BYTES = 512  # PyTorch's CUDA allocator hands out memory in multiples of this

UNSHARED = 4, 2
"""The uses of a gradient and of its storage that autograd alone holds, while `in_place` looks."""


class LiveMemory:
    """Bytes of the tensors alive ``now``, the most there were at once, and of the ``largest``.

    A tensor's memory is its storage, from the operator that returns it until nothing refers to
    it any more. (PyTorch's ``MemTracker`` keeps one peak for all phases, and rounds sizes as the
    CUDA allocator does for tensors on CUDA only.)
    """

    def __init__(self) -> None:
        self.now = self.peak = self.largest = 0
        self._known: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}

    def see(self, tensor: Tensor) -> None:
        """Take note of a tensor's storage and its present size."""
        self.see_storage(tensor.untyped_storage())

    def see_storage(self, storage: torch.UntypedStorage) -> None:
        """Take note of a storage, whose size may have changed."""
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
    """See what no operator does: FSDP2 lends parameters memory while they are whole."""
    by_torch = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        resized = by_torch(storage, size)
        memory.see_storage(storage)
        return resized

    with patch.object(torch.UntypedStorage, "resize_", resize):
        yield


def in_place(func: Any, args: tuple[Any, ...]) -> Any:
    """The operator that would run without a dispatch mode, under which autograd never reuses.

    Where a tensor was used twice, autograd adds the second gradient to the first in place, if
    nobody else holds that. (``torch/csrc/autograd/input_buffer.cpp``, ``accumulate``)
    """
    if func is not torch.ops.aten.add.Tensor or torch._C._current_graph_task_id() == -1:
        return func
    first, second = args[:2]
    like = isinstance(second, Tensor) and (first.shape, first.dtype) == (second.shape, second.dtype)
    if torch.is_grad_enabled() or not like:
        return func
    storage = first.untyped_storage()
    uses = first._use_count(), torch._C._storage_Use_Count(storage._cdata)
    whole = region_of(first)[1] == storage.nbytes()  # a view of all, without gaps
    return torch.ops.aten.add_.Tensor if whole and uses == UNSHARED else func
