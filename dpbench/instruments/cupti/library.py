"""Loads libcupti, calls its functions and checks their results."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from dpbench.core.errors import InstrumentError
from dpbench.instruments.counters.errors import (
    CountersBusy,
    CountersForbidden,
    CounterUnknown,
    ProfilerNotLoaded,
)
from dpbench.instruments.counters.libraries import Driver, cupti_folders, load_helpers
from dpbench.instruments.cupti.structures import c_function, struct_size, structure


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
