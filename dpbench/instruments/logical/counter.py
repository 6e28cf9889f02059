"""Counts the bytes, FLOPs and live memory of operators.

`without_data` runs operators on fake tensors. PyTorch's `FakeTensorMode` gives a tensor a shape and
a dtype but no memory, so a model may need more memory than the machine has. `OperatorCounter` is a
dispatch mode, which PyTorch calls after autograd and before `FakeTensorMode`. Therefore
`OperatorCounter` receives the operators of forward, backward and optimizer.

Fake tensors have the device ``cpu``. In a build of PyTorch without CUDA, autograd ends the process
if it finds a fake ``cuda`` tensor, because the device guard of CUDA is missing. `as_on_cuda` makes
PyTorch choose the same operators as for CUDA tensors.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, distributed
from torch._ops import HigherOrderOperator, OperatorBase, OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from dpbench.core.case import ALL_PHASES, OUTSIDE
from dpbench.core.metrics import unit
from dpbench.core.subject import Subject
from dpbench.instruments.logical import rules
from dpbench.instruments.logical.as_on_cuda import CUDA_REPLACEMENTS, as_on_cuda
from dpbench.instruments.logical.costs import (
    Cost,
    cost,
    cost_by_subclass,
    formula_of,
    lacks_formula,
)
from dpbench.instruments.logical.memo import Memo, result_maker
from dpbench.instruments.logical.memory import (
    LiveMemory,
    ScriptMemory,
    in_place_variant,
    tensors,
    track_resizing,
)
from dpbench.instruments.logical.rules import (
    device_of,
    have_own_operators,
    is_composite,
    label,
)
from dpbench.instruments.logical.source_lines import Place, PlaceFinder
from dpbench.instruments.logical.stand_ins import (
    STAND_INS,
    AssumedValues,
    UnsupportedOperation,
    with_positive_dims,
)
from dpbench.results.kernels import NO_FLOPS, NOT_COUNTED, OperatorCount, numbers, unnumbered
from dpbench.results.rows import NO_HARDWARE, STEP, Measurement

CONSTANT_ELEMENTS = 1024
"""Largest number of elements of a constant whose values are kept.

Values are kept only if the constant is created while a model is built, or between steps.
"""
_arange = torch.ops.aten.arange
CONSTANTS = (torch.ops.aten.linspace.default, _arange.default, _arange.start, _arange.start_step)
"""Operators that create constants of a model, such as the rates of stochastic depth."""

PYTHON = torch._C.DispatchKey.Python
"""The dispatch key of dispatch modes. PyTorch ignores all modes where this key is excluded."""

NAMESPACES_WITHOUT_WORK = ("prim", "profiler")
"""Namespaces of operators that move no data, for example ``prim::device``."""


Calls: TypeAlias = Counter[tuple[str, str, Cost, Place]]
"""Number of calls by phase, operator, cost and place (module and source line)."""


class OperatorCounter(TorchDispatchMode):
    """A `PhaseListener` that counts the latest step by phase and operator.

    Between steps, the counter only tracks live memory.

    Args:
        fake: the mode that creates fake tensors. If None, operators run on real tensors.
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
        self._heard = 0  # number of operators that this mode has received
        self._passed: Any = None  # the operator that is left to a tensor subclass
        self._forget()

    def _forget(self) -> None:
        self.calls: Calls = Counter()
        self._places = PlaceFinder()
        # For each operator in a phase: live bytes after the first call and after the last call, and
        # the maximum of live bytes after a call.
        self.live: dict[tuple[str, str], tuple[int, int, int]] = {}
        # Maximum of live bytes by phase.
        self.peaks: dict[str, int] = {}
        self.notes = Counter[str]()  # number of occurrences of each note

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that PyTorch does not disable torch.compile in each call.

        Disabling costs time, and a step that uses torch.compile raises an error anyway.
        """
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
        """Counts of each operator by phase, module and source line.

        Operators that move the most bytes come first.
        """
        return operator_counts(self.calls)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # a fast path, because this call is frequent
        if func is self._passed and have_own_operators(types):
            self._passed = None
            return NotImplemented  # PyTorch then calls the subclass
        if func.namespace in NAMESPACES_WITHOUT_WORK:
            return func(*args, **kwargs)
        self._heard += 1
        if have_own_operators(types):
            heard, out = self._heard, self._run_by_subclass(func, args, kwargs)
            if self._phase is not None and self._heard == heard:
                self._record(self._phase, func, cost_by_subclass(func, args, kwargs, out))
            return out
        if is_composite(func):  # inference mode does not decompose operators
            return self._listen(CUDA_REPLACEMENTS.get(func, func.decompose), *args, **kwargs)
        device = device_of(func, kwargs)
        runs = in_place_variant(func, args)
        effect, inputs = self._memo.look_up(runs, args, kwargs)
        if inputs is not None and effect.make_result:
            out = effect.make_result(inputs)
        else:
            out = self._run(runs, args, kwargs)
            effect.make_result = None if inputs is None else result_maker(out, inputs)
        if device == "meta":  # meta tensors need no memory on a GPU either
            return out
        for tensor in tensors(out):
            self.memory.track(tensor)
        if self._phase is not None:
            if torch.is_autocast_enabled("cuda"):
                raise UnsupportedOperation(
                    "torch.set_autocast_enabled cannot be simulated without a GPU: use the "
                    "context manager torch.autocast"
                )
            effect.cost = effect.cost or cost(runs, args, kwargs, out)
            self._record(self._phase, func, effect.cost)
            now, place = self.memory.now, (self._phase, label(func))
            first, _, most = self.live.get(place, (now, now, now))
            self.live[place] = first, now, max(most, now)
        return out

    def _run_by_subclass(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator of a tensor subclass. This mode receives the subclass's own operators."""
        self._passed = func
        try:
            return self._listen(func, *args, **kwargs)
        finally:
            self._passed = None

    def _listen(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function whose operators this mode receives."""
        with self:
            return function(*args, **kwargs)

    def _run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return self._run_or_assume(func, args, kwargs)
        finally:
            for memo in self._memos:  # otherwise weak references in memos break `module.to(dtype)`
                if memo:
                    memo.clear()

    def _run_or_assume(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            out = rules.drop_masked_gradients(
                func, args, kwargs, func(*with_positive_dims(func, args), **kwargs)
            )
            if self._phase is None and func in CONSTANTS and out.numel() <= CONSTANT_ELEMENTS:
                with no_dispatch():  # a fake tensor that has values until it is overwritten
                    real = func(*args, **kwargs)
                converter = self._fake.fake_tensor_converter
                return converter.from_real_tensor(self._fake, real, make_constant=True)
            return out
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            if func is torch.ops.aten._local_scalar_dense.default:
                out = self._values.value(args[0], counted=self._phase is not None)
                note = "counted as if values that code reads, as by loss.item(), were 1"
            elif func in STAND_INS:
                out, assumed = STAND_INS[func](*args, **kwargs)
                note = f"an upper bound: {label(func)} is counted as if {assumed}"
            else:
                raise UnsupportedOperation(
                    f"the result of {label(func)} depends on values of tensors, but the step is "
                    f"counted without values"
                ) from error
        if self._phase is not None:
            self.notes[note] += 1
        return out

    def _record(self, phase: str, func: OpOverload, cost: Cost) -> None:
        if any(cost[:-1]):
            self.calls[phase, label(func), cost, self._places.current()] += 1
        if lacks_formula(func):
            self.notes[f"{NO_FLOPS}: {label(func)} multiplies but has no FLOP formula"] += 1


class RealTensorCounter(OperatorCounter):
    """An `OperatorCounter` for operators that run on tensors with data, on any device.

    PyTorch chooses the operators of that device, for example for attention and dropout.
    """

    memory: Any

    def __init__(self) -> None:
        super().__init__(None)
        self.lost = False  # whether the script took this mode away during the last step

    def track_memory(self) -> None:
        """Begin to track memory, once the device is known. The first step also does this."""
        self.memory = ScriptMemory()
        self.memory.track_existing()

    def start_step(self) -> None:
        self.put_below()
        if not isinstance(self.memory, ScriptMemory):
            self.track_memory()
        self.memory.start_step()
        self.lost = False
        super().start_step()

    def switch(self, phase: str) -> None:
        super().switch(phase)
        self.lost |= torch._C._dispatch_tls_is_dispatch_key_excluded(PYTHON)

    def is_heard(self) -> bool:
        """Return True if PyTorch calls this mode once for each operator of this thread."""
        included = torch._C._dispatch_tls_is_dispatch_key_included(PYTHON)
        return included and _modes().count(self) == 1

    def put_below(self) -> None:
        """Put this mode below all modes of the script, which may end in any order.

        Modes are pushed again, because the end of inference mode or of a compiled function makes
        PyTorch ignore modes that began within it.
        """
        _set_modes([self, *self._others()])

    def remove(self) -> None:
        """Remove this mode, wherever it is among the modes of the script."""
        _set_modes(self._others())

    def _others(self) -> list[TorchDispatchMode]:
        return [mode for mode in _modes() if mode is not self]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return True, so that PyTorch does not compile this method in a compiled script."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that PyTorch compiles the branches of ``torch.cond`` under this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is self._passed and have_own_operators(types):
            self._passed = None
            return NotImplemented  # PyTorch then calls the subclass
        phase, heard, by_subclass = self._phase, self._heard, have_own_operators(types)
        if phase is None or func.namespace in NAMESPACES_WITHOUT_WORK or _is_traced():
            return func(*args, **kwargs)
        self._heard = heard = heard + 1
        if by_subclass:
            out = self._run_by_subclass(func, args, kwargs)
        elif isinstance(func, HigherOrderOperator) and lacks_formula(func):
            out = func(*pytree.tree_map(self._listening, args), **kwargs)
        elif is_composite(func):  # inference mode does not decompose operators
            return self._listen(func.decompose, *args, **kwargs)
        else:
            out = func(*args, **kwargs)
        if self._heard > heard:  # the operators that it ran are counted instead
            return out
        if any(each.is_meta for each in tensors(out)):  # meta tensors have no data
            return out
        try:
            costs = cost_by_subclass if by_subclass else cost
            self._record(phase, func, costs(func, args, kwargs, out))
            self.memory.run(phase, [*args, *kwargs.values()], out)
        except Exception as error:  # a failure to count must not stop the script
            self._note_uncounted(func, args, out, error)
        return out

    def _listening(self, value: Any) -> Any:
        """Return a function with `_listen` around it, and any other value unchanged."""
        is_function = callable(value) and not isinstance(value, (Tensor, OperatorBase))
        return partial(self._listen, value) if is_function else value

    def _note_uncounted(self, func: Any, args: Any, out: Any, error: Exception) -> None:
        """Add a note that an operator was not counted, with the reason."""
        layouts = {str(each.layout) for each in tensors([args, out])} - {"torch.strided"}
        why = f"its tensors are {' and '.join(sorted(layouts))}" if layouts else "no rule fits it"
        if isinstance(error, UnsupportedOperation):
            why = str(error)
        self.notes[f"{NOT_COUNTED}: {label(func)}: {why}"] += 1
        if formula_of(func) or lacks_formula(func):
            self.notes[f"{NO_FLOPS}: {label(func)} multiplies but was not counted"] += 1


def _modes() -> list[TorchDispatchMode]:
    """Return the dispatch modes of this thread, from the outermost to the innermost."""
    depth = torch._C._len_torch_dispatch_stack()
    return [torch._C._get_dispatch_stack_at(number) for number in range(depth)]


def _set_modes(modes: Iterable[TorchDispatchMode]) -> None:
    for _ in _modes():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)


def _is_traced() -> bool:
    """Return True if operators run on tensors without data, or only become part of a graph."""
    keys = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(key) for key in (keys.PROXY, keys.FAKE))


def operator_counts(calls: Calls, steps: int = 1) -> tuple[OperatorCount, ...]:
    """Return the counts of each operator by phase, module and source line, as means over steps.

    Operators that move the most bytes come first.
    """
    totals: dict[tuple[str, str, Place], Counter[str]] = defaultdict(Counter)
    for (phase, name, each, place), times in calls.items():
        total = totals[phase, name, place]
        total["calls"] += times
        for what, amount in zip(each._fields[:-1], each[:-1], strict=True):
            total[what] += times * amount

    counts = [
        OperatorCount(
            phase=phase,
            operator=name,
            general_rule=rules.uses_general_rule(name),
            module=place.module,
            line=place.line,
            **{what: n / steps if n % steps else n // steps for what, n in each.items()},
        )
        for (phase, name, place), each in totals.items()
    ]
    return tuple(sorted(counts, key=_by_size))


def _by_size(count: OperatorCount) -> tuple[Any, ...]:
    """Return the key that sorts from most to least bytes, with layers that are alike in a row."""
    names = count.phase, count.operator, count.line, unnumbered(count.module)
    return -count.total_bytes, -count.read_bytes, *names, numbers(count.module)


@contextmanager
def without_data() -> Iterator[OperatorCounter]:
    """Create new tensors without data inside the block, and yield a counter of operators.

    Operators in the block may also use real tensors. The values of real tensors are ignored.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with as_on_cuda(), fake, OperatorCounter(fake) as counter, track_resizing(counter.memory):
        yield counter


def logical_rows(
    case: Subject,
    operators: Iterable[OperatorCount],
    peaks: Mapping[str, int],
    repeat: int = 0,
    largest: int = 0,
) -> Iterator[Measurement]:
    """Yield the rows of each phase of a step and of the whole step.

    Args:
        case: the case or script.
        operators: the counts of the step.
        peaks: peak live bytes by phase of the step.
        repeat: value of the column ``repeat``.
        largest: bytes of the step's largest tensor. If 0, the row of these bytes is left out.
    """
    operators = tuple(operators)
    with_others = case.gpus > 1 or (
        distributed.is_initialized() and distributed.get_world_size() > 1
    )
    tool = f"torch {torch.__version__}"
    for phase in (*(phase for phase in ALL_PHASES if phase in peaks), STEP):
        counts = [count for count in operators if phase in (count.phase, STEP)]
        values = {
            "logical_read_bytes": sum(count.read_bytes for count in counts),
            "logical_write_bytes": sum(count.write_bytes for count in counts),
            "flops": sum(count.flops for count in counts),
        }
        if with_others:
            values["collective_bytes"] = sum(count.collective_bytes for count in counts)
        values["peak_memory_bytes"] = peaks.get(phase, max(peaks.values()))
        if largest and phase == STEP:
            values["largest_tensor_bytes"] = largest
        for metric, value in values.items():
            where = unit(metric), repeat, NO_HARDWARE, tool
            yield Measurement(case, "logical", phase, metric, value, *where)
