"""What a chip can count, and in how many passes, without a GPU; and counting ranges on one."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from ctypes import c_uint8
from functools import cached_property
from typing import Any

from dpbench.errors import unknown
from dpbench.instruments.counters.errors import CountersBusy, CounterUnknown
from dpbench.instruments.cupti.errors import CountersDoNotCombine, RangesLost
from dpbench.instruments.cupti.library import Library
from dpbench.instruments.cupti.structures import COUNTER, USER_RANGE, USER_REPLAY

Image = ctypes.Array[c_uint8]
"""Bytes that only CUPTI can interpret."""

MAY_LACK = ("nvlrx__", "nvltx__", "pcie__")
"""Counters of links, which have no value where there is no such link."""

BUSY_SECONDS = 10.0
"""For how long counters that somebody holds are asked for again: Nsight Compute still has them for
a moment when its program, and with it the lock of the GPU, has ended."""

MAX_RANGES = 64
"""How many ranges there may be between start and stop, by default.

On an NVIDIA H200, starting takes 0.2 s and 70 MB of GPU memory with 64, 1 s and 1.1 GB with 1024.
"""


def _fields(name: str, image: Image) -> dict[str, Any]:
    """An image as two fields, such as ``pConfigImage``, where it is, and ``configImageSize``."""
    return {f"p{name}": ctypes.addressof(image), f"{name[0].lower()}{name[1:]}Size": len(image)}


def known_chips(library: Library) -> list[str]:
    """The chips that a library knows by name."""
    answer = library.call("Profiler_Host_GetSupportedChips")
    return [answer.ppChipNames[i].decode() for i in range(answer.numChips)]


class Chip:
    """A kind of GPU, e.g. ``GH100``, as a libcupti knows it.

    The counter availability image of a GPU at hand leaves out what its settings forbid.
    """

    def __init__(self, library: Library, name: str, availability: Image | None = None) -> None:
        if availability is None and name not in (chips := known_chips(library)):
            raise unknown("chip", name, chips)
        self.library = library
        self.name = name
        self._availability = availability

    @contextmanager
    def host(self, counters: Iterable[str] = ()) -> Iterator[int]:
        """A host object for these counters, as long as it is needed.

        Counters of links are chosen without the availability image: that of a virtual machine
        leaves NVLink's out, which can be read all the same.
        """
        linked = any(counter.startswith(MAY_LACK) for counter in counters)
        image = None if linked else self._availability
        answer = self.library.call(
            "Profiler_Host_Initialize",
            pChipName=self.name.encode(),
            pCounterAvailabilityImage=None if image is None else ctypes.addressof(image),
        )
        try:
            yield answer.pHostObject
        finally:
            self.library.call("Profiler_Host_Deinitialize", pHostObject=answer.pHostObject)

    @cached_property
    def counters(self) -> frozenset[str]:
        """The names of all counters of this chip, without ``.sum``."""
        with self.host() as host:
            answer = self.library.call(
                "Profiler_Host_GetBaseMetrics", pHostObject=host, metricType=COUNTER
            )
            return frozenset(answer.ppMetricNames[i].decode() for i in range(answer.numMetrics))

    def has(self, counters: Iterable[str]) -> bool:
        """Whether all these exist on this chip."""
        return all(counter.partition(".")[0] in self.counters for counter in counters)

    def reads(self, counters: Iterable[str]) -> bool:
        """Whether all these can be read on this machine, which may keep some to itself."""
        try:
            return self.passes(counters) > 0
        except CounterUnknown:
            return False

    def passes(self, counters: Iterable[str]) -> int:
        """How often the work must run for all these counters to be read."""
        with closing(Configuration(self, counters)) as configuration:
            return configuration.passes

    def spread(self, counters: Iterable[str], common: Sequence[str]) -> list[list[str]]:
        """Counters in groups of one pass each, the common ones in every group where they fit."""
        counters = list(counters)
        if self._fit_one_pass(counters):
            return [counters]
        groups: list[list[str]] = []
        for counter in (counter for counter in counters if counter not in common):
            starts = [*groups, common, []]
            fitting = (i for i, start in enumerate(starts) if self._fit_one_pass([*start, counter]))
            place = next(fitting, None)
            if place is None:
                raise CounterUnknown(f"{counter} needs several passes on {self.name}")
            groups[place : place + 1] = [[*starts[place], counter]]
        return groups

    def _fit_one_pass(self, counters: Iterable[str]) -> bool:
        try:
            return self.passes(counters) == 1
        except CountersDoNotCombine:
            return False


class Configuration:
    """Counters of a chip, chosen to be read together: an image that CUPTI's profiler takes."""

    def __init__(self, chip: Chip, counters: Iterable[str]) -> None:
        self._counters = list(counters)
        if lacking := [counter for counter in self._counters if not chip.has([counter])]:
            raise CounterUnknown(f"{', '.join(lacking)} does not exist on {chip.name}")
        encoded = [counter.encode() for counter in self._counters]
        self.names = (ctypes.c_char_p * len(encoded))(*encoded)
        self._chip = chip
        with ExitStack() as opened:
            self._host = opened.enter_context(chip.host(self._counters))
            self.image = self._choose(chip.library, self._host)
            image = _fields("ConfigImage", self.image)
            answer = chip.library.call("Profiler_Host_GetNumOfPasses", **image)
            self.passes = int(answer.numOfPasses)
            self._opened = opened.pop_all()

    @property
    def _named(self) -> dict[str, int]:
        return {"ppMetricNames": ctypes.addressof(self.names), "numMetrics": len(self.names)}

    def _choose(self, library: Library, host: int) -> Image:
        try:
            library.call("Profiler_Host_ConfigAddMetrics", pHostObject=host, **self._named)
        except (CounterUnknown, CountersDoNotCombine) as error:
            named = self._counters
            if isinstance(error, CounterUnknown) and len(named) > 1:
                named = [c for c in named if not self._chip.reads([c])] or named
            raise type(error)(f"{', '.join(named)} on {self._chip.name}: {error.args[0]}") from None
        size = library.call("Profiler_Host_GetConfigImageSize", pHostObject=host).configImageSize
        image: Image = (c_uint8 * size)()
        fields = _fields("ConfigImage", image)
        library.call("Profiler_Host_GetConfigImage", pHostObject=host, **fields)
        return image

    def evaluate(self, counter_data: Image, index: int) -> dict[str, float]:
        """The counters' values in a range, from decoded counter data; without `MAY_LACK`'s."""
        values = (ctypes.c_double * len(self.names))(*[math.nan] * len(self.names))
        fields = _fields("CounterDataImage", counter_data) | self._named
        fields |= {"pHostObject": self._host, "rangeIndex": index, "pMetricValues": values}
        self._chip.library.call("Profiler_Host_EvaluateToGpuValues", **fields)
        counted = dict(zip(self._counters, values, strict=True))
        silent = [counter for counter, value in counted.items() if not math.isfinite(value)]
        if lost := [counter for counter in silent if not counter.startswith(MAY_LACK)]:
            raise CounterUnknown(f"no value came for {', '.join(lost)} on {self._chip.name}")
        return {counter: value for counter, value in counted.items() if counter not in silent}

    def close(self) -> None:
        """Free the host object."""
        self._opened.close()


# --- counting on a GPU ---------------------------------------------------------------------------


def chip_of(library: Library, device: int, context: int) -> Chip:
    """The chip of a GPU, by its CUDA index, with the counters that a context on it can read."""
    library.initialize()
    name = library.call("Device_GetChipName", deviceIndex=device).pChipName.decode()
    patient_until = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            return Chip(library, name, _availability(library, context))
        except CountersBusy:
            if time.monotonic() > patient_until:
                raise
            time.sleep(0.1)


def _availability(library: Library, context: int) -> Image:
    asked = library.call("Profiler_GetCounterAvailability", ctx=context)
    image: Image = (c_uint8 * asked.counterAvailabilityImageSize)()
    fields = _fields("CounterAvailabilityImage", image)
    library.call("Profiler_GetCounterAvailability", ctx=context, **fields)
    return image


class RangeProfiler:
    """CUPTI's range profiler on one CUDA context: start, push and pop ranges, stop; again.

    All work in the context counts, whichever thread or stream it runs in. Neither push nor pop
    waits for the GPU: synchronize before each. They take 0.01 ms; with counters of the SMs 0.4 ms,
    before and after the range. A context has one profiler at a time, and a profiler one
    configuration, of one pass: with a second one, counters that the first lacks have no value.
    """

    def __init__(
        self, library: Library, context: int, configuration: Configuration, max_ranges: int
    ) -> None:
        self.configuration = configuration
        self._library = library
        self._max_ranges = max_ranges
        self._names: list[bytes] = []
        self._started = self._open = False
        self._object = library.call("RangeProfiler_Enable", ctx=context).pRangeProfilerObject
        with ExitStack() as undo:
            undo.callback(self.close)
            size = self._call(
                "GetCounterDataSize",
                pMetricNames=ctypes.addressof(configuration.names),
                numMetrics=len(configuration.names),
                maxNumOfRanges=max_ranges,
                maxNumRangeTreeNodes=max_ranges,
            ).counterDataSize
            self._image = (c_uint8 * size)()
            undo.pop_all()

    def _call(self, name: str, **fields: Any) -> Any:
        return self._library.call(
            f"RangeProfiler_{name}", pRangeProfilerObject=self._object, **fields
        )

    def start(self) -> None:
        """Begin to count."""
        self._call("CounterDataImage_Initialize", **_fields("CounterData", self._image))
        self._call(
            "SetConfig",
            **_fields("Config", self.configuration.image),
            **_fields("CounterDataImage", self._image),
            range=USER_RANGE,
            replayMode=USER_REPLAY,
            maxRangesPerPass=self._max_ranges,
            numNestingLevels=1,
            minNestingLevel=1,
            targetNestingLevel=1,
        )
        self._call("Start")
        self._started = True
        self._names = []

    def push(self) -> None:
        """Begin a range. Ranges are named by their number, from 0."""
        if len(self._names) == self._max_ranges:
            raise RangesLost(f"more than {self._max_ranges} ranges")
        self._names.append(str(len(self._names)).encode())  # CUPTI reads it until the end
        self._call("PushRange", pRangeName=self._names[-1])
        self._open = True

    def pop(self) -> None:
        """End the range, if one has begun."""
        if self._open:
            self._open = False
            self._call("PopRange")

    def stop(self) -> list[dict[str, float]]:
        """End counting; the counters of each range, in order."""
        self._stop()
        dropped = self._call("DecodeData").numOfRangeDropped
        data, call = _fields("CounterDataImage", self._image), self._library.call
        counted = {}
        for i in range(call("RangeProfiler_GetCounterDataInfo", **data).numTotalRanges):
            which = {"rangeIndex": i, "rangeDelimiter": b"/", **data}
            name = call("RangeProfiler_CounterData_GetRangeInfo", **which).rangeName
            counted[name] = self.configuration.evaluate(self._image, i)
        lost = sum(name not in counted for name in self._names)
        if dropped or lost:
            raise RangesLost(f"CUPTI lost {max(dropped, lost)} of {len(self._names)} ranges")
        return [counted[name] for name in self._names]

    def _stop(self) -> None:
        self.pop()
        self._started = False
        self._call("Stop")

    def close(self) -> None:
        """Stop, if started, and give the counters back."""
        if self._started:
            self._stop()
        if self._object is not None:
            self._call("Disable")
            self._object = None
