"""How many bytes are alive, from when tensors come and go."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

ALLOCATION_BYTES = 512
"""PyTorch's CUDA allocator hands out memory in multiples of this."""


class LiveMemory:
    """Bytes of the tensors alive now, and the most there were at once.

    A tensor's memory is its storage, from the operator that returns it until nothing refers to
    it any more. PyTorch has `torch.distributed._tools.mem_tracker.MemTracker` for this, but
    that keeps one peak for everything rather than one a phase, rounds sizes as the CUDA
    allocator does for tensors on CUDA only, and needs a build with torch.distributed.
    """

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def restart_peak(self) -> None:
        """From here on, ``peak`` is the peak since here."""
        self.peak = self.now

    def see(self, tensor: Tensor) -> None:
        """Take note of a tensor's storage and its present size."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = -(-storage.nbytes() // ALLOCATION_BYTES) * ALLOCATION_BYTES
        if key not in self._sizes:
            self._references[key] = weakref.ref(storage, lambda _: self._freed(key))
        self.now += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak = max(self.peak, self.now)

    def _freed(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
        del self._references[key]
