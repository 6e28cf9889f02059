"""CUPTI's range profiler, which reads hardware counters between two calls."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from ctypes import c_uint8
from typing import Any

from dpbench.instruments.cupti.chip import Configuration, image_fields
from dpbench.instruments.cupti.library import Library, RangesLost
from dpbench.instruments.cupti.structures import USER_RANGE, USER_REPLAY

MAX_RANGES = 64
"""Default for the largest number of ranges between start and stop.

On an NVIDIA H200, starting CUPTI for 64 ranges takes 0.2 s and 70 MB of GPU memory. Starting CUPTI
for 1024 ranges takes 1 s and 1.1 GB.
"""


class RangeProfiler:
    """CUPTI's range profiler, which counts the work in one CUDA context.

    The counts include the work of all threads and streams. `start` can be called
    again after `stop`. `push` and `pop` do not wait for the GPU, so synchronize the GPU before
    each call. A range does not include the time of these calls.

    A context can have only one profiler at a time. A profiler has one configuration of one pass,
    because counters of a second configuration would have no value.
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
        """Start counting."""
        self._call("CounterDataImage_Initialize", **image_fields("CounterData", self._image))
        self._call(
            "SetConfig",
            **image_fields("Config", self.configuration.image),
            **image_fields("CounterDataImage", self._image),
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
        """Begin a range. The name of the range is its number, counted from 0."""
        if len(self._names) == self._max_ranges:
            raise RangesLost(f"a step has more than {self._max_ranges} ranges")
        self._names.append(str(len(self._names)).encode())  # CUPTI reads the name until `stop`
        self._call("PushRange", pRangeName=self._names[-1])
        self._open = True

    def pop(self) -> None:
        """End the open range, if any."""
        if self._open:
            self._open = False
            self._call("PopRange")

    def stop(self) -> list[dict[str, float]]:
        """Stop counting, and return the values of the counters in each range, in order."""
        self._stop()
        dropped = self._call("DecodeData").numOfRangeDropped
        data, call = image_fields("CounterDataImage", self._image), self._library.call
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
        """Stop counting and release the counters."""
        if self._started:
            self._stop()
        if self._object is not None:
            self._call("Disable")
            self._object = None
