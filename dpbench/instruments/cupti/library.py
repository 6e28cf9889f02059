"""Loads libcupti, calls its functions and checks their results.

The C structures for the parameters of CUPTI's range profiler follow NVIDIA's
cupti_range_profiler.h, cupti_profiler_host.h, cupti_profiler_target.h and cupti_target.h. Between
CUDA 12.6 and 13.5 the structures differ only in fields that were added at the end. A test compares
the structures with the headers.
"""

from __future__ import annotations

import ctypes
import re
from functools import cache
from pathlib import Path
from typing import Any

from dpbench.core.errors import InstrumentError
from dpbench.instruments.counters import (
    CountersBusy,
    CountersForbidden,
    CounterUnknown,
    Driver,
    ProfilerNotLoaded,
    cupti_folders,
    load_helpers,
)

# --- structures ----------------------------------------------------------------------------------

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


# --- errors --------------------------------------------------------------------------------------


class CountersUnsupported(InstrumentError):
    """The GPU is configured without counters, for example as a virtual GPU."""

    remedy = (
        "use a whole GPU that is neither virtual, nor split with MIG, nor in "
        "confidential-computing mode"
    )


class CountersDoNotCombine(InstrumentError):
    """The counters cannot be read in the same pass."""

    remedy = "count the metrics one after another, in several runs"


class CuptiUnusable(InstrumentError):
    """No installed libcupti can count ranges on this GPU with this driver."""

    remedy = (
        "install a build of torch that supports this GPU, because PyTorch's wheels include "
        "libcupti. The CUDA version of the build must be 12.6.2 or newer, but not newer than the "
        "version that nvidia-smi shows for the driver. A build without libcupti also needs the "
        "package nvidia-cuda-cupti for the same CUDA version"
    )


class CuptiError(InstrumentError):
    """A function of CUPTI failed with a code that no other error class covers."""


class RangesLost(InstrumentError):
    """CUPTI did not count all ranges of a step, or the step has too many ranges."""

    remedy = "count fewer ranges in a step, or pass a larger max_ranges"


class StepsDiffer(InstrumentError):
    """Steps that should be equal differ, and their counts cannot be combined."""

    remedy = (
        "run more warm-up steps, give all batches the same shape, and run no other process on "
        "the GPU"
    )


_BY_CODE: dict[int, tuple[type[InstrumentError], str]] = {
    **dict.fromkeys(
        (27, 33, *range(40, 46)), (CountersUnsupported, "this GPU has no counters as configured")
    ),
    15: (CuptiUnusable, "libcuda, libnvperf_host or libnvperf_target could not be loaded"),
    26: (CountersBusy, "the performance counters are in use"),
    35: (CountersForbidden, "this user may not read performance counters"),
    36: (CountersBusy, "this process uses an older interface of CUPTI's profiler"),
    39: (CountersBusy, "another profiler or debugger is attached to this process"),
    46: (CuptiUnusable, "this GPU is newer than libcupti"),
    999: (ProfilerNotLoaded, "CUPTI cannot reach the driver or the GPU's counters"),
}
"""Error classes and messages by CUptiResult code (cupti_result.h)."""

_BY_FUNCTION: dict[tuple[str, int], tuple[type[InstrumentError], str]] = {
    ("cuptiProfilerHostConfigAddMetrics", 1): (CounterUnknown, "a counter does not exist"),
    ("cuptiProfilerHostConfigAddMetrics", 17): (CounterUnknown, "a counter does not exist"),
    ("cuptiProfilerHostConfigAddMetrics", 27): (
        CountersDoNotCombine,
        "the counters need more than one pass",
    ),
    ("cuptiProfilerHostConfigAddMetrics", 999): (
        CounterUnknown,
        "this machine does not permit reading a counter",
    ),
    ("cuptiProfilerHostInitialize", 1): (CuptiUnusable, "libcupti does not support this GPU"),
}
"""Error classes and messages for codes that have another meaning in one function."""


def call_error(
    function: str, code: int, *, library: tuple[int, int], driver: tuple[int, int] | None
) -> InstrumentError:
    """Return the error for a CUptiResult code.

    Args:
        function: name of the function that returned the code.
        code: the code.
        library: CUDA version of libcupti, as (major, minor).
        driver: newest CUDA version that the driver supports, or None without a driver.
    """
    kind, words = _BY_FUNCTION.get((function, code)) or _BY_CODE.get(code, (CuptiError, "failed"))
    unexplained = code == 15 or kind in (CuptiError, ProfilerNotLoaded)
    if driver and driver < library and unexplained:
        words = (
            f"libcupti of CUDA {library[0]}.{library[1]} is newer than CUDA "
            f"{driver[0]}.{driver[1]}, which the driver supports"
        )
        kind = CuptiUnusable
    return kind(f"{words} ({function} returned {code})")


# --- the library ---------------------------------------------------------------------------------


class Library:
    """A loaded libcupti.

    Args:
        functions: the loaded library.
        driver: the CUDA driver.
        path: path of the library, for messages.
    """

    def __init__(self, functions: Any, driver: Driver, path: Path = Path("libcupti.so")) -> None:
        self.driver = driver
        self._functions = functions
        if not hasattr(functions, "cuptiRangeProfilerEnable"):
            raise CuptiUnusable(f"{path} has no range profiler")
        if driver.version() is None and hasattr(functions, "cuptiProfilerHostGetSinglePassSets"):
            # Without a driver, CUPTI 13.2 crashes in the first call. Newer versions return code
            # 999.
            raise ProfilerNotLoaded(
                f"{path} belongs to CUDA 13.2 or newer and needs a driver, but none is installed"
            )
        version = ctypes.c_uint32()
        if code := functions.cuptiGetVersion(ctypes.byref(version)):
            raise call_error("cuptiGetVersion", code, library=(0, 0), driver=driver.version())
        self.version: int = version.value
        self._initialized = False

    @property
    def cuda_version(self) -> tuple[int, int]:
        """CUDA version of the library, as (major, minor)."""
        if self.version >= 130000:
            return self.version // 10000, self.version // 100 % 100
        return 12, 9 if self.version >= 28 else 8 if self.version >= 26 else 6

    def call(self, name: str, **fields: Any) -> Any:
        """Call the function that takes ``CUpti_NAME_Params``, and return the filled structure."""
        parameters = structure(name, self.version)(**fields)
        parameters.structSize = struct_size(name, self.version)
        code = getattr(self._functions, c_function(name))(ctypes.byref(parameters))
        if code:
            raise call_error(
                c_function(name), code, library=self.cuda_version, driver=self.driver.version()
            )
        return parameters

    def initialize(self) -> None:
        """Initialize the profiler in this process, unless the profiler is already initialized.

        If this raises an error, do not call other functions that need the GPU, because
        these functions may crash.
        """
        if not self._initialized:
            self.call("Profiler_Initialize")
            self._initialized = True


def open_in(folder: Path, driver: Driver) -> Library:
    """Load libcupti and the libraries that it needs from a folder."""
    path = next(iter(sorted(folder.glob("libcupti.so*"))), None)
    if path is None:
        raise CuptiUnusable(f"no libcupti.so in {folder}")
    try:
        for helper, beside in load_helpers(folder).items():
            if driver.version() and ctypes.CDLL(helper)._handle != beside._handle:
                raise ProfilerNotLoaded(
                    f"{path} cannot be used with the {helper} that this process loaded earlier, "
                    f"for example to read a report of ncu: start a new process to count"
                )
        return Library(ctypes.CDLL(str(path)), driver, path)
    except OSError as error:
        raise CuptiUnusable(f"{path} cannot be loaded: {error}") from None


@cache
def load_library() -> Library:
    """Return the first usable libcupti.

    If this process has loaded libcupti, for example with torch, only the loaded libcupti is tried.
    """
    driver = Driver.load()
    errors: list[InstrumentError] = []
    for folder in cupti_folders():
        try:
            return open_in(folder, driver)
        except InstrumentError as error:
            errors.append(error)
    raise (
        errors[0]
        if errors
        else CuptiUnusable(
            "no libcupti.so was found in NVIDIA's Python packages or in a CUDA toolkit"
        )
    )
