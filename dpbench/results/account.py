"""The whole account of a step: kernels and copies against what the range counters saw.

Kernel replay counts the bytes of each kernel and misses copies and memsets; the PyTorch
profiler knows how many bytes those moved; range counters see everything. If the first two add
up to the third, nothing is missing from a table of kernels and copies.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import pandas as pd

from dpbench.case import ALL_PHASES, AXES
from dpbench.errors import ConfigurationError
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


def account(frame: pd.DataFrame) -> pd.DataFrame:
    """The account of one case, in bytes of one step: a row for each phase and for the step.

    Columns are `ACCOUNT_COLUMNS`, then ``remainder`` (range less kernels less copies) and
    ``share`` (the remainder over the step's range). An instrument or a metric that is missing
    is an error.

    Args:
        frame: the long table of one case on one device.
    """
    summary = summarise(frame)
    if len(summary[[*AXES, "device"]].drop_duplicates()) > 1:
        raise ConfigurationError("an account is of one case on one device; these rows mix several")
    columns = {
        name: _by_phase(summary, instrument, metrics)
        for name, (instrument, metrics) in ACCOUNT_COLUMNS.items()
    }
    # A phase that an instrument does not name is one in which it saw nothing: clip of ghost
    # clipping has copies and no kernel. That the instrument saw the step is checked above.
    table = pd.DataFrame(columns).fillna(0.0)
    table = table.reindex([phase for phase in (*ALL_PHASES, STEP) if phase in table.index])
    ranges = table.range_read + table.range_written
    parts = table.drop(columns=["range_read", "range_written"]).sum(axis="columns")
    table["remainder"] = ranges - parts
    table["share"] = table.remainder / ranges[STEP]
    return table


def _by_phase(summary: pd.DataFrame, instrument: str, metrics: Iterable[str]) -> pd.Series[float]:
    """The sum of metrics by phase."""
    of_instrument = summary[summary.instrument == instrument]
    rows = of_instrument[of_instrument.metric.isin(list(metrics))]
    if STEP not in set(rows.phase):
        raise ConfigurationError(
            f"an account needs {' or '.join(metrics)} of the instrument {instrument!r}; "
            f"there is {', '.join(sorted(set(summary.instrument))) or 'nothing'}"
        )
    known = {m for whose, names in ACCOUNT_COLUMNS.values() if whose == instrument for m in names}
    phases = set(of_instrument[of_instrument.metric.isin(known)].phase)
    for metric in sorted({*metrics} - {OTHER_COPIES}):
        if lacking := phases - set(rows[rows.metric == metric].phase):
            raise ConfigurationError(
                f"an account needs {metric} of each phase; {', '.join(sorted(lacking))} has none"
            )
    return rows.groupby("phase").value.sum()


def in_cache(account: pd.DataFrame) -> bool:
    """Whether the step is so small that copies stay in the L2 cache, and nothing adds up."""
    return bool(account.range_read[STEP] + account.range_written[STEP] < IN_CACHE_BYTES)


def unaccounted(account: pd.DataFrame) -> bool:
    """Whether more of the step is left over than `TOLERANCE`, of steps that reach DRAM."""
    return not in_cache(account) and bool(abs(account.share[STEP]) > TOLERANCE)


def account_json(case_id: str, account: pd.DataFrame) -> str:
    """An account in bytes of one step: under ``phases``, the columns of `account` by phase."""
    phases = {str(phase): line.to_dict() for phase, line in account.iterrows()}
    document = {"case": case_id, "unit": "B", "tolerance": TOLERANCE, "phases": phases}
    return json.dumps(document, indent=1) + "\n"
