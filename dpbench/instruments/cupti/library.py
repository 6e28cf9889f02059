"""Finds and loads libcupti; calls its functions and checks every result."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from dpbench.child.failures import InstrumentError
from dpbench.instruments.counters.errors import (
    CountersBusy,
    CountersForbidden,
    CounterUnknown,
    ProfilerNotLoaded,
)
from dpbench.instruments.counters.libraries import Driver, cupti_folders, load_helpers
from dpbench.instruments.cupti.structures import c_function, struct_size, structure


class CountersUnsupported(InstrumentError):
    """The GPU's configuration has no counters."""

    remedy = "use a whole GPU that is not virtualised, split or in confidential-computing mode"


class CountersDoNotCombine(InstrumentError):
    """The counters cannot be read in the same pass."""

    remedy = "count them one after another"


class CuptiUnusable(InstrumentError):
    """No libcupti here can count ranges on this GPU with this driver."""

    remedy = (
        "PyTorch's wheels bring one: use a build of torch for CUDA 12.6.2 or newer that knows this "
        "GPU, and no newer than the driver supports (nvidia-smi shows that), or update the driver; "
        "beside another build, install nvidia-cuda-cupti for its version of CUDA"
    )


class CuptiError(InstrumentError):
    """A function of CUPTI failed with a code that no other error explains."""


class RangesLost(InstrumentError):
    """A range that was begun was not counted."""

    remedy = "count fewer ranges at a time, or raise max_ranges"


class StepsDiffer(InstrumentError):
    """Steps that should be equal differ, so that their counts cannot be combined."""

    remedy = "warm up longer, give every step the same shapes, and keep other processes off the GPU"


_BY_CODE: dict[int, tuple[type[InstrumentError], str]] = {
    **dict.fromkeys(
        (27, 33, *range(40, 46)), (CountersUnsupported, "this GPU's set-up has no counters")
    ),
    15: (CuptiUnusable, "libcuda, libnvperf_host or libnvperf_target could not be loaded"),
    26: (CountersBusy, "the performance counters are in use"),
    35: (CountersForbidden, "this user may not read performance counters"),
    36: (CountersBusy, "CUPTI's old profiler is in use in this process"),
    39: (CountersBusy, "another profiler or debugger is attached to this process"),
    46: (CuptiUnusable, "this GPU is newer than libcupti"),
    999: (ProfilerNotLoaded, "an internal error: no driver, or no way to the GPU's counters"),
}
"""The error and its text for each CUptiResult code (cupti_result.h)."""

_BY_FUNCTION: dict[tuple[str, int], tuple[type[InstrumentError], str]] = {
    ("cuptiProfilerHostConfigAddMetrics", 1): (CounterUnknown, "a counter does not exist"),
    ("cuptiProfilerHostConfigAddMetrics", 17): (CounterUnknown, "a counter does not exist"),
    ("cuptiProfilerHostConfigAddMetrics", 27): (CountersDoNotCombine, "more than one pass needed"),
    ("cuptiProfilerHostConfigAddMetrics", 999): (CounterUnknown, "not readable on this machine"),
    ("cuptiProfilerHostInitialize", 1): (CuptiUnusable, "this GPU is unknown to libcupti"),
}
"""The same for codes that mean something else when this function returns them."""


def call_error(
    function: str, code: int, *, library: tuple[int, int], driver: tuple[int, int] | None
) -> InstrumentError:
    """The error for the CUptiResult that a function returned.

    Args:
        function: its name.
        code: the CUptiResult.
        library: the CUDA version of libcupti, (major, minor).
        driver: the newest CUDA version that the driver supports; None without a driver.
    """
    kind, words = _BY_FUNCTION.get((function, code)) or _BY_CODE.get(code, (CuptiError, "failed"))
    unexplained = code == 15 or kind in (CuptiError, ProfilerNotLoaded)
    if driver and driver < library and unexplained:
        words = (
            f"the driver supports CUDA {driver[0]}.{driver[1]} and libcupti is of "
            f"{library[0]}.{library[1]}"
        )
        kind = CuptiUnusable
    return kind(f"{words} ({function} returned {code})")


class Library:
    """A loaded libcupti. The path is only for messages."""

    def __init__(self, functions: Any, driver: Driver, path: Path = Path("libcupti.so")) -> None:
        self.driver = driver
        self._functions = functions
        if not hasattr(functions, "cuptiRangeProfilerEnable"):
            raise CuptiUnusable(f"{path} has no range profiler")
        if driver.version() is None and hasattr(functions, "cuptiProfilerHostGetSinglePassSets"):
            # 13.2 crashes in its first function; newer ones return 999.
            raise ProfilerNotLoaded(f"{path} is of CUDA 13.2 or newer, which needs a driver")
        version = ctypes.c_uint32()
        if code := functions.cuptiGetVersion(ctypes.byref(version)):
            raise call_error("cuptiGetVersion", code, library=(0, 0), driver=driver.version())
        self.version: int = version.value
        self._initialized = False

    @property
    def cuda_version(self) -> tuple[int, int]:
        """The CUDA version of which it is a part, (major, minor)."""
        if self.version >= 130000:
            return self.version // 10000, self.version // 100 % 100
        return 12, 9 if self.version >= 28 else 8 if self.version >= 26 else 6

    def call(self, name: str, **fields: Any) -> Any:
        """Call the function that takes ``CUpti_NAME_Params``; returns the filled structure."""
        parameters = structure(name, self.version)(**fields)
        parameters.structSize = struct_size(name, self.version)
        code = getattr(self._functions, c_function(name))(ctypes.byref(parameters))
        if code:
            raise call_error(
                c_function(name), code, library=self.cuda_version, driver=self.driver.version()
            )
        return parameters

    def initialize(self) -> None:
        """Initialize the profiler in this process, once.

        If this fails, other functions that need the GPU may crash.
        """
        if not self._initialized:
            self.call("Profiler_Initialize")
            self._initialized = True


def open_in(folder: Path, driver: Driver) -> Library:
    """Load the libcupti of a folder, after the libraries in that folder which it needs."""
    path = next(iter(sorted(folder.glob("libcupti.so*"))), None)
    if path is None:
        raise CuptiUnusable(f"no libcupti.so in {folder}")
    try:
        for helper, beside in load_helpers(folder).items():
            if driver.version() and ctypes.CDLL(helper)._handle != beside._handle:
                raise ProfilerNotLoaded(
                    f"{path} would get another {helper}, which this process has loaded before, as "
                    f"ncu-report does to read a report; count in a process of its own"
                )
        return Library(ctypes.CDLL(str(path)), driver, path)
    except OSError as error:
        raise CuptiUnusable(f"{path} cannot be loaded: {error}") from None


@cache
def load_library() -> Library:
    """The libcupti of this process: the one that torch has loaded, or the first usable one."""
    driver = Driver.load()
    errors: list[InstrumentError] = []
    for folder in cupti_folders():
        try:
            return open_in(folder, driver)
        except InstrumentError as error:
            errors.append(error)
    raise errors[0] if errors else CuptiUnusable("no libcupti.so beside torch or in a CUDA toolkit")
