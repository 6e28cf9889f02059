"""A libcupti and a driver in Python: they check sizes and order of calls, and count what is fed."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable
from typing import Any

from dpbench.core.metrics import METRICS
from dpbench.instruments.counters import Driver
from dpbench.instruments.cupti.chip import LINKS
from dpbench.instruments.cupti.library import NAMES, Library, c_function, struct_size
from dpbench.instruments.cupti.ranges import Payload, Target

ALL = tuple(
    dict.fromkeys(c for m in METRICS.counted("cupti") if m.name not in LINKS for c in m.on("GH100"))
)
"""Every counter that is read by default."""

OF_LINKS = tuple(counter for name in LINKS for counter in METRICS[name].counters)
"""Those that are read as well where there are other GPUs."""

WRONG_PARAMETER, WRONG_ORDER, DO_NOT_COMBINE, NOT_AVAILABLE = 1, 7, 27, 999
CONTEXT = 4711


class FakeCuda:
    """libcuda: ``version`` as the driver says it, ``context`` what the thread works in."""

    def __init__(self, version: int = 13000, context: int | None = CONTEXT) -> None:
        self.version, self.context = version, context

    def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802
        version._obj.value = self.version
        return 0

    def cuCtxGetCurrent(self, context: Any) -> int:  # noqa: N802
        context._obj.value = self.context
        return 0


class FakeCupti:
    """libcupti.

    Args:
        version: its CUPTI_API_VERSION.
        counters: what the chip can count.
        a_pass: how many counters fit one pass.
        fails: function → the code that it returns.
        lacks: functions that it does not have.
        drops: ranges, by number, that it loses.
        silent: counters that have no value.
    """

    def __init__(
        self,
        version: int = 130001,
        *,
        counters: Iterable[str] = ALL,
        a_pass: float = 100,
        fails: dict[str, int] | None = None,
        lacks: Iterable[str] = (),
        drops: Iterable[int] = (),
        silent: Iterable[str] = (),
        hidden: Iterable[str] = (),
    ) -> None:
        self.version, self.a_pass = version, a_pass
        self.fails, self.lacks = fails or {}, set(lacks)
        self.drops, self.silent, self.hidden = set(drops), set(silent), set(hidden)
        self.base = sorted({counter.partition(".")[0] for counter in counters})
        self.now: dict[str, float] = {}  # what the GPU has done so far, by counter
        self.calls: list[str] = []
        self.hosts: dict[int, list[str]] = {}  # open host objects, and their counters
        self.restricted: set[int] = set()  # hosts that know what the machine calls unavailable
        self.configurations: list[list[str]] = []
        self.ranges: list[tuple[bytes, dict[str, float]]] = []
        self.chosen: list[str] | None = None  # the counters of the configuration that is set
        self.first: list[str] | None = None  # those that the profiler was first set to
        self.state = "off"  # off, initialized, enabled, started, open
        self._keep: list[Any] = []
        self._names = {c_function(name): name for name in NAMES}

    def work(self, amount: float, counters: Iterable[str] | None = None) -> None:
        """The GPU does something that each of these counters sees."""
        for counter in counters or ALL:
            self.now[counter] = self.now.get(counter, 0.0) + amount

    def __getattr__(self, function: str) -> Callable[[Any], int]:
        if not function.startswith("cupti") or function in self.lacks:
            raise AttributeError(function)
        if function == "cuptiGetVersion":
            return self._version
        if function not in self._names:
            raise AttributeError(function)
        name = self._names[function]

        def call(pointer: Any) -> int:
            self.calls.append(name)
            if function in self.fails:
                return self.fails[function]
            parameters = pointer._obj
            if parameters.structSize != struct_size(name, self.version) or vars(parameters):
                return WRONG_PARAMETER  # the latter: fields that the structure does not have
            return getattr(self, f"_{name}")(parameters) or 0

        return call

    def _version(self, pointer: Any) -> int:
        pointer._obj.value = self.version
        return self.fails.get("cuptiGetVersion", 0)

    def _array(self, names: Iterable[str]) -> Any:
        encoded = [name.encode() for name in names]
        self._keep.append((ctypes.c_char_p * len(encoded))(*encoded))
        return ctypes.cast(self._keep[-1], ctypes.POINTER(ctypes.c_char_p))

    def _counters(self, address: int, count: int) -> list[str]:
        return [n.decode() for n in (ctypes.c_char_p * count).from_address(address)]

    def _step(self, before: str, after: str) -> int:
        if self.state != before:
            return WRONG_ORDER
        self.state = after
        return 0

    # ---- what needs no GPU

    def _Profiler_Host_GetSupportedChips(self, p: Any) -> None:  # noqa: N802
        p.numChips, p.ppChipNames = 2, self._array(["GH100", "GA100"])

    def _Profiler_Host_Initialize(self, p: Any) -> None:  # noqa: N802
        p.pHostObject = 1000 + len(self.calls)
        self.hosts[p.pHostObject] = []
        if p.pCounterAvailabilityImage:
            self.restricted.add(p.pHostObject)

    def _Profiler_Host_Deinitialize(self, p: Any) -> None:  # noqa: N802
        del self.hosts[p.pHostObject]

    def _Profiler_Host_GetBaseMetrics(self, p: Any) -> None:  # noqa: N802
        p.numMetrics, p.ppMetricNames = len(self.base), self._array(self.base)

    def _Profiler_Host_ConfigAddMetrics(self, p: Any) -> int:  # noqa: N802
        names = self._counters(p.ppMetricNames, p.numMetrics)
        self.hosts[p.pHostObject] += names
        if p.pHostObject in self.restricted and self.hidden & {*names}:
            return NOT_AVAILABLE
        if {*names} & {*OF_LINKS} and {*names} - {*OF_LINKS}:
            return DO_NOT_COMBINE
        return WRONG_PARAMETER if any(n.split(".")[0] not in self.base for n in names) else 0

    def _Profiler_Host_GetConfigImageSize(self, p: Any) -> None:  # noqa: N802
        p.configImageSize = 8

    def _Profiler_Host_GetConfigImage(self, p: Any) -> None:  # noqa: N802
        ctypes.c_uint64.from_address(p.pConfigImage).value = len(self.configurations)
        self.configurations.append(self.hosts[p.pHostObject])

    def _Profiler_Host_GetNumOfPasses(self, p: Any) -> None:  # noqa: N802
        chosen = self._configuration(p.pConfigImage)
        p.numOfPasses = math.ceil(len(chosen) / self.a_pass)

    def _configuration(self, address: int) -> list[str]:
        return self.configurations[ctypes.c_uint64.from_address(address).value]

    def _Profiler_Host_EvaluateToGpuValues(self, p: Any) -> None:  # noqa: N802
        values = self.ranges[p.rangeIndex][1]
        for i, name in enumerate(self._counters(p.ppMetricNames, p.numMetrics)):
            if name in values and name not in self.silent:
                p.pMetricValues[i] = values[name]

    # ---- what needs one

    def _Profiler_Initialize(self, p: Any) -> int:  # noqa: N802
        return self._step("off", "initialized")

    def _Device_GetChipName(self, p: Any) -> None:  # noqa: N802
        p.pChipName = b"GH100"

    def _Profiler_GetCounterAvailability(self, p: Any) -> None:  # noqa: N802
        p.counterAvailabilityImageSize = 16

    def _RangeProfiler_Enable(self, p: Any) -> int:  # noqa: N802
        p.pRangeProfilerObject, self.first = 99, None
        return self._step("initialized", "enabled") if p.ctx == CONTEXT else WRONG_PARAMETER

    def _RangeProfiler_Disable(self, p: Any) -> int:  # noqa: N802
        return self._step("enabled", "initialized")

    def _RangeProfiler_GetCounterDataSize(self, p: Any) -> None:  # noqa: N802
        p.counterDataSize = 32

    def _RangeProfiler_CounterDataImage_Initialize(self, p: Any) -> None:  # noqa: N802
        self.ranges = []

    def _RangeProfiler_SetConfig(self, p: Any) -> int:  # noqa: N802
        self.chosen = self._configuration(p.pConfig)
        self.first = self.first or self.chosen
        one_pass = len(self.chosen) <= self.a_pass and (p.range, p.replayMode) == (2, 3)
        return 0 if self.state == "enabled" and one_pass else WRONG_ORDER

    def _RangeProfiler_Start(self, p: Any) -> int:  # noqa: N802
        return WRONG_ORDER if self.chosen is None else self._step("enabled", "started")

    def _RangeProfiler_PushRange(self, p: Any) -> int:  # noqa: N802
        self.ranges.append((p.pRangeName, dict(self.now)))
        return self._step("started", "open")

    def _RangeProfiler_PopRange(self, p: Any) -> int:  # noqa: N802
        name, before = self.ranges[-1]
        # As measured: a second configuration counts only what the first has, without an error.
        chosen = [c for c in self.chosen or [] if c in (self.first or [])]
        seen = {c: self.now.get(c, 0.0) - before.get(c, 0.0) for c in chosen}
        self.ranges[-1] = name, seen
        return self._step("open", "started")

    def _RangeProfiler_Stop(self, p: Any) -> int:  # noqa: N802
        p.isAllPassSubmitted, self.chosen = 1, None
        return self._step("started", "enabled")

    def _RangeProfiler_DecodeData(self, p: Any) -> None:  # noqa: N802
        p.numOfRangeDropped = len(self.drops)
        self.ranges = [r for i, r in enumerate(self.ranges) if i not in self.drops]

    def _RangeProfiler_GetCounterDataInfo(self, p: Any) -> None:  # noqa: N802
        p.numTotalRanges = len(self.ranges)

    def _RangeProfiler_CounterData_GetRangeInfo(self, p: Any) -> None:  # noqa: N802
        p.rangeName = self.ranges[p.rangeIndex][0]


def library(cupti: FakeCupti, cuda: FakeCuda | None = None) -> Library:
    return Library(cupti, Driver(cuda or FakeCuda()))


def target(
    cupti: FakeCupti,
    synchronize: Callable[[], None] = lambda: None,
    *,
    peers: bool = False,
    payload: Payload = dict,
    note: str = "",
) -> Target:
    return Target(library(cupti), 0, CONTEXT, synchronize, peers, payload, note)
