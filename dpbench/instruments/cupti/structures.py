"""C structures for the parameters of CUPTI's range profiler, for each version of CUPTI.

The source is NVIDIA's cupti_range_profiler.h, cupti_profiler_host.h, cupti_profiler_target.h and
cupti_target.h. Between CUDA 12.6 and 13.5 the structures differ only in fields that were added at
the end. A test compares the structures with the headers.
"""

from __future__ import annotations

import ctypes
import re
from functools import cache
from typing import Any

USER_RANGE = 2
"""CUPTI_UserRange: the program marks the start and end of ranges."""

USER_REPLAY = 3
"""CUPTI_UserReplay: the program itself repeats the work for each pass."""

COUNTER = 0
"""CUPTI_METRIC_TYPE_COUNTER: the type of metrics that can be added up, unlike ratios."""

# Each entry is NAME(fields), for the structure CUpti_NAME_Params. The fields follow structSize and
# pPriv. TYPE means c_TYPE of ctypes, and TYPE* a pointer to c_TYPE. FIELD@VERSION means that the
# field exists since this CUPTI_API_VERSION.
_LAYOUTS = """
Profiler_Initialize()
Device_GetChipName(size_t deviceIndex, char_p pChipName)
Profiler_GetCounterAvailability(void_p ctx, size_t counterAvailabilityImageSize,
    void_p pCounterAvailabilityImage, uint8 bAllowDeviceLevelCounters@130100)
Profiler_Host_GetSupportedChips(size_t numChips, char_p* ppChipNames)
Profiler_Host_Initialize(int profilerType, char_p pChipName, void_p pCounterAvailabilityImage,
    void_p pHostObject, char_p pSinglePassMetricSetName@130200)
Profiler_Host_Deinitialize(void_p pHostObject)
Profiler_Host_GetBaseMetrics(void_p pHostObject, int metricType, char_p* ppMetricNames,
    size_t numMetrics)
Profiler_Host_ConfigAddMetrics(void_p pHostObject, void_p ppMetricNames, size_t numMetrics)
Profiler_Host_GetConfigImageSize(void_p pHostObject, size_t configImageSize)
Profiler_Host_GetConfigImage(void_p pHostObject, size_t configImageSize, void_p pConfigImage)
Profiler_Host_GetNumOfPasses(size_t configImageSize, void_p pConfigImage, size_t numOfPasses)
Profiler_Host_EvaluateToGpuValues(void_p pHostObject, void_p pCounterDataImage,
    size_t counterDataImageSize, size_t rangeIndex, void_p ppMetricNames, size_t numMetrics,
    double* pMetricValues)
RangeProfiler_Enable(void_p ctx, void_p pRangeProfilerObject, int cacheControlMode@130400)
RangeProfiler_Disable(void_p pRangeProfilerObject)
RangeProfiler_GetCounterDataSize(void_p pRangeProfilerObject, void_p pMetricNames,
    size_t numMetrics, size_t maxNumOfRanges, uint32 maxNumRangeTreeNodes, size_t counterDataSize)
RangeProfiler_CounterDataImage_Initialize(void_p pRangeProfilerObject, size_t counterDataSize,
    void_p pCounterData)
RangeProfiler_SetConfig(void_p pRangeProfilerObject, size_t configSize, void_p pConfig,
    size_t counterDataImageSize, void_p pCounterDataImage, int range, int replayMode,
    size_t maxRangesPerPass, uint16 numNestingLevels, uint16 minNestingLevel,
    size_t passIndex, uint16 targetNestingLevel)
RangeProfiler_Start(void_p pRangeProfilerObject)
RangeProfiler_Stop(void_p pRangeProfilerObject, size_t passIndex, size_t targetNestingLevel,
    uint8 isAllPassSubmitted)
RangeProfiler_PushRange(void_p pRangeProfilerObject, char_p pRangeName)
RangeProfiler_PopRange(void_p pRangeProfilerObject)
RangeProfiler_DecodeData(void_p pRangeProfilerObject, size_t numOfRangeDropped)
RangeProfiler_GetCounterDataInfo(void_p pCounterDataImage, size_t counterDataImageSize,
    size_t numTotalRanges)
RangeProfiler_CounterData_GetRangeInfo(void_p pCounterDataImage, size_t counterDataImageSize,
    size_t rangeIndex, char_p rangeDelimiter, char_p rangeName)
"""

_FIELDS = {
    name: re.findall(r"([\w*]+) (\w+)(?:@(\d+))?", fields)
    for name, fields in re.findall(r"(\w+)\((.*?)\)", _LAYOUTS, re.DOTALL)
}

NAMES = tuple(_FIELDS)
"""Names of the structures, without ``CUpti_`` and ``_Params``."""


def c_structure(name: str) -> str:
    """Return the name of a structure in NVIDIA's headers."""
    return f"CUpti_{name}_Params"


def c_function(name: str) -> str:
    """Return the name of the function that takes a structure."""
    return f"cupti{name.replace('_', '')}"


@cache
def structure(name: str, version: int) -> type[ctypes.Structure]:
    """Return the structure class for a library with this CUPTI_API_VERSION."""
    known = [(n, _type(kind)) for kind, n, since in _FIELDS[name] if int(since or 0) <= version]
    common = [("structSize", ctypes.c_size_t), ("pPriv", ctypes.c_void_p)]
    return type(c_structure(name), (ctypes.Structure,), {"_fields_": [*common, *known]})


def _type(written: str) -> Any:
    kind = getattr(ctypes, f"c_{written.rstrip('*')}")
    return ctypes.POINTER(kind) if written.endswith("*") else kind


@cache
def struct_size(name: str, version: int) -> int:
    """Return the value that the field ``structSize`` must have.

    The value is the number of bytes to the end of the last field, without padding. CUPTI returns
    CUPTI_ERROR_INVALID_PARAMETER for any other value.
    """
    made = structure(name, version)
    last = getattr(made, made._fields_[-1][0])
    return int(last.offset + last.size)
