"""Tables of the time breakdown of phases, and of the time that privacy adds to a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pandas as pd

from dpbench.core.case import BASELINE_TRAINER, PRODUCTS
from dpbench.results.roofline import Roofs
from dpbench.results.rows import STEP
from dpbench.results.times import PARTS, additional
from dpbench.show.groups import in_order, titled
from dpbench.show.kernels import launch_bound_notes, phase_lines, roofs_in_words
from dpbench.show.layout import Shown, Table


def _tenths(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


TIME_COLUMNS: dict[str, Shown] = {
    "time\nms": ("seconds", _tenths),
    "arithm.\n>= ms": ("arithmetic_seconds", _tenths),
    "bytes\n>= ms": ("bytes_seconds", _tenths),
    "idle\nms": ("idle_seconds", _tenths),
    "left\nms": ("left_seconds", _tenths),
    "bound": ("bound", str),
}
"""The columns of a table of phases: the time and its parts."""

ADDED_COLUMNS: dict[str, Shown] = {
    "more\nms": ("more_seconds", _tenths),
    # Adding 0.0 turns -0% into 0%.
    **{part: (f"{part}_share", lambda x: f"{round(x, 2) + 0.0:.0%}") for part in PARTS},
}
"""The columns of a private step: the time by which it exceeds the baseline's step, and the shares
of this time."""

HOW_TO_READ = (
    "Arithmetic, bytes: the least times for operations and for bytes at these roofs. These two "
    "bounds overlap. Idle: the time in which the GPU did nothing. Left: the time minus idle minus "
    "the longer bound. The bound of a step is the sum of its phases' longer bounds. Times are "
    "medians, so phases do not add up exactly."
)


ABOUT_SHARES = (
    "More: the time by which a step exceeds the step of {}. The other columns are shares of this "
    "time: the least time for the additional arithmetic, the least time for the additional bytes, "
    "the additional idle time, and the additional time left. Shares overlap, so they need not add "
    "up to 100%."
)


def time_tables(times: pd.DataFrame, roofs: Roofs, baseline: str = BASELINE_TRAINER) -> list[Table]:
    """Make a table of the times of phases for each configuration and device.

    If a step takes longer than the baseline's step, a second table breaks down the additional time.

    Args:
        times: the result of `dpbench.results.times.time_breakdown`.
        roofs: the roofs with which ``times`` was computed.
        baseline: the trainer with which steps are compared.
    """
    tables: list[Table] = []
    for title, rows in titled(in_order(times)):
        how_to_read = f"{roofs_in_words(roofs, rows.precision)} {HOW_TO_READ}"
        notes = [how_to_read, *launch_bound_notes(rows), *lacking(rows)]
        name = f"{title}: time breakdown"
        tables.append(phase_lines(name, rows, rows.seconds, TIME_COLUMNS, notes))
        if len(added := additional(rows, baseline)):
            columns: dict[str, Shown] = {"trainer": ("trainer", str), **ADDED_COLUMNS}
            name = f"{title}: breakdown of the time beyond {baseline}'s"
            tables.append(Table.of(name, added, columns, [ABOUT_SHARES.format(baseline)]))
    return tables


def lacking(rows: pd.DataFrame) -> Iterator[str]:
    """Yield notes on missing numbers, and on least times that exceed the time of the busy GPU."""
    steps = rows[rows.phase == STEP]
    no_ceiling = steps.arithmetic_seconds.isna() & steps.flops.notna()
    for missing, what, by in (
        (steps.flops.isna(), "operations were counted", "logical counts them, without a GPU"),
        (steps.bytes.isna(), "DRAM bytes were measured", "cupti or ncu measures them"),
    ):
        if missing.any():
            yield f"No {what} for {_names(steps[missing].trainer)}: --instrument {by}."
    for precision in dict.fromkeys(steps[no_ceiling].precision):
        known = precision in PRODUCTS or precision.endswith("-amp")
        if known:
            yield f"No ceiling of arithmetic at {precision}: name a FILE that has it, --time FILE."
        else:
            yield "No ceiling of arithmetic, because the precision of a script is unknown."
    busy_seconds = rows.seconds - rows.idle_seconds.fillna(0.0)
    longest = rows[["arithmetic_seconds", "bytes_seconds", "least_seconds"]].max(axis="columns")
    if len(beyond := rows[(longest > busy_seconds) & (rows.phase != STEP)]):
        places = _names(f"{row.trainer} {row.phase}" for row in beyond.itertuples())
        yield (
            f"A bound exceeds the time in which the GPU was busy: {places}. Either the ceiling is "
            f"too low, or the bytes and the time belong to different work."
        )


def _names(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))
