"""The parameters of CUPTI's range profiler functions, as C structures of each version.

From NVIDIA's cupti_range_profiler.h, cupti_profiler_host.h, cupti_profiler_target.h and
cupti_target.h; the layouts are the same from CUDA 12.6 to 13.5 but for fields added at the end.
A test compares them with the headers.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_double, c_int, c_size_t, c_uint8, c_uint16, c_uint32, c_void_p
from functools import cache
from typing import Any

USER_RANGE = 2
"""CUPTI_UserRange: ranges begin and end where the program says."""

USER_REPLAY = 3
"""CUPTI_UserReplay: the program repeats the work where there are more passes."""

COUNTER = 0
"""CUPTI_METRIC_TYPE_COUNTER: what adds up; neither ratio nor throughput."""

_HOST = ("pHostObject", c_void_p)
_PROFILER = ("pRangeProfilerObject", c_void_p)
_NAMES = (("ppMetricNames", c_void_p), ("numMetrics", c_size_t))
_DATA = (("pCounterDataImage", c_void_p), ("counterDataImageSize", c_size_t))

# The name of CUpti_NAME_Params, and its fields after structSize and pPriv; a third element is the
# first CUPTI_API_VERSION that has the field.
_FIELDS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "Profiler_Initialize": (),
    "Device_GetChipName": (("deviceIndex", c_size_t), ("pChipName", c_char_p)),
    "Profiler_GetCounterAvailability": (
        ("ctx", c_void_p),
        ("counterAvailabilityImageSize", c_size_t),
        ("pCounterAvailabilityImage", c_void_p),
        ("bAllowDeviceLevelCounters", c_uint8, 130100),
    ),
    "Profiler_Host_GetSupportedChips": (
        ("numChips", c_size_t),
        ("ppChipNames", ctypes.POINTER(c_char_p)),
    ),
    "Profiler_Host_Initialize": (
        ("profilerType", c_int),
        ("pChipName", c_char_p),
        ("pCounterAvailabilityImage", c_void_p),
        _HOST,
        ("pSinglePassMetricSetName", c_char_p, 130200),
    ),
    "Profiler_Host_Deinitialize": (_HOST,),
    "Profiler_Host_GetBaseMetrics": (
        _HOST,
        ("metricType", c_int),
        ("ppMetricNames", ctypes.POINTER(c_char_p)),
        ("numMetrics", c_size_t),
    ),
    "Profiler_Host_ConfigAddMetrics": (_HOST, *_NAMES),
    "Profiler_Host_GetConfigImageSize": (_HOST, ("configImageSize", c_size_t)),
    "Profiler_Host_GetConfigImage": (
        _HOST,
        ("configImageSize", c_size_t),
        ("pConfigImage", c_void_p),
    ),
    "Profiler_Host_GetNumOfPasses": (
        ("configImageSize", c_size_t),
        ("pConfigImage", c_void_p),
        ("numOfPasses", c_size_t),
    ),
    "Profiler_Host_EvaluateToGpuValues": (
        _HOST,
        *_DATA,
        ("rangeIndex", c_size_t),
        *_NAMES,
        ("pMetricValues", ctypes.POINTER(c_double)),
    ),
    "RangeProfiler_Enable": (("ctx", c_void_p), _PROFILER, ("cacheControlMode", c_int, 130400)),
    "RangeProfiler_Disable": (_PROFILER,),
    "RangeProfiler_GetCounterDataSize": (
        _PROFILER,
        ("pMetricNames", c_void_p),
        ("numMetrics", c_size_t),
        ("maxNumOfRanges", c_size_t),
        ("maxNumRangeTreeNodes", c_uint32),
        ("counterDataSize", c_size_t),
    ),
    "RangeProfiler_CounterDataImage_Initialize": (
        _PROFILER,
        ("counterDataSize", c_size_t),
        ("pCounterData", c_void_p),
    ),
    "RangeProfiler_SetConfig": (
        _PROFILER,
        ("configSize", c_size_t),
        ("pConfig", c_void_p),
        ("counterDataImageSize", c_size_t),
        ("pCounterDataImage", c_void_p),
        ("range", c_int),
        ("replayMode", c_int),
        ("maxRangesPerPass", c_size_t),
        ("numNestingLevels", c_uint16),
        ("minNestingLevel", c_uint16),
        ("passIndex", c_size_t),
        ("targetNestingLevel", c_uint16),
    ),
    "RangeProfiler_Start": (_PROFILER,),
    "RangeProfiler_Stop": (
        _PROFILER,
        ("passIndex", c_size_t),
        ("targetNestingLevel", c_size_t),
        ("isAllPassSubmitted", c_uint8),
    ),
    "RangeProfiler_PushRange": (_PROFILER, ("pRangeName", c_char_p)),
    "RangeProfiler_PopRange": (_PROFILER,),
    "RangeProfiler_DecodeData": (_PROFILER, ("numOfRangeDropped", c_size_t)),
    "RangeProfiler_GetCounterDataInfo": (*_DATA, ("numTotalRanges", c_size_t)),
    "RangeProfiler_CounterData_GetRangeInfo": (
        *_DATA,
        ("rangeIndex", c_size_t),
        ("rangeDelimiter", c_char_p),
        ("rangeName", c_char_p),
    ),
}

NAMES = tuple(_FIELDS)
"""Every structure: NAME of ``CUpti_NAME_Params``."""


def c_structure(name: str) -> str:
    """What NVIDIA's headers call the structure."""
    return f"CUpti_{name}_Params"


def c_function(name: str) -> str:
    """The function that takes the structure."""
    return f"cupti{name.replace('_', '')}"


@cache
def structure(name: str, version: int) -> type[ctypes.Structure]:
    """The structure as a library of CUPTI_API_VERSION ``version`` has it."""
    known = [field[:2] for field in _FIELDS[name] if len(field) == 2 or field[2] <= version]
    common = [("structSize", c_size_t), ("pPriv", c_void_p)]
    return type(c_structure(name), (ctypes.Structure,), {"_fields_": [*common, *known]})


@cache
def struct_size(name: str, version: int) -> int:
    """What ``structSize`` must be: the end of the last field, without the padding after it.

    A library refuses any other size (CUPTI_ERROR_INVALID_PARAMETER).
    """
    made = structure(name, version)
    last = getattr(made, made._fields_[-1][0])
    return int(last.offset + last.size)
