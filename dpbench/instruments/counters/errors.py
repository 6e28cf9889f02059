"""Errors that Nsight Compute and CUPTI both raise about hardware counters."""

from __future__ import annotations

from dpbench.core.errors import InstrumentError


class CountersForbidden(InstrumentError):
    """The user may not read the GPU's performance counters."""

    remedy = (
        "run as root or with CAP_SYS_ADMIN, or allow all users to read the counters with the "
        "driver option NVreg_RestrictProfilingToAdminUsers=0 "
        "(https://developer.nvidia.com/ERR_NVGPUCTRPERM)"
    )


class CountersBusy(InstrumentError):
    """Another program uses the GPU's performance counters."""

    remedy = (
        "end the other profiler (ncu, nsys, a debugger, another dpbench), or run "
        "`dcgmi profile --pause` before and `dcgmi profile --resume` afterwards if DCGM uses the "
        "counters"
    )


class CounterUnknown(InstrumentError):
    """A counter is missing on this GPU or in a report, needs several passes, or has no value."""

    remedy = (
        "choose other counters with --ncu-metrics, from the lists of `dpbench doctor --chip` and "
        "`ncu --query-metrics`"
    )


class ProfilerNotLoaded(InstrumentError):
    """The profiler cannot reach the driver or the GPU."""

    remedy = (
        "check that nvidia-smi shows the GPU, that the driver supports the version of the "
        "profiler, and that no virtual machine or sandbox hides the GPU's counters"
    )
