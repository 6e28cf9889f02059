"""What can go wrong with CUPTI, and what would help."""

from __future__ import annotations

from pathlib import Path

from dpbench.instruments.base import InstrumentError


class CuptiError(InstrumentError):
    """A function of CUPTI failed. ``what`` is the message without the remedy."""

    def __init__(self, what: str, *, log: Path | None = None) -> None:
        super().__init__(what, log=log)
        self.what = what


class CuptiNotFound(CuptiError):
    """There is no usable libcupti here."""

    remedy = (
        "PyTorch's wheels for CUDA bring it (torch 2.6 or newer, built for CUDA 12.6 or newer); "
        "beside another build, install nvidia-cuda-cupti for its version of CUDA"
    )


class CuptiTooOld(CuptiError):
    """A libcupti that cannot count ranges, or not on this GPU."""

    remedy = "use a build of torch for a newer CUDA; ranges can be counted from CUDA 12.6.2 on"


class DriverTooOld(CuptiError):
    """The driver is older than libcupti."""

    remedy = "update the driver, or use a build of torch for the CUDA version that nvidia-smi shows"


class DriverUnavailable(CuptiError):
    """No driver, or none that lets CUPTI reach the GPU."""

    remedy = (
        "check that nvidia-smi shows the GPU here, and that a virtual machine or sandbox does not "
        "hide its counters"
    )


class CountersForbidden(CuptiError):
    """Reading the GPU's performance counters is not allowed to this user."""

    remedy = (
        "run as root or with CAP_SYS_ADMIN, or let every user read them: driver option "
        "NVreg_RestrictProfilingToAdminUsers=0 (https://developer.nvidia.com/ERR_NVGPUCTRPERM)"
    )


class CountersBusy(CuptiError):
    """Something else holds the GPU's performance counters."""

    remedy = (
        "end the other profiler (ncu, nsys, a debugger, another process that counts), or pause "
        "DCGM's: dcgmi profile --pause, and --resume after"
    )


class CountersUnsupported(CuptiError):
    """The GPU is set up in a way that has no counters."""

    remedy = "use a whole GPU that is not virtualised, split or in confidential-computing mode"


class CounterUnavailable(CuptiError):
    """A counter does not exist on this chip, cannot be read in one pass, or gave no value."""

    remedy = "ask for other metrics; dpbench doctor lists what this chip has"


class CountersDoNotCombine(CuptiError):
    """Counters that cannot be read in the same pass."""

    remedy = "count them one after another"


class RangesLost(CuptiError):
    """Not every range that was begun was counted."""

    remedy = "count fewer ranges at a time, or raise max_ranges"


class StepsDiffer(CuptiError):
    """Steps that should be equal are not, so that what each counted does not belong together."""

    remedy = "warm up longer, give every step the same shapes, and keep other processes off the GPU"


KINDS: dict[str, type[InstrumentError]] = {
    CuptiError.__name__: CuptiError,
    **{kind.__name__: kind for kind in CuptiError.__subclasses__()},
}
"""All of them by name, as a child process says which it was."""

_BY_CODE: dict[int, tuple[type[CuptiError], str]] = {
    15: (CuptiNotFound, "libcuda, libnvperf_host or libnvperf_target could not be loaded"),
    26: (CountersBusy, "the performance counters are in use"),
    27: (CountersUnsupported, "not supported on this system"),
    33: (CountersUnsupported, "the GPU is virtualised"),
    35: (CountersForbidden, "this user may not read performance counters"),
    36: (CountersBusy, "CUPTI's old profiler is in use in this process"),
    39: (CountersBusy, "another profiler or debugger is attached to this process"),
    40: (CountersUnsupported, "the GPU is virtualised, and its host forbids profiling"),
    41: (CountersUnsupported, "confidential computing is on"),
    42: (CountersUnsupported, "a mining card"),
    43: (CountersUnsupported, "a MIG slice"),
    44: (CountersUnsupported, "the GPU is in SLI mode"),
    45: (CountersUnsupported, "WSL"),
    46: (CuptiTooOld, "this GPU is newer than libcupti"),
    999: (DriverUnavailable, "an internal error: no driver, or no way to the GPU's counters"),
}
"""CUptiResult codes that have a remedy, in words (cupti_result.h)."""

_BY_FUNCTION: dict[tuple[str, int], tuple[type[CuptiError], str]] = {
    ("cuptiProfilerHostConfigAddMetrics", 1): (CounterUnavailable, "a counter does not exist"),
    ("cuptiProfilerHostConfigAddMetrics", 17): (CounterUnavailable, "a counter does not exist"),
    ("cuptiProfilerHostConfigAddMetrics", 27): (CountersDoNotCombine, "not in one pass"),
    ("cuptiProfilerHostInitialize", 1): (CuptiTooOld, "this GPU is unknown to libcupti"),
}
"""Codes that mean something else where they come from this function."""


def call_error(
    function: str, code: int, *, library: tuple[int, int], driver: tuple[int, int] | None
) -> CuptiError:
    """The error behind the CUptiResult that a function returned.

    ``library`` and ``driver`` are CUDA versions, (major, minor): libcupti's, and the newest that
    the driver supports.
    """
    kind, words = _BY_FUNCTION.get((function, code)) or _BY_CODE.get(code, (CuptiError, "failed"))
    if driver and driver < library and kind in (CuptiError, CuptiNotFound, DriverUnavailable):
        words = (
            f"the driver supports CUDA {driver[0]}.{driver[1]} and libcupti is of "
            f"{library[0]}.{library[1]}"
        )
        kind = DriverTooOld
    return kind(f"{words} ({function} returned {code})")
