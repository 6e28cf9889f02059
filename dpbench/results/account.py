"""The whole account of a step: kernels and copies against what the range counters saw.

Kernel replay counts the bytes of each kernel and misses copies and memsets; the PyTorch
profiler knows how many bytes those moved; range counters see everything. If the first two add
up to the third, nothing is missing from a table of kernels and copies.
"""

from __future__ import annotations

import pandas as pd

from dpbench.case import ALL_PHASES
from dpbench.results.frame import IN_CACHE_BYTES, summarise
from dpbench.results.rows import STEP

TOLERANCE = 0.01
"""The share of the step's bytes up to which the remainder of an account is in order."""

OTHER_COPIES = "memcpy_other_bytes"
"""Copies of which a trace says no direction that it knows; there are rows only if there are any."""

BOTH_WAYS = ("memcpy_device_to_device_bytes", OTHER_COPIES)
"""Copies that read and write device memory; one to the host reads, one from it writes."""

ACCOUNT_COLUMNS = {
    "kernels_read": ("ncu_kernels", ("kernel_dram_read_bytes",)),
    "kernels_written": ("ncu_kernels", ("kernel_dram_write_bytes",)),
    "copies_read": ("torch_profiler", (*BOTH_WAYS, "memcpy_device_to_host_bytes")),
    "copies_written": (
        "torch_profiler",
        (*BOTH_WAYS, "memcpy_host_to_device_bytes", "memset_bytes"),
    ),
    "range_read": ("ncu", ("dram_read_bytes",)),
    "range_written": ("ncu", ("dram_write_bytes",)),
}
"""The columns of an account: the instrument and the metrics whose sum each is."""


def account(frame: pd.DataFrame) -> pd.DataFrame | None:
    """The account of one case on one device, in bytes of one step: a row for each phase and STEP.

    Columns are `ACCOUNT_COLUMNS`, then ``remainder`` (range less kernels less copies) and
    ``share`` (the remainder over the step's range). None if one of the numbers is not there.
    """
    instruments = {instrument for instrument, _ in ACCOUNT_COLUMNS.values()}
    summary = summarise(frame[frame.instrument.isin(instruments)])
    parts = {name: _by_phase(summary, *source) for name, source in ACCOUNT_COLUMNS.items()}
    if summary.device.nunique() != 1 or any(part is None for part in parts.values()):
        return None
    # A phase that an instrument does not name is one in which it saw nothing: clip of ghost
    # clipping has copies and no kernel. That the instrument saw the step is checked.
    table = pd.DataFrame(parts).fillna(0.0)
    table = table.reindex([phase for phase in (*ALL_PHASES, STEP) if phase in table.index])
    ranges = table.range_read + table.range_written
    counted = table.drop(columns=["range_read", "range_written"]).sum(axis="columns")
    return table.assign(remainder=ranges - counted, share=(ranges - counted) / ranges[STEP])


def _by_phase(
    summary: pd.DataFrame, instrument: str, metrics: tuple[str, ...]
) -> pd.Series[float] | None:
    """The sum of an instrument's metrics by phase; None if one of its phases lacks one."""
    known = [
        name for whose, names in ACCOUNT_COLUMNS.values() if whose == instrument for name in names
    ]
    rows = summary[(summary.instrument == instrument) & summary.metric.isin(known)]
    wide = rows.pivot(index="phase", columns="metric", values="value").reindex(columns=[*metrics])
    needed = wide.drop(columns=OTHER_COPIES, errors="ignore")
    if STEP not in wide.index or needed.isna().any(axis=None):
        return None
    return wide.sum(axis="columns")


def in_cache(account: pd.DataFrame) -> bool:
    """Whether the step is so small that copies stay in the L2 cache, and nothing adds up."""
    return bool(account.range_read[STEP] + account.range_written[STEP] < IN_CACHE_BYTES)


def unaccounted(account: pd.DataFrame) -> bool:
    """Whether more of the step is left over than `TOLERANCE`, of steps that reach DRAM."""
    return not in_cache(account) and bool(abs(account.share[STEP]) > TOLERANCE)
