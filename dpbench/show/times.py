"""Tables of the time breakdown: of each phase, and of what privacy adds to a step."""

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
"""The columns of a phase: its time and its parts."""

ADDED_COLUMNS: dict[str, Shown] = {
    "more\nms": ("more_seconds", _tenths),
    **{part: (f"{part}_share", lambda x: f"{round(x, 2) + 0.0:.0%}") for part in PARTS},  # no -0%
}
"""The columns of a step: how much longer it takes than the baseline's, and which shares explain
it."""

HOW_TO_READ = (
    "Arithmetic, bytes: the least time for each at these roofs; two bounds, which overlap. Idle: "
    "the GPU did nothing. Left: the time less idle less the longer bound, of a step the sum of its "
    "phases' longer ones. Times are medians, so phases do not add up exactly."
)


ABOUT_SHARES = (
    "Shares of the time that a step takes more than {}'s: the least time for its additional "
    "arithmetic and bytes, its additional idle time, what is left. They overlap and need not add "
    "up to 100%."
)


def time_tables(times: pd.DataFrame, roofs: Roofs, baseline: str = BASELINE_TRAINER) -> list[Table]:
    """What `dpbench.results.times.account` returned: by cell its phases, then what privacy adds."""
    tables: list[Table] = []
    for title, rows in titled(in_order(times)):
        words = f"{roofs_in_words(roofs, rows.precision)} {HOW_TO_READ}"
        notes = [words, *launch_bound_notes(rows), *lacking(rows)]
        name = f"{title}: what time is made of"
        tables.append(phase_lines(name, rows, rows.seconds, TIME_COLUMNS, notes))
        if len(added := additional(rows, baseline)):
            columns: dict[str, Shown] = {"trainer": ("trainer", str), **ADDED_COLUMNS}
            name = f"{title}: what the time beyond {baseline}'s is made of"
            tables.append(Table.of(name, added, columns, [ABOUT_SHARES.format(baseline)]))
    return tables


def lacking(rows: pd.DataFrame) -> Iterator[str]:
    """Notes on what some trainers lack, or what contradicts the rest, and what helps."""
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
        help = "--time FILE takes a measured one"
        why = help if known else "the precision of a script is unknown"
        yield f"No ceiling of arithmetic{f' at {precision}' if known else ''}: {why}."
    busy_seconds = rows.seconds - rows.idle_seconds.fillna(0.0)
    longest = rows[["arithmetic_seconds", "bytes_seconds", "least_seconds"]].max(axis="columns")
    if len(beyond := rows[(longest > busy_seconds) & (rows.phase != STEP)]):
        places = _names(f"{row.trainer} {row.phase}" for row in beyond.itertuples())
        yield (
            f"A bound exceeds the time in which the GPU was busy: {places}. The ceiling is too low "
            f"there, or bytes and time are of different work."
        )


def _names(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))
