"""Errors of hardware counters, whether Nsight Compute or CUPTI reads them."""

from __future__ import annotations

from dpbench.child.failures import InstrumentError


class CountersForbidden(InstrumentError):
    """The user may not read the GPU's performance counters."""

    remedy = (
        "run as root or with CAP_SYS_ADMIN, or let every user read them: driver option "
        "NVreg_RestrictProfilingToAdminUsers=0 (https://developer.nvidia.com/ERR_NVGPUCTRPERM)"
    )


class CountersBusy(InstrumentError):
    """Another program holds the GPU's performance counters."""

    remedy = (
        "end the other profiler (ncu, nsys, a debugger, another process that counts), or pause "
        "DCGM's: dcgmi profile --pause, and --resume after"
    )


class CounterUnknown(InstrumentError):
    """A counter does not exist on this GPU, cannot be read in one pass, or gave no value."""

    remedy = (
        "choose others with --ncu-metrics; dpbench doctor --chip and ncu --query-metrics list them"
    )


class ProfilerNotLoaded(InstrumentError):
    """The profiler cannot reach the driver or the GPU."""

    remedy = (
        "check that nvidia-smi shows the GPU here, that profiler and driver fit each other, and "
        "that no virtual machine or sandbox hides the GPU's counters"
    )
