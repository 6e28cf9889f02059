"""Runs operators on tensors without data, and counts what they move, compute and keep alive.

`FakeTensorMode` gives every operator's result a shape and a dtype but no memory, so a model of
any size runs on any machine. `ByteCounter` sits on top of it and sees every operator that
PyTorch dispatches, below autograd: forward, backward, optimizer, whoever called it.

Why fake tensors are on the CPU
    A build of PyTorch without CUDA can make a fake ``cuda`` tensor, but the autograd engine
    then asks for a CUDA device guard and ends the process. So the tensors say ``cpu``, and the
    few choices that PyTorch makes by device are made as for CUDA where bytes depend on them:
    optimizers use ``foreach``. Attention takes the CPU's fused kernel, which
    has the same operands as CUDA's. Dropout is the one known exception: on CUDA one fused
    operator, here several.

Values that do not exist
    An operator whose result's *shape* depends on data (``unique``, ``nonzero``) is given the
    largest that it can have. A *value* that Python asks for (``loss.item()``) is 1. Both are
    noted, each with the number that was assumed.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from dpbench.case import OUTSIDE
from dpbench.instruments.logical import rules

ALLOCATION_BYTES = 512
"""PyTorch's CUDA allocator hands out memory in multiples of this."""

NOT_WORK = frozenset({"prim", "profiler"})
"""Namespaces of operators that ask or mark something (``prim::device``) and move no data."""


class UnsupportedOperation(Exception):
    """A step does something that cannot be counted without running it for real."""


@dataclass
class Count:
    """What one operator did in one phase: calls, bytes, floating-point operations."""

    calls: int = 0
    read_bytes: int = 0
    write_bytes: int = 0
    flops: int = 0


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


class ByteCounter(TorchDispatchMode):
    """Counts by phase and operator while a step runs; a `PhaseListener`.

    Outside an observed step it only keeps track of memory. `without_data` makes one. What it has
    counted is about the last observed step:

    Args:
        fake: the mode beneath this one.

    Attributes:
        counts: by ``(phase, operator)``, the operator written ``aten.clone``.
        peaks: by phase, the most bytes alive at once.
        notes: what was assumed, and how often.
        by_general_rule: operators that nobody has reviewed a rule for.
        memory: the bytes alive now.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        converter = fake.fake_tensor_converter.meta_converter
        self._memos = (converter.tensor_memo, converter.describer.lookup_tensor)
        self.memory = LiveMemory()
        self._phase: str | None = None
        self._forget()

    def _forget(self) -> None:
        self.counts: dict[tuple[str, str], Count] = defaultdict(Count)
        self.peaks: dict[str, int] = {}
        self.notes: dict[str, int] = defaultdict(int)
        self.by_general_rule: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No guard against torch.compile around each call; nothing is compiled here."""
        return False

    def start_step(self) -> None:
        self._forget()
        self._enter(OUTSIDE)

    def switch(self, phase: str) -> None:
        self._leave()
        self._enter(phase)

    def end_step(self) -> None:
        self._leave()
        self._phase = None

    def _enter(self, phase: str) -> None:
        self._phase = phase
        self.memory.restart_peak()

    def _leave(self) -> None:
        if self._phase is not None:
            self.peaks[self._phase] = max(self.peaks.get(self._phase, 0), self.memory.peak)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # two of three calls: not worth asking the next mode
        if func.namespace in NOT_WORK:
            return func(*args, **kwargs)
        if is_composite(func):  # reaches a mode undecomposed in inference mode
            with self:
                return func.decompose(*args, **kwargs)
        device = device_of(func, kwargs)
        out = self._run(func, args, kwargs)
        for memo in self._memos:  # their weak references would make `module.to(dtype)` fail
            if memo:
                memo.clear()
        if device == "meta":  # without data on a real device, too
            return out
        for tensor in rules.tensors(out):
            self.memory.see(tensor)
        if self._phase is not None:
            self._record(self._phase, func, args, kwargs, out)
        return out

    def _run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            stand_in = STAND_INS.get(func)
            if stand_in is None:
                raise UnsupportedOperation(
                    f"what {label(func)} returns depends on data, which does not exist here"
                ) from error
            out, note = stand_in(*args, **kwargs)
        if self._phase is not None:
            self.notes[f"{label(func)}: {note}"] += 1
        return out

    def _record(
        self, phase: str, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        moved = rules.traffic(func, args, kwargs, out)
        flops = flops_of(func, args, kwargs, out)
        if not (moved.read or moved.write or flops):
            return
        name = label(func)
        count = self.counts[phase, name]
        count.calls += 1
        count.read_bytes += moved.read
        count.write_bytes += moved.write
        count.flops += flops
        if not rules.is_reviewed(func):
            self.by_general_rule.add(name)


@contextmanager
def without_data() -> Iterator[ByteCounter]:
    """Tensors made in here have no data, and the counter sees every operator.

    Real tensors from outside may be used; they are taken for their shape.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake, ByteCounter(fake) as counter:
        yield counter


@cache
def label(func: OpOverload) -> str:
    """An operator's name as PyTorch's profiler tables spell it, e.g. ``aten.clone``."""
    return str(func._schema.name).replace("::", ".")


@cache
def is_composite(func: OpOverload) -> bool:
    """Whether an operator is nothing but calls of others, which are counted instead."""
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return (
        isinstance(func, OpOverload)
        and func.namespace == "aten"
        and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), composite)
    )


def device_of(func: OpOverload, kwargs: Mapping[str, Any]) -> str:
    """The type of device that a call asks for, ``cpu`` if it does not.

    Raises:
        UnsupportedOperation: it is neither ``cpu`` nor ``meta``. Without that device, going on
            could end the process (see above).
    """
    device = kwargs.get("device")
    asked = "cpu" if device is None else torch.device(device).type
    if asked not in ("cpu", "meta"):
        raise UnsupportedOperation(
            f"{label(func)} asks for device {str(device)!r}; take the device from the batch or the "
            f"model, so that the step can be counted without hardware"
        )
    return asked


def flops_of(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    """Floating-point operations of a call by PyTorch's own formulas (`torch.utils.flop_counter`).

    They know matrix products, convolutions and attention, count a multiply-add as two, and do
    not halve causal attention. Everything else has none.
    """
    formula = _flop_formula(func)
    return int(formula(*args, **kwargs, out_val=out)) if formula else 0


@cache
def _flop_formula(func: OpOverload) -> Callable[..., int] | None:
    aten = torch.ops.aten
    same = {  # the CPU's fused attention takes its operands in the same order as CUDA's
        aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            aten._scaled_dot_product_flash_attention_backward
        ),
    }
    packet = func.overloadpacket
    found: Callable[..., int] | None = flop_registry.get(same.get(packet, packet))
    return found


def _scalar(self: Tensor) -> tuple[Any, str]:
    one: bool | int | float = 1.0 if self.is_floating_point() or self.is_complex() else 1
    return self.dtype is torch.bool or one, "a value that Python asked for was taken to be 1"


def _unique_dim(
    self: Tensor, dim: int, sorted: bool = True, inverse: bool = False, counts: bool = False
) -> tuple[Any, str]:
    rows = self.shape[dim]
    out = (torch.empty_like(self), *(_index(rows if wanted else 0) for wanted in (inverse, counts)))
    return out, f"all {rows} rows were taken to be distinct"


def _unique(
    self: Tensor, sorted: bool = True, inverse: bool = False, counts: bool = False
) -> tuple[Any, str]:
    size = self.numel()
    wheres = _index(*self.shape) if inverse else _index(0)
    out = (self.new_empty(size), wheres, _index(size if counts else 0))
    return out, f"all {size} values were taken to be distinct"


def _unique_consecutive(
    self: Tensor, inverse: bool = False, counts: bool = False, dim: int | None = None
) -> tuple[Any, str]:
    if dim is None:
        return _unique(self, True, inverse, counts)
    return _unique_dim(self, dim, True, inverse, counts)


def _nonzero(self: Tensor) -> tuple[Any, str]:
    return _index(self.numel(), self.dim()), f"all {self.numel()} were taken to be nonzero"


def _masked_select(self: Tensor, mask: Tensor) -> tuple[Any, str]:
    size = torch.broadcast_shapes(self.shape, mask.shape).numel()
    return self.new_empty(size), f"all {size} were taken to be selected"


def _select(self: Tensor, indices: list[Tensor | None]) -> tuple[Any, str]:
    positions: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            positions += [_index(index.numel())] * index.dim()
        else:
            positions.append(index)
    out = torch.ops.aten.index.Tensor(self, positions)
    return out, "every element of a mask was taken to be true"


def _index(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device="cpu")


_aten = torch.ops.aten
STAND_INS: Mapping[OpOverload, Callable[..., tuple[Any, str]]] = {
    _aten._local_scalar_dense.default: _scalar,
    _aten.unique_dim.default: _unique_dim,
    _aten._unique2.default: _unique,
    _aten.unique_consecutive.default: _unique_consecutive,
    _aten.nonzero.default: _nonzero,
    _aten.masked_select.default: _masked_select,
    _aten.index.Tensor: _select,
}
"""For operators whose result depends on data: a result of the largest possible shape, and what
that assumes. The parameters are those of the operator's schema, in its order."""
