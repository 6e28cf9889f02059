"""The memory of tensors: the region that each addresses, and the live bytes of all."""

from __future__ import annotations

import gc
import math
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
from torch import Tensor, nn

from dpbench.core.case import OUTSIDE
from dpbench.instruments.logical.source_lines import shown, source_frame
from dpbench.results.kernels import MemoryLine

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
"""Reference counts of a gradient and of its storage, in `in_place`, if only autograd holds them."""


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


Origin: TypeAlias = tuple[str, str, int, str]
"""Where an allocation was made: phase, file, line, and function with autograd node."""

BEFORE = "made before the counted steps"


class ScriptMemory(LiveMemory):
    """The live bytes of a script's tensors, by the source line that allocated them.

    If the script uses CUDA, its CUDA tensors are counted. On a CPU it is unknown which tensors
    would be on a GPU. Parameters, buffers, gradients and optimizer state are counted. Any other
    tensor is counted once an operator uses it in a phase of a step, or together with a counted
    tensor. So a data set that only its loader reads is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = OUTSIDE
        self._on_cuda = torch.cuda.is_initialized()
        self._origins: dict[int, Origin] = {}
        self._held = Counter[Origin]()
        self._highest, self._at_peak = 0, dict[Origin, int]()

    def see_those_made_before(self) -> None:
        """Track the parameters, gradients, buffers and optimizer state of this process."""
        found: dict[str, list[Any]] = {"parameters": [], "buffers": [], "optimizer state": []}
        modules, optimizers = subclasses(nn.Module), subclasses(torch.optim.Optimizer)
        kinds = modules | optimizers | subclasses(nn.Parameter)
        # Not isinstance: it is slower for millions of objects, and may run an object's own code.
        for each in [each for each in gc.get_objects() if type(each) in kinds]:
            if type(each) in modules:
                found["buffers"] += vars(each).get("_buffers", {}).values()
            elif type(each) in optimizers:
                states = vars(each).get("state", {}).values()
                found["optimizer state"] += [v for s in states for v in dict(s).values()]
            else:
                found["parameters"].append(each)
        found["gradients"] = [p.grad for p in found["parameters"] if p.is_leaf]
        for what, values in found.items():
            for tensor in tensors(values):
                with suppress(RuntimeError, ValueError):  # sparse, or not initialized yet
                    local = getattr(tensor, "_local_tensor", tensor)  # the local shard of a DTensor
                    self.see(local, (OUTSIDE, f"{what} {BEFORE}", 0, ""))

    def start_step(self) -> None:
        """Forget the last step's peak, and collect its tensors that only reference cycles hold."""
        gc.collect()
        self._highest, self._at_peak = self.now, dict(self._held)

    def run(self, phase: str, used: Any, made: Any) -> None:
        """Track the tensors that an operator has used and made."""
        self.phase = phase
        given = [(each, each.untyped_storage()._cdata in self._known) for each in tensors(used)]
        if phase != OUTSIDE or any(known for _, known in given):
            for tensor, known in given:
                if not known:
                    self.see(tensor, (OUTSIDE, f"others {BEFORE}", 0, ""))
            for tensor in tensors(made):
                self.see(tensor)

    def see(self, tensor: Tensor, origin: Origin | None = None) -> None:
        """Track a tensor's storage at its present size."""
        if tensor.device.type == ("cuda" if self._on_cuda else "cpu"):
            self.see_storage(tensor.untyped_storage(), origin)

    def see_storage(self, storage: torch.UntypedStorage, origin: Origin | None = None) -> None:
        before, key = self.now, storage._cdata
        super().see_storage(storage)
        if self.now != before:
            if key not in self._origins:
                self._origins[key] = origin or (self.phase, *source_line())
            self._held[self._origins[key]] += self.now - before
            if self.now > self._highest:
                self._highest, self._at_peak = self.now, dict(self._held)

    def _freed(self, key: int) -> None:
        if origin := self._origins.pop(key, None):  # an empty storage has none
            self._held[origin] -= self._known[key][0]
        super()._freed(key)

    def lines(self) -> tuple[MemoryLine, ...]:
        """What lived at the peak of the latest step, by phase and line; most bytes first."""
        held = Counter[tuple[str, str]]()
        for (phase, file, number, words), size in self._at_peak.items():
            line = f"{shown(file)}:{number}{words}" if number else file
            held[phase, line] += size
        return tuple(MemoryLine(*where, size) for where, size in held.most_common() if size)


def subclasses(base: type) -> set[type]:
    """A class and all that are derived from it."""
    return {base}.union(*map(subclasses, type.__subclasses__(base)))


def source_line() -> tuple[str, int, str]:
    """The innermost line outside PyTorch and dpbench, with its function and node of autograd."""
    frame = source_frame(sys._getframe(1))
    node = torch._C._current_autograd_node()
    name = frame.f_code.co_name
    words = f" {name}" if name[0] != "<" else ""
    words += f" ({node.name()})" if node and "Hook" not in node.name() else ""
    return frame.f_code.co_filename, frame.f_lineno, words


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
