"""The time breakdown, which explains the time of a phase by arithmetic, bytes and idle time.

The additional time of a private step, compared with a step of the baseline, has the same parts.

The roofs of a card are its highest rates (`dpbench.results.roofline`). They give the least time of
a phase for its operations and the least time for its DRAM bytes. These two times overlap, so a
phase takes at least the longer of the two. ``idle`` is the time in which the GPU did nothing.
``left`` is the time of the phase minus ``idle`` and minus the longer least time, so ``left`` is the
time that roofs and idle time do not explain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpbench.core.case import AXES, BASELINE_TRAINER
from dpbench.results.roofline import MEASURED_BYTES, Roofs, apply_roofs, phases
from dpbench.results.rows import OF_CASE, STEP

if TYPE_CHECKING:
    import pandas as pd

PARTS = ("arithmetic", "bytes", "idle", "left")
"""The parts of a time. Each part has a column of seconds, e.g. ``idle_seconds``."""


def time_breakdown(summary: pd.DataFrame, ceilings: Roofs) -> pd.DataFrame:
    """Divide the times of phases and steps, all measured on one card, into parts.

    Logical bytes are not used. A cache can hold some of the logical bytes, so the time to move all
    logical bytes from memory is no lower bound.

    Returns:
        The table of `apply_roofs` for all phases and steps with a time, and two more columns.
        ``idle_seconds`` is ``(1 - busy) * seconds``, the time in which the GPU did nothing.
        ``left_seconds`` is the time minus ``idle_seconds`` and ``least_seconds``. ``left_seconds``
        is negative if ``least_seconds`` exceeds the time in which the GPU was busy. Then a roof is
        too low, or the bytes and the time belong to different work. A part is NaN if a number that
        it needs is unknown.
    """
    table = phases(summary)
    table = table.assign(bytes=table.bytes.where(table.bytes_are == MEASURED_BYTES))
    table = apply_roofs(table, ceilings)
    table = table[table.seconds.notna()].reset_index(drop=True)
    idle = (1.0 - table.busy) * table.seconds
    return table.assign(idle_seconds=idle, left_seconds=table.seconds - idle - table.least_seconds)


def additional(times: pd.DataFrame, baseline: str = BASELINE_TRAINER) -> pd.DataFrame:
    """Divide the time by which each step exceeds the baseline's step into parts.

    Returns:
        One row per case and device whose step takes longer than the step of the same case with the
        ``baseline``. ``more_seconds`` is the additional time. For each of `PARTS`, a column such as
        ``idle_share`` is the additional time of the part, divided by ``more_seconds``. The shares
        of arithmetic and bytes overlap. A share can be negative or above 1.
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
