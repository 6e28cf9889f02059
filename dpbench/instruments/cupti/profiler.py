"""Counting named ranges of the work on a GPU, in the process that launches it."""

from __future__ import annotations

import ctypes
from typing import Any

from dpbench.instruments.cupti.chip import Chip, Configuration, new_image
from dpbench.instruments.cupti.library import Library
from dpbench.instruments.cupti.structures import USER_RANGE, USER_REPLAY
from dpbench.instruments.errors import RangesLost

MAX_RANGES = 64
"""How many ranges there may be between start and stop, unless told otherwise.

On an NVIDIA H200, starting takes 0.2 s and 70 MB of GPU memory with 64, 1 s and 1.1 GB with 1024.
"""


def chip_of(library: Library, device: int, context: int) -> Chip:
    """The chip of a GPU, by its CUDA index, with the counters that a context on it can read."""
    library.initialize()
    name = library.call("Device_GetChipName", deviceIndex=device).pChipName.decode()
    asked = library.call("Profiler_GetCounterAvailability", ctx=context)
    image = new_image(asked.counterAvailabilityImageSize)
    library.call(
        "Profiler_GetCounterAvailability",
        ctx=context,
        counterAvailabilityImageSize=len(image),
        pCounterAvailabilityImage=ctypes.addressof(image),
    )
    return Chip(library, name, image)


class RangeProfiler:
    """CUPTI's range profiler on one CUDA context: start, push and pop ranges, stop; again.

    All work in the context counts, whichever thread or stream it runs in. Neither push nor pop
    waits for the GPU: synchronize before each. They take 0.01 ms; with counters of the SMs 0.4 ms,
    before and after the range. A context has one profiler at a time, and a profiler one
    configuration, of one pass: with a second one, counters that the first lacks have no value.
    """

    def __init__(
        self,
        library: Library,
        context: int,
        configuration: Configuration,
        max_ranges: int = MAX_RANGES,
    ) -> None:
        self.configuration = configuration
        self._library = library
        self._max_ranges = max_ranges
        self._names: list[bytes] = []
        self._started = self._open = False
        self._object = library.call("RangeProfiler_Enable", ctx=context).pRangeProfilerObject
        self._image = new_image(
            self._call(
                "GetCounterDataSize",
                pMetricNames=ctypes.addressof(configuration.names),
                numMetrics=len(configuration.names),
                maxNumOfRanges=max_ranges,
                maxNumRangeTreeNodes=max_ranges,
            ).counterDataSize
        )

    def _call(self, name: str, **fields: Any) -> Any:
        return self._library.call(
            f"RangeProfiler_{name}", pRangeProfilerObject=self._object, **fields
        )

    def start(self) -> None:
        """Begin to count."""
        data, config = ctypes.addressof(self._image), self.configuration.image
        self._call(
            "CounterDataImage_Initialize", counterDataSize=len(self._image), pCounterData=data
        )
        self._call(
            "SetConfig",
            configSize=len(config),
            pConfig=ctypes.addressof(config),
            counterDataImageSize=len(self._image),
            pCounterDataImage=data,
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
        """Begin a range. Ranges are told apart by their number, from 0."""
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
        data = {
            "pCounterDataImage": ctypes.addressof(self._image),
            "counterDataImageSize": len(self._image),
        }
        call = self._library.call
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
