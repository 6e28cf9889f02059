"""Runs operators on tensors without data, and counts their bytes, FLOPs and live memory.

`FakeTensorMode` gives every result a shape and a dtype but no memory, so a model of any size runs
on any machine. `OperatorCounter` sits above it and below autograd, and sees every operator that
PyTorch dispatches in forward, backward and optimizer.

Why fake tensors are on the CPU
    A build without CUDA can make a fake ``cuda`` tensor, but its autograd engine then ends the
    process, because it finds no CUDA device guard. So tensors say ``cpu``, and `as_on_cuda` makes
    PyTorch choose operators as for CUDA.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import distributed
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from dpbench.core.case import ALL_PHASES, OUTSIDE
from dpbench.core.metrics import unit
from dpbench.core.subject import Subject
from dpbench.instruments.logical import rules
from dpbench.instruments.logical.as_on_cuda import INSTEAD, as_on_cuda
from dpbench.instruments.logical.costs import Cost, cost
from dpbench.instruments.logical.flops import formula_of, is_unknown
from dpbench.instruments.logical.memo import Memo, answer
from dpbench.instruments.logical.memory import (
    LiveMemory,
    ScriptMemory,
    in_place,
    resizing_seen,
    tensors,
)
from dpbench.instruments.logical.source_lines import Place, Places
from dpbench.instruments.logical.stand_ins import (
    STAND_INS,
    AssumedValues,
    UnsupportedOperation,
    with_positive_dims,
)
from dpbench.results.kernels import NO_FLOPS, NOT_COUNTED, OperatorCount
from dpbench.results.rows import NO_HARDWARE, STEP, Measurement

CONSTANT_ELEMENTS = 1024
"""Constants up to this size keep their values while a model is built."""
_arange = torch.ops.aten.arange
CONSTANTS = (torch.ops.aten.linspace.default, _arange.default, _arange.start, _arange.start_step)
"""Operators whose constants build models, such as the rates of stochastic depth."""

OWN_KERNELS = ("aten._fused_rms_norm", "aten.mish_backward", "aten.silu_backward")
"""Operators that are one kernel on CUDA and composed of others elsewhere."""

NOT_WORK = ("prim", "profiler")
"""Namespaces of operators that move no data, such as ``prim::device``."""


class OperatorCounter(TorchDispatchMode):
    """Counts a step by phase and operator, above a mode of fake tensors; a `PhaseListener`.

    It keeps the counts of the latest step. Between steps it tracks memory only.
    """

    supports_higher_order_operators = True

    def __init__(self, fake: FakeTensorMode | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake: Any = fake
        if fake:
            converter = fake.fake_tensor_converter.meta_converter
            self._memos = (converter.tensor_memo, converter.describer.lookup_tensor)
            self._memo = Memo(fake)
        self._values = AssumedValues()
        self.memory: LiveMemory = LiveMemory()
        self._phase: str | None = None
        self._forget()

    def _forget(self) -> None:
        self.calls = Counter[tuple[str, str, Cost, Place]]()  # by phase, operator, cost and place
        self._places = Places()
        # By phase and operator: live bytes after its first and last call, and the most.
        self.live: dict[tuple[str, str], tuple[int, int, int]] = {}
        self.peaks: dict[str, int] = {}  # by phase: most live bytes
        self.notes = Counter[str]()  # assumptions, by how often they were made

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Skip the guard against torch.compile around each call: nothing is compiled here."""
        return False

    def start_step(self) -> None:
        self._forget()
        self._values.asked.clear()
        self.memory.largest = 0
        self.switch(OUTSIDE)

    def switch(self, phase: str) -> None:
        self.end_step()
        self._phase = phase
        self.memory.peak = self.memory.now

    def end_step(self) -> None:
        if self._phase is not None:
            self.peaks[self._phase] = max(self.peaks.get(self._phase, 0), self.memory.peak)
        self._phase = None

    @property
    def operators(self) -> tuple[OperatorCount, ...]:
        """The counts of each operator by phase and place, most bytes first."""
        totals: dict[tuple[str, str, Place], Counter[str]] = defaultdict(Counter)
        for (phase, name, each, place), times in self.calls.items():
            total = totals[phase, name, place]
            total["calls"] += times
            for what, amount in zip(each._fields[:-1], each[:-1], strict=True):
                total[what] += times * amount
        counts = [
            OperatorCount(
                *(phase, name, count["calls"], count["read_bytes"], count["write_bytes"]),
                *(count["flops"], rules.is_foreign(name), count["collective_bytes"], *place),
            )
            for (phase, name, place), count in totals.items()
        ]
        return tuple(sorted(counts, key=lambda count: -count.total_bytes))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_distributed(types):
            return NotImplemented  # dispatches again with this rank's tensors
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # two thirds of all calls: skip the next mode
        if func.namespace in NOT_WORK:
            return func(*args, **kwargs)
        if is_composite(func):  # inference mode does not decompose it
            with self:
                return INSTEAD.get(func, func.decompose)(*args, **kwargs)
        device = device_of(func, kwargs)
        runs = in_place(func, args)  # moves as many bytes
        effect, given = self._memo.look_up(runs, args, kwargs, self._phase is not None)
        if given is not None and effect.answer:
            out = effect.answer(self._fake, given)
        else:
            out = self._run(runs, args, kwargs)
            effect.answer = None if given is None else answer(out, given)
        if device == "meta":  # it would take no GPU memory either
            return out
        for tensor in tensors(out):
            self.memory.see(tensor)
        if self._phase is not None:
            if torch.is_autocast_enabled("cuda"):
                raise UnsupportedOperation(
                    "torch.set_autocast_enabled cannot be followed without a GPU: use a region of "
                    "torch.autocast"
                )
            effect.cost = effect.cost or cost(runs, args, kwargs, out)
            self._record(self._phase, func, effect.cost)
            now, place = self.memory.now, (self._phase, label(func))
            first, _, most = self.live.get(place, (now, now, now))
            self.live[place] = first, now, max(most, now)
        return out

    def _run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return self._run_or_assume(func, args, kwargs)
        finally:
            for memo in self._memos:  # `module.to(dtype)` fails on their weak references
                if memo:
                    memo.clear()

    def _run_or_assume(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            out = rules.asked_for(
                func, args, kwargs, func(*with_positive_dims(func, args), **kwargs)
            )
            if self._phase is None and func in CONSTANTS and out.numel() <= CONSTANT_ELEMENTS:
                with no_dispatch():  # a fake constant, until it is overwritten
                    real = func(*args, **kwargs)
                converter = self._fake.fake_tensor_converter
                return converter.from_real_tensor(self._fake, real, make_constant=True)
            return out
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            if func is torch.ops.aten._local_scalar_dense.default:
                out = self._values.value(args[0], counted=self._phase is not None)
                note = "a value that Python asked for was taken to be 1"
            elif func in STAND_INS:
                out, note = STAND_INS[func](*args, **kwargs)
            else:
                raise UnsupportedOperation(
                    f"the result of {label(func)} depends on data, which does not exist here"
                ) from error
        if self._phase is not None:
            self.notes[f"{label(func)}: {note}"] += 1
        return out

    def _record(self, phase: str, func: OpOverload, cost: Cost) -> None:
        if any(cost[:-1]):
            self.calls[phase, label(func), cost, self._places.here()] += 1
        if is_unknown(func):
            self.notes[f"{NO_FLOPS}: {label(func)} multiplies, and has no formula"] += 1


class RealTensorCounter(OperatorCounter):
    """Counts operators on tensors with data as they run, on any device.

    PyTorch chooses attention, dropout and others for that device.
    """

    memory: ScriptMemory

    def __init__(self) -> None:
        super().__init__(None)
        self.memory = ScriptMemory()
        self.memory.see_those_made_before()

    def start_step(self) -> None:
        self.memory.start_step()
        super().start_step()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Do not skip PyTorch's guard, because a script may use torch.compile."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_distributed(types):
            return NotImplemented  # dispatches again with this rank's tensors
        kwargs = kwargs or {}
        if self._phase is None or func.namespace in NOT_WORK:
            return func(*args, **kwargs)
        if is_composite(func):  # inference mode does not decompose it
            with self:
                return func.decompose(*args, **kwargs)
        phase = self._phase
        out = func(*args, **kwargs)
        try:
            self._record(phase, func, cost(func, args, kwargs, out))
            self.memory.run(phase, [*args, *kwargs.values()], out)
        except Exception as error:  # only counting failed: the script goes on
            self._leave_out(func, args, out, error)
        return out

    def _leave_out(self, func: Any, args: Any, out: Any, error: Exception) -> None:
        """Note that an operator was not counted, and why; the script goes on."""
        layouts = {str(each.layout) for each in tensors([args, out])} - {"torch.strided"}
        why = f"its tensors are {' and '.join(sorted(layouts))}" if layouts else "no rule fits it"
        if isinstance(error, UnsupportedOperation):
            why = str(error)
        self.notes[f"{NOT_COUNTED}: {label(func)}: {why}"] += 1
        if formula_of(func) or is_unknown(func):
            self.notes[f"{NO_FLOPS}: {label(func)} multiplies, and was not counted"] += 1


@contextmanager
def without_data() -> Iterator[OperatorCounter]:
    """Make tensors without data within this context; the counter sees every operator.

    Real tensors may be used too; only their shapes count.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with as_on_cuda(), fake, OperatorCounter(fake) as counter, resizing_seen(counter.memory):
        yield counter


def logical_rows(
    case: Subject,
    operators: Iterable[OperatorCount],
    phases: Collection[str],
    peaks: Mapping[str, int] | None = None,
    repeat: int = 0,
    largest: int = 0,
) -> Iterator[Measurement]:
    """Yield the rows of each phase of a step, and of the whole with its ``largest`` tensor."""
    operators = tuple(operators)
    with_others = case.gpus > 1 or (
        distributed.is_initialized() and distributed.get_world_size() > 1
    )
    tool = f"torch {torch.__version__}"
    for phase in (*(phase for phase in ALL_PHASES if phase in phases), STEP):
        counts = [count for count in operators if phase in (count.phase, STEP)]
        values = {
            "logical_read_bytes": sum(count.read_bytes for count in counts),
            "logical_write_bytes": sum(count.write_bytes for count in counts),
            "flops": sum(count.flops for count in counts),
        }
        if with_others:
            values["collective_bytes"] = sum(count.collective_bytes for count in counts)
        if peaks:
            values["peak_memory_bytes"] = peaks.get(phase, max(peaks.values()))
        if largest and phase == STEP:
            values["largest_tensor_bytes"] = largest
        for metric, value in values.items():
            where = unit(metric), repeat, NO_HARDWARE, tool
            yield Measurement(case, "logical", phase, metric, value, *where)


@cache
def label(func: Any) -> str:
    """An operator's name as PyTorch's profiler tables spell it, e.g. ``aten.clone``."""
    return str(func.name()).partition(".")[0].replace("::", ".")


@cache
def is_composite(func: OpOverload) -> bool:
    """Whether an operator only calls others, which are counted instead."""
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return (
        func.namespace == "aten"
        and label(func) not in OWN_KERNELS
        and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), composite)
    )


def is_distributed(types: Iterable[type]) -> bool:
    """Whether an argument is a DTensor, or a tensor that a collective is still to fill."""
    return any(kind.__name__ in ("DTensor", "AsyncCollectiveTensor") for kind in types)


def device_of(func: OpOverload, kwargs: Mapping[str, Any]) -> str:
    """The device type that a call asks for, by default ``cpu``.

    Types other than ``cpu`` and ``meta`` are refused: they could end the process, see the module.
    """
    device = kwargs.get("device")
    asked = "cpu" if device is None else torch.device(device).type
    if asked not in ("cpu", "meta"):
        raise UnsupportedOperation(
            f"{label(func)} asks for device {str(device)!r}; take the device from the batch or the "
            f"model, so that the step can be counted without hardware"
        )
    return asked
