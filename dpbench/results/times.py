"""Time breakdown: arithmetic, bytes and idle time of each phase, and of what privacy adds.

The least time that a phase needs for its operations, and that for its DRAM bytes, follow from what
the card reaches (`dpbench.results.roofline`). Both are bounds, and they overlap: a phase takes at
least the longer of the two. ``idle`` is the time in which the GPU did nothing. ``left`` is the
rest: kernels that reach no roof.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpbench.core.case import AXES, BASELINE_TRAINER
from dpbench.results.roofline import MEASURED_BYTES, Roofs, phases, under
from dpbench.results.rows import OF_CASE, STEP

if TYPE_CHECKING:
    import pandas as pd

PARTS = ("arithmetic", "bytes", "idle", "left")
"""The parts of time; each is a column of seconds, e.g. ``idle_seconds``."""


def time_breakdown(summary: pd.DataFrame, ceilings: Roofs) -> pd.DataFrame:
    """The time of each phase and step of a summary of one card, and its parts.

    Logical bytes bound no time, since caches keep some of them; only DRAM bytes that were measured
    do.

    Returns:
        What `under` returns, for all that was timed, with ``idle_seconds``, (1 - busy) x seconds,
        and ``left_seconds``, the time less these and ``least_seconds``. NaN where an input is
        unknown; ``left_seconds`` is negative where a bound exceeds the time in which the GPU was
        busy, so that the ceiling must be too low, or the counts are of other work than the time.
    """
    table = phases(summary)
    table = table.assign(bytes=table.bytes.where(table.bytes_are == MEASURED_BYTES))
    table = under(table, ceilings)
    table = table[table.seconds.notna()].reset_index(drop=True)
    idle = (1.0 - table.busy) * table.seconds
    return table.assign(idle_seconds=idle, left_seconds=table.seconds - idle - table.least_seconds)


def additional(times: pd.DataFrame, baseline: str = BASELINE_TRAINER) -> pd.DataFrame:
    """How much longer each step of a `time_breakdown` takes than its baseline's, and why.

    Returns:
        One row per case and device that takes longer than the ``baseline`` of its cell, with the
        case's fields: ``more_seconds``, and for each of `PARTS` its difference as a share of
        ``more_seconds``, e.g. ``idle_share``. Shares of arithmetic and bytes overlap; one can be
        negative or above 1.
    """
    steps = times[times.phase == STEP]
    steps = steps.assign(cell=[case.cell for case in steps.case])
    seconds = ["seconds", *(f"{part}_seconds" for part in PARTS)]
    keys = ["cell", *OF_CASE[1:]]
    base = steps.loc[steps.trainer == baseline, [*keys, *seconds]]
    both = steps.merge(base, on=keys, suffixes=("", "_of_baseline"))
    both = both[(both.trainer != baseline) & (both.seconds > both.seconds_of_baseline)]
    more = {name: both[name] - both[f"{name}_of_baseline"] for name in seconds}
    shares = {f"{part}_share": more[f"{part}_seconds"] / more["seconds"] for part in PARTS}
    return both[[*AXES, *OF_CASE]].assign(more_seconds=more["seconds"], **shares)
