"""Reconciles a step's bytes: those of its kernels and copies with those of its ranges.

Kernel replay counts the bytes of kernels only. The PyTorch profiler knows the bytes of copies and
memsets. Range counters see all bytes. If the first two add up to the third, a table of kernels and
copies is complete.
"""

from __future__ import annotations

import pandas as pd

from dpbench.core.case import ALL_PHASES
from dpbench.core.metrics import OTHER_COPIES
from dpbench.results.rows import STEP
from dpbench.results.summary import instruments_of, of_one_instrument

TOLERANCE = 0.01
"""The largest acceptable difference, as a share of the step's bytes."""

BOTH_WAYS = ("memcpy_device_to_device_bytes", OTHER_COPIES)
"""Copies that count as both read and written. Copies to the host are read, from it written."""

ACCOUNT_COLUMNS = {
    "kernels_read": ("kernel_dram_read_bytes",),
    "kernels_written": ("kernel_dram_write_bytes",),
    "copies_read": (*BOTH_WAYS, "memcpy_device_to_host_bytes"),
    "copies_written": (*BOTH_WAYS, "memcpy_host_to_device_bytes", "memset_bytes"),
    "range_read": ("dram_read_bytes",),
    "range_written": ("dram_write_bytes",),
}
"""The columns of the table, each with the metrics of one instrument that it sums."""


def reconcile_kernels(summary: pd.DataFrame) -> pd.DataFrame | None:
    """The account of one case on one device, in bytes of one step: a row for each phase and STEP.

    Columns are `ACCOUNT_COLUMNS`, then ``remainder`` (range less kernels less copies) and
    ``share`` (the remainder over the step's range). None if a number is missing.
    """
    known = {metric for metrics in ACCOUNT_COLUMNS.values() for metric in metrics}
    summary = of_one_instrument(summary[summary.metric.isin(known)])
    if summary.device.nunique() != 1:
        return None
    parts = {}
    for name, metrics in ACCOUNT_COLUMNS.items():
        rows = summary[summary.instrument.isin(instruments_of(metrics[0]))]
        wide = rows.pivot(index="phase", columns="metric", values="value")
        wide = wide.reindex(columns=[*metrics]).fillna({OTHER_COPIES: 0.0})
        parts[name] = wide.sum(axis="columns", skipna=False)
        if STEP not in wide.index or parts[name].isna().any():
            return None
    # An instrument omits phases in which it saw nothing: the clip phase of ghost clipping has
    # copies and no kernel. It is checked that the instrument saw the step.
    table = pd.DataFrame(parts).fillna(0.0)
    table = table.reindex([phase for phase in (*ALL_PHASES, STEP) if phase in table.index])
    ranges = table.range_read + table.range_written
    counted = table.drop(columns=["range_read", "range_written"]).sum(axis="columns")
    return table.assign(remainder=ranges - counted, share=(ranges - counted) / ranges[STEP])


def dram_bytes_of_step(summary: pd.DataFrame) -> float | None:
    """DRAM bytes of a step, by ranges of hardware counters; None if they were not counted."""
    step = summary[(summary.phase == STEP) & (summary.metric == "dram_bytes")]
    values = of_one_instrument(step).value
    return None if values.empty else float(values.iloc[0])
