"""Finds the memory region of a tensor, and tracks the live bytes of all tensors."""

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
from torch._subclasses.fake_tensor import FakeTensor

from dpbench.core.case import OUTSIDE
from dpbench.core.errors import subclasses
from dpbench.instruments.logical.source_lines import short_path, source_frame
from dpbench.results.kernels import MemoryLine

Region: TypeAlias = tuple[int, int, tuple[tuple[int, int], ...]]
"""A memory region: storage, offset in elements, and ``(size, stride)`` by merged dimension.

Contiguous dimensions are merged into one dimension.
"""


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in an argument or result, including those in lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


def data_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that hold the data of a tensor.

    These are the inner tensors of a subclass without memory of its own, and otherwise the tensor
    itself.
    """
    if not is_wrapper(tensor):
        yield tensor
        return
    names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
    for inner in tensors([getattr(tensor, name) for name in names or vars(tensor)]):
        yield from data_tensors(inner)


def is_wrapper(tensor: Tensor) -> bool:
    """Return True if a tensor is of a subclass that has no memory of its own."""
    if type(tensor) in (Tensor, nn.Parameter, FakeTensor):
        return False
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return True
    return False


def region_of(tensor: Tensor) -> tuple[Region, int]:
    """Return the region that a tensor addresses, and the number of bytes in the region.

    A tensor and its transpose have the same region.
    """
    dims, elements = _layout(tuple(tensor.shape), tensor.stride())
    storage = tensor.untyped_storage()._cdata
    return (storage, int(tensor.storage_offset()), dims), elements * tensor.itemsize


@lru_cache(maxsize=8192)
def _layout(
    shape: tuple[int, ...], stride: tuple[int, ...]
) -> tuple[tuple[tuple[int, int], ...], int]:
    """Return the addressed elements in a normal form, and the number of these elements.

    Dimensions are sorted from the largest to the smallest stride, and contiguous dimensions are
    merged. Therefore `view`, `expand` and `transpose` do not change the result.
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


ALLOCATION_BYTES = 512  # PyTorch's CUDA allocator rounds sizes up to a multiple of this

UNSHARED = 4, 2
"""Reference counts of a gradient and its storage if only autograd refers to the gradient.

`in_place_variant` compares the current reference counts with these numbers.
"""


class LiveMemory:
    """Tracks the live bytes of storages.

    A storage is live from the operator that returns it until nothing refers to it. PyTorch's
    ``MemTracker`` cannot be used, because it has one peak for all phases and rounds sizes to
    blocks only on CUDA.

    Attributes:
        now: live bytes now, with sizes rounded up to multiples of `ALLOCATION_BYTES`.
        peak: maximum of ``now``. The counter resets ``peak`` when a phase begins.
        largest: bytes of the largest storage that was made or resized. The counter resets
            ``largest`` when a step begins.
    """

    def __init__(self) -> None:
        self.now = self.peak = self.largest = 0
        self._known: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}

    def track(self, tensor: Tensor) -> None:
        """Track the storage of a tensor with its current size."""
        self.track_storage(tensor.untyped_storage())

    def track_storage(self, storage: torch.UntypedStorage) -> None:
        """Track a storage with its current size, also if it was tracked with another size."""
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
"""Origin of an allocation: phase, file, line, and a text with the function and autograd node."""

BEFORE = "made before the counted steps"


class ScriptMemory(LiveMemory):
    """Tracks the live bytes of a script's tensors, by the source line that allocated them.

    If the script has initialized CUDA before its first counted step, only CUDA tensors are counted,
    otherwise only CPU tensors. Parameters, buffers, gradients and optimizer state are counted if
    they exist before the first counted step. Any other tensor is counted once an operator in a
    phase uses or creates the tensor. Outside of all phases, an operator has this effect only if one
    of its inputs is already counted. Therefore a data set that only a data loader reads is not
    counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = OUTSIDE
        self._on_cuda = torch.cuda.is_initialized()
        self._origins: dict[int, Origin] = {}
        self._held = Counter[Origin]()
        self._highest, self._at_peak = 0, dict[Origin, int]()

    def track_existing(self) -> None:
        """Track the existing parameters, gradients, buffers and optimizer state of this process."""
        found: dict[str, list[Any]] = {"parameters": [], "buffers": [], "optimizer state": []}
        modules, optimizers = {*subclasses(nn.Module)}, {*subclasses(torch.optim.Optimizer)}
        kinds = modules.union(optimizers, subclasses(nn.Parameter))
        # `isinstance` would be slower for millions of objects, and may run code of the object.
        for each in [each for each in gc.get_objects() if type(each) in kinds]:
            if type(each) in modules:
                found["buffers"] += vars(each).get("_buffers", {}).values()
                found["parameters"] += vars(each).get("_parameters", {}).values()
            elif type(each) in optimizers:
                states = vars(each).get("state", {}).values()
                found["optimizer state"] += [v for s in states for v in dict(s).values()]
            else:
                found["parameters"].append(each)
        found["gradients"] = [p.grad for p in tensors(found["parameters"]) if p.is_leaf]
        for what, values in found.items():
            for tensor in tensors(values):
                with suppress(RuntimeError, ValueError):  # sparse or uninitialized tensors
                    for inner in data_tensors(tensor):
                        self.track(inner, (OUTSIDE, f"{what} {BEFORE}", 0, ""))

    def start_step(self) -> None:
        """Forget the peak of the last step, and free tensors in reference cycles."""
        gc.collect()
        self._highest, self._at_peak = self.now, dict(self._held)

    def run(self, phase: str, used: Any, made: Any) -> None:
        """Track the inputs and results of an operator.

        Outside of all phases, an operator is ignored unless an input is already tracked.

        Args:
            phase: the current phase.
            used: inputs of the operator.
            made: result of the operator.
        """
        self.phase = phase
        used = [inner for each in tensors(used) for inner in data_tensors(each)]
        given = [(each, each.untyped_storage()._cdata in self._known) for each in used]
        if phase != OUTSIDE or any(known for _, known in given):
            for tensor, known in given:
                if not known:
                    self.track(tensor, (OUTSIDE, f"others {BEFORE}", 0, ""))
            for tensor in tensors(made):
                for inner in data_tensors(tensor):
                    self.track(inner)

    def track(self, tensor: Tensor, origin: Origin | None = None) -> None:
        """Track the storage of a tensor with its current size."""
        if tensor.device.type == ("cuda" if self._on_cuda else "cpu"):
            self.track_storage(tensor.untyped_storage(), origin)

    def track_storage(self, storage: torch.UntypedStorage, origin: Origin | None = None) -> None:
        before, key = self.now, storage._cdata
        super().track_storage(storage)
        if self.now != before:
            if key not in self._origins:
                self._origins[key] = origin or (self.phase, *source_line())
            self._held[self._origins[key]] += self.now - before
            if self.now > self._highest:
                self._highest, self._at_peak = self.now, dict(self._held)

    def _freed(self, key: int) -> None:
        if origin := self._origins.pop(key, None):  # empty storages have no origin
            self._held[origin] -= self._known[key][0]
        super()._freed(key)

    def lines(self) -> tuple[MemoryLine, ...]:
        """Return the live bytes at the peak of the latest step, by phase and source line.

        The lines are sorted from most to least bytes.
        """
        held = Counter[tuple[str, str]]()
        for (phase, file, number, words), size in self._at_peak.items():
            line = f"{short_path(file)}:{number}{words}" if number else file
            held[phase, line] += size
        return tuple(MemoryLine(*where, size) for where, size in held.most_common() if size)


def source_line() -> tuple[str, int, str]:
    """Return the file, line and description of the frame that `source_frame` finds.

    The description contains the function and the current node of autograd, if any.
    """
    frame = source_frame(sys._getframe(1))
    node = torch._C._current_autograd_node()
    name = frame.f_code.co_name
    words = f" {name}" if name[0] != "<" else ""
    words += f" ({node.name()})" if node and "Hook" not in node.name() else ""
    return frame.f_code.co_filename, frame.f_lineno, words


@contextmanager
def track_resizing(memory: LiveMemory) -> Iterator[None]:
    """Track storages that are resized without an operator within the block.

    FSDP2 resizes storages in this way when it gathers parameters.
    """
    by_torch = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        resized = by_torch(storage, size)
        memory.track_storage(storage)
        return resized

    with patch.object(torch.UntypedStorage, "resize_", resize):
        yield


def in_place_variant(func: Any, args: tuple[Any, ...]) -> Any:
    """Return the operator that PyTorch would run without a dispatch mode.

    Under a dispatch mode, autograd adds a second gradient of a tensor with ``add``. Without a mode
    autograd uses ``add_`` if nothing else refers to the first gradient (``accumulate`` in
    ``torch/csrc/autograd/input_buffer.cpp``). The two operators move the same bytes, but ``add_``
    needs less memory.
    """
    if func is not torch.ops.aten.add.Tensor or torch._C._current_graph_task_id() == -1:
        return func
    first, second = args[:2]
    like = isinstance(second, Tensor) and (first.shape, first.dtype) == (second.shape, second.dtype)
    if torch.is_grad_enabled() or not like:
        return func
    storage = first.untyped_storage()
    uses = first._use_count(), torch._C._storage_Use_Count(storage._cdata)
    whole = region_of(first)[1] == storage.nbytes()  # the tensor covers its whole storage
    return torch.ops.aten.add_.Tensor if whole and uses == UNSHARED else func
