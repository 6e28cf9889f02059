"""The roofline and the time breakdown, which compare phases with the highest rates of the card."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import pandas as pd

from dpbench.core.case import AXES
from dpbench.core.errors import ConfigurationError
from dpbench.results.roofline import (
    MEASURED_BYTES,
    Roofs,
    apply_roofs,
    find_card,
    find_ceilings,
    phases,
)
from dpbench.results.rows import NO_HARDWARE, NUMBER, OF_CASE, PLACE, STEP
from dpbench.results.run import Run
from dpbench.results.times import additional, time_breakdown
from dpbench.show.groups import CONFIGURATION, ordered
from dpbench.show.html import figures
from dpbench.show.html.data import MEASURED, PageData, pivot, titles
from dpbench.show.html.figures import NAMES, PHASE_COLOURS, Chart
from dpbench.show.kernels import ROOFLINE_COLUMNS, launch_bound_notes, roofs_in_words
from dpbench.show.layout import Shown, Table
from dpbench.show.tables import SHOWN_SHARE
from dpbench.show.times import ABOUT_SHARES, ADDED_COLUMNS, HOW_TO_READ, TIME_COLUMNS, lacking


def roofline(data: PageData) -> Chart | None:
    """Draw, for each phase, the least time that the card allows divided by the measured time."""
    table, notes = _combine_runs(data, _roofline_of)
    basis = (
        "DRAM bytes by hardware counters, times of unprofiled steps, floating-point operations "
        "counted without hardware"
    )
    if table.empty:
        nothing = Table("Roofline by phase", [], [], tuple(notes))
        return Chart("roofline", basis, nothing) if notes else None
    table = table[table.phase != STEP]
    placed = table[table.flops > 0].assign(basis=MEASURED)
    present = set(placed.phase)
    chart = figures.bar_chart(
        "roofline",
        "Roofline: how much of its roof each phase reaches",
        basis,
        pivot(placed.assign(value=placed.share), "phase").assign(end=1.0, label=""),
        {name: colour for name, colour in PHASE_COLOURS.items() if name in present},
        "% of the roof: of arithmetic, or of bytes",
        unit="%",
    )
    how_to_read = (
        "Elementwise operations are not counted. A phase without counted operations has no bar. "
        "The table also has these phases, each with its roof and its share."
    )
    notes += [how_to_read, *launch_bound_notes(table)]
    columns = _in_one_line({"phase": ("phase", str), **ROOFLINE_COLUMNS})
    return replace(chart, table=Table.of(chart.table.title, table, {**NAMES, **columns}, notes))


PhasesAndRoofs = tuple[pd.DataFrame, Roofs]
"""The phases of a run on one device with their least times, and the roofs of the device."""


def _roofline_of(summary: pd.DataFrame, device: str, run: Run) -> PhasesAndRoofs | None:
    """Compare phases with the roofs of their card, if operations and DRAM bytes are known."""
    rows = phases(summary[summary.precision != ""]).dropna(subset="flops")
    rows = rows[rows.bytes_are == MEASURED_BYTES]
    if rows.empty:
        return None
    card = find_card(device)
    return apply_roofs(rows, card), card


def _combine_runs(
    data: PageData, analyse: Callable[[pd.DataFrame, str, Run], PhasesAndRoofs | None]
) -> tuple[pd.DataFrame, list[str]]:
    """Analyse each device of each run, and combine the results.

    ``analyse`` gets the numbers that the device measured in the run, and the numbers that all runs
    counted without hardware.

    Returns:
        A table and notes. The table has the steps, and the phases that take more than `SHOWN_SHARE`
        of the time of their step, with the title of each configuration. The notes have the roofs of
        devices, and name devices without known roofs.
    """
    tables, errors, roof_notes = [], [], []
    all_rows = pd.concat([run.summary for run in data.runs], ignore_index=True)
    counted = all_rows[all_rows.device == NO_HARDWARE].drop_duplicates(NUMBER)
    for run in data.runs:
        measured = run.summary[run.summary.device != NO_HARDWARE]
        for device, rows in measured.groupby("device", sort=False):
            try:
                found = analyse(pd.concat([rows, counted], ignore_index=True), str(device), run)
            except ConfigurationError as error:
                errors.append(f"{device}: {error}.")
                continue
            if found:
                table, roofs = found
                tables.append(table.assign(run=run.name))
                roof_notes.append(roofs_in_words(roofs, sorted(set(table.precision))))
    if not tables:
        return pd.DataFrame(), errors
    table = pd.concat(tables, ignore_index=True)
    longest = table.groupby(["run", *OF_CASE], sort=False).seconds.transform("max")
    table = table[table.seconds > SHOWN_SHARE * longest]
    table = table.assign(title=titles(table, data.summary))
    table = ordered(table, [*CONFIGURATION, "device", "trainer", "phase"])
    return table, [*errors, *dict.fromkeys(roof_notes if len(table) else ())]


def _in_one_line(columns: Mapping[str, Shown]) -> dict[str, Shown]:
    return {header.replace("\n", " "): shown for header, shown in columns.items()}


# --- time breakdown --------------------------------------------------------------------------

TIME_COLOURS = {
    "step": "#7F8790",
    "arithmetic": "#0072B2",
    "bytes": "#E69F00",
    "idle": "#CC79A7",
}


def time(data: PageData) -> Chart | None:
    """Draw the time of each step, the least times for operations and bytes, and the idle time."""
    table, notes = _combine_runs(data, partial(_time_of, ceilings=data.ceilings))
    basis = (
        "times of unprofiled steps; least times for counted operations and for measured DRAM bytes "
        "at measured ceilings, two bounds that overlap; idle time by hardware counters"
    )
    if table.empty:
        nothing = Table("Time breakdown", [], [], tuple(notes))
        return Chart("time", basis, nothing) if notes else None
    steps = table[table.phase == STEP]
    bars = {part: steps[f"{part}_seconds"] for part in TIME_COLOURS if part != STEP}
    bars[STEP] = steps.seconds
    chart = figures.bar_chart(
        "time",
        "Time breakdown",
        basis,
        steps.assign(**bars, end=pd.DataFrame(bars).max(axis="columns"), label=""),
        TIME_COLOURS,
        "ms",
        unit="ms",
    )
    notes += [HOW_TO_READ, ABOUT_SHARES.format(data.baseline)]
    notes += [*launch_bound_notes(table), *lacking(table)]
    columns = _in_one_line({"phase": ("phase", str), **TIME_COLUMNS, **ADDED_COLUMNS})
    return replace(chart, table=Table.of(chart.table.title, table, {**NAMES, **columns}, notes))


def _time_of(
    summary: pd.DataFrame, device: str, run: Run, ceilings: Roofs | None
) -> PhasesAndRoofs | None:
    """Return the time breakdown, or None if the device has no step times or no DRAM bytes."""
    measured = {*summary[summary.device == device].metric}
    if not {"step_time_seconds", "dram_read_bytes"} <= measured:
        return None
    roofs = ceilings or find_ceilings(device)
    table = time_breakdown(summary, roofs)
    added = additional(table, run.baseline).assign(phase=STEP).drop(columns=[*AXES])
    return table.merge(added, "left", PLACE), roofs
