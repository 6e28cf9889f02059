"""What can go wrong with hardware counters, by ncu or by CUPTI, and what would help."""

from __future__ import annotations

from dpbench.instruments.base import CaseOutOfMemory, CaseRefused, InstrumentError


class CountersForbidden(InstrumentError):
    """Reading the GPU's performance counters is not allowed to this user."""

    remedy = (
        "run as root or with CAP_SYS_ADMIN, or let every user read them: driver option "
        "NVreg_RestrictProfilingToAdminUsers=0 (https://developer.nvidia.com/ERR_NVGPUCTRPERM)"
    )


class CountersBusy(InstrumentError):
    """Something else holds the GPU's performance counters."""

    remedy = (
        "end the other profiler (ncu, nsys, a debugger, another process that counts), or pause "
        "DCGM's: dcgmi profile --pause, and --resume after"
    )


class CountersUnsupported(InstrumentError):
    """The GPU is set up in a way that has no counters."""

    remedy = "use a whole GPU that is not virtualised, split or in confidential-computing mode"


class CounterUnknown(InstrumentError):
    """A counter does not exist on this GPU, cannot be read in one pass, or gave no value."""

    remedy = (
        "name others with --ncu-metrics; dpbench doctor --chip and ncu --query-metrics list what "
        "there is"
    )


class CountersDoNotCombine(InstrumentError):
    """Counters that cannot be read in the same pass."""

    remedy = "count them one after another"


class ProfilerNotLoaded(InstrumentError):
    """The profiler finds no driver, or no way to the GPU."""

    remedy = (
        "check that nvidia-smi shows the GPU here, that profiler and driver fit each other, and "
        "that no virtual machine or sandbox hides the GPU's counters"
    )


class DriverTooOld(InstrumentError):
    """The driver is older than libcupti."""

    remedy = "update the driver, or use a build of torch for the CUDA version that nvidia-smi shows"


class CuptiNotFound(InstrumentError):
    """There is no usable libcupti here."""

    remedy = (
        "PyTorch's wheels for CUDA bring it (torch 2.6 or newer, built for CUDA 12.6 or newer); "
        "beside another build, install nvidia-cuda-cupti for its version of CUDA"
    )


class CuptiTooOld(InstrumentError):
    """A libcupti that cannot count ranges, or not on this GPU."""

    remedy = "use a build of torch for a newer CUDA; ranges can be counted from CUDA 12.6.2 on"


class CuptiError(InstrumentError):
    """A function of CUPTI failed for a reason that has no remedy of its own."""


class RangesLost(InstrumentError):
    """Not every range that was begun was counted."""

    remedy = "count fewer ranges at a time, or raise max_ranges"


class StepsDiffer(InstrumentError):
    """Steps that should be equal are not, so that what each counted does not belong together."""

    remedy = "warm up longer, give every step the same shapes, and keep other processes off the GPU"


KINDS: dict[str, type[InstrumentError]] = {
    "OutOfMemory": CaseOutOfMemory,
    "ConfigurationError": CaseRefused,
    **{
        kind.__name__: kind
        for kind in InstrumentError.__subclasses__()
        if kind.__module__ == __name__
    },
}
"""By name, what a process that measures can say it failed of."""
