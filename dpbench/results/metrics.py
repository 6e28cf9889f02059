"""The metrics that dpbench has names for, and their units."""

from __future__ import annotations

from dpbench.results.kernels import KERNEL_METRICS

METRICS = (
    "dram_bytes",
    "dram_read_bytes",
    "dram_write_bytes",
    "l2_total_bytes",
    "l2_read_bytes",
    "l2_write_bytes",
    "l2_atomic_bytes",
    "global_load_bytes",
    "global_store_bytes",
    "logical_bytes",
    "logical_read_bytes",
    "logical_write_bytes",
    "flops",
    "peak_memory_bytes",
    "step_time_seconds",
    "samples_per_second",
    *KERNEL_METRICS,
    "cpu_time_seconds",
    "device_time_seconds",
    "memory_growth_bytes",
    "phase_peak_memory_bytes",
    "memcpy_device_to_device_bytes",
    "memcpy_host_to_device_bytes",
    "memcpy_device_to_host_bytes",
    "memcpy_other_bytes",
    "memset_bytes",
)
"""What can be in a run besides counters by their own names, which have ``__`` in them."""

MAY_FALL = frozenset({"memory_growth_bytes"})
"""The metrics that can be below zero."""


def unit(metric: str) -> str:
    """The unit of one of `METRICS`."""
    if metric.endswith("_bytes"):
        return "B"
    if metric.endswith("_seconds"):
        return "s"
    return "1/s" if metric.endswith("_per_second") else "1"


UNITS = {metric: unit(metric) for metric in METRICS}
"""The unit of each of them."""
