"""Tables that compare phases with the highest rates of a card, and the time breakdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import pandas as pd

from dpbench.core.case import BASELINE_TRAINER
from dpbench.results.roofline import LAUNCH_BOUND, PARTS, Roofs, additional
from dpbench.results.rows import STEP
from dpbench.show.layout import Shown, Table, gigabytes, step_milliseconds
from dpbench.show.tables import SHOWN_SHARE, in_order, ordered, titled


def roofline_tables(table: pd.DataFrame, roofs: Roofs) -> list[Table]:
    """Make a roofline table for each configuration, device and kind of bytes.

    Args:
        table: the result of `dpbench.results.roofline.apply_roofs`.
        roofs: the roofs that were applied.
    """
    tables = []
    for bytes_are, group in table.groupby("bytes_are", sort=False):
        for title, rows in titled(in_order(group)):
            known = {h: c for h, c in ROOFLINE_COLUMNS.items() if rows[c[0]].notna().any()}
            notes = [
                f"{roofs_in_words(roofs, rows.precision)} Elementwise operations are not counted. "
                f"The least time of a step is the sum of its phases' least times.",
                *launch_bound_notes(rows),
            ]
            name = f"{title}: roofline of {bytes_are}"
            tables.append(phase_lines(name, rows, rows.least_seconds, known, notes))
    return tables


ROOFLINE_COLUMNS: dict[str, Shown] = {
    "TFLOP": ("flops", lambda operations: gigabytes(operations / 1e3)),
    "GB": ("bytes", gigabytes),
    "FLOP\n/ B": ("intensity", "{:.1f}".format),
    "bound": ("bound", str),
    "least\nms": ("least_seconds", step_milliseconds),
    "time\nms": ("seconds", step_milliseconds),
    "% of\nroof": ("share", "{:.0%}".format),
}
"""The columns of a roofline table. The last two columns have numbers only for timed phases."""


def phase_lines(
    title: str,
    rows: pd.DataFrame,
    values: pd.Series[float],
    columns: Mapping[str, Shown],
    notes: Iterable[str],
) -> Table:
    """Make a table with a line for the step of each trainer, followed by a line for each phase.

    A phase is shown if its value, for some trainer, is at least the largest value in the table
    times `SHOWN_SHARE`.
    """
    large = rows.phase[values >= SHOWN_SHARE * values.max()]
    lines = rows[rows.phase.isin([*large, STEP])]
    lines = ordered(lines.assign(of_phase=lines.phase != STEP), ["trainer", "of_phase", "phase"])
    lines = lines.assign(name=lines.trainer.where(lines.phase == STEP, "· " + lines.phase))
    return Table.of(title, lines, {"trainer\n· phase": ("name", str), **columns}, notes)


def launch_bound_notes(rows: pd.DataFrame) -> Iterator[str]:
    """Yield a note if a phase is launch-bound, and a note if it is unknown how busy the GPU was."""
    if (rows.busy < LAUNCH_BOUND).any():
        yield (
            f"Launch-bound: the GPU was busy for less than {LAUNCH_BOUND:.0%} of the time. The "
            f"share is in brackets. Neither roof explains the idle time."
        )
    timed = rows[(rows.phase == STEP) & rows.seconds.notna()]
    if unknown := [*dict.fromkeys(timed[timed.busy.isna()].trainer)]:
        yield (
            f"How busy the GPU was with {', '.join(unknown)} was not measured, so launch-bound "
            f"phases are not marked. --instrument cupti measures it."
        )


def roofs_in_words(roofs: Roofs, precisions: Iterable[str]) -> str:
    """Write a card's bandwidth, and its peak arithmetic and `Roofs.ridge` at some precisions."""
    peaks = [
        f"{roofs.flops[name] / 1e12:.4g} TFLOP/s at {name}, which are equal bounds at "
        f"{roofs.ridge(name):.1f} FLOP/B"
        for name in dict.fromkeys(precisions)
        if name in roofs.flops
    ]
    roof = " and ".join(filter(None, [f"{roofs.bandwidth / 1e9:.4g} GB/s", " or ".join(peaks)]))
    return f"Roofs of {roofs.name}: {roof} ({roofs.source})."


# --- the time breakdown ----------------------------------------------------------------------


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
        times: the result of `dpbench.results.roofline.time_breakdown`.
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
    for missing, what, by in (
        (steps.flops.isna(), "operations were counted", "logical counts them, without a GPU"),
        (steps.bytes.isna(), "DRAM bytes were measured", "cupti or ncu measures them"),
    ):
        if missing.any():
            yield f"No {what} for {_names(steps[missing].trainer)}: --instrument {by}."
    if (steps.arithmetic_seconds.isna() & steps.flops.notna()).any():
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
