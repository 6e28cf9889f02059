"""What groups of kernels move in a step, as a frame."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd

from dpbench.results.kernels import KernelCount
from dpbench.results.rows import STEP, Measurement

SUMS = ["launches", "read_bytes", "write_bytes", "l2_bytes", "seconds", "dram_bytes"]


def kernel_frame(counts: Iterable[KernelCount]) -> pd.DataFrame:
    """One row per `KernelCount`, with its short name (``kernel``), category and DRAM bytes."""
    rows = [{**count.as_row(), "dram_bytes": count.dram_bytes} for count in counts]
    columns = [*KernelCount.__dataclass_fields__, "kernel", "category", "dram_bytes"]
    return pd.DataFrame(rows, columns=columns)


def kernel_table(
    frame: pd.DataFrame,
    by: Sequence[str] = ("phase", "kernel"),
    *,
    step_bytes: float | None = None,
    bandwidth: float | None = None,
) -> pd.DataFrame:
    """What groups of kernels move in one step, most DRAM bytes first.

    Args:
        frame: of `kernel_frame`.
        by: columns that make a group, e.g. ``["category"]``.
        step_bytes: the bytes that count as the whole; those of all kernels if None.
        bandwidth: of the card's memory, B/s.

    Returns:
        Indexed by group: sums per step of `KernelCount`'s numbers, ``dram_bytes``, ``share`` of
        the whole, and ``ceiling``, the fraction of ``bandwidth`` that the bytes ÷ the kernels'
        own time reach (NaN without a bandwidth).
    """
    steps = max(frame.repeat.nunique(), 1)
    table = frame.groupby(list(by), dropna=False)[SUMS].sum() / steps
    whole = step_bytes if step_bytes is not None else table.dram_bytes.sum()
    table["share"] = table.dram_bytes / whole if whole else float("nan")
    table["ceiling"] = table.dram_bytes / table.seconds / (bandwidth or float("nan"))
    return table.sort_values("dram_bytes", ascending=False, kind="stable")


def step_bytes(rows: Iterable[Measurement]) -> float | None:
    """DRAM bytes of a step, from rows of ranges; None if reads or writes were not counted."""
    metrics = {"dram_read_bytes", "dram_write_bytes"}
    steps = [row for row in rows if row.phase == STEP and row.metric in metrics]
    if {row.metric for row in steps} != metrics:
        return None
    return sum(row.value for row in steps) / len({row.repeat for row in steps})
