"""The charts that compare phases with the roofs of their card: roofline and time breakdown."""

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
    find_card,
    find_ceilings,
    phases,
    under,
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


def roofline(material: PageData) -> Chart | None:
    """The share of its roof that each phase reaches, on the card that ran it."""
    table, notes = _accounts(material, _under_roofs)
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
        "Operations are those of matrix products and attention. A phase without operations has no "
        "bar; the table has these phases, too, with the roof of each and the share that it reaches."
    )
    notes += [how_to_read, *launch_bound_notes(table)]
    columns = _in_one_line({"phase": ("phase", str), **ROOFLINE_COLUMNS})
    return replace(chart, table=Table.of(chart.table.title, table, {**NAMES, **columns}, notes))


Account = tuple[pd.DataFrame, Roofs]
"""The phases of a run on one device, and the roofs that apply."""


def _under_roofs(summary: pd.DataFrame, device: str, run: Run) -> Account | None:
    """Phases with counted operations and measured bytes, compared with the roofs of their card."""
    rows = phases(summary[summary.precision != ""]).dropna(subset="flops")
    rows = rows[rows.bytes_are == MEASURED_BYTES]
    if rows.empty:
        return None
    card = find_card(device)
    return under(rows, card), card


def _accounts(
    material: PageData, account_of: Callable[[pd.DataFrame, str, Run], Account | None]
) -> tuple[pd.DataFrame, list[str]]:
    """The accounts of all runs and devices. Each also uses the counted numbers of all runs.

    Returns:
        The phases that take more than `SHOWN_SHARE` of their step's time, in order, with the titles
        of their cells; and notes, which say why a device has no account and name the roofs of the
        others.
    """
    tables, refusals, roofs_said = [], [], []
    everything = pd.concat([run.summary for run in material.runs], ignore_index=True)
    counted = everything[everything.device == NO_HARDWARE].drop_duplicates(NUMBER)
    for run in material.runs:
        measured = run.summary[run.summary.device != NO_HARDWARE]
        for device, rows in measured.groupby("device", sort=False):
            together = pd.concat([rows, counted], ignore_index=True)
            try:
                found = account_of(together, str(device), run)
            except ConfigurationError as error:
                refusals.append(f"{device}: {error}.")
                continue
            if found:
                table, roofs = found
                tables.append(table.assign(run=run.name))
                roofs_said.append(roofs_in_words(roofs, sorted(set(table.precision))))
    if not tables:
        return pd.DataFrame(), refusals
    table = pd.concat(tables, ignore_index=True)
    longest = table.groupby(["run", *OF_CASE], sort=False).seconds.transform("max")
    table = table[table.seconds > SHOWN_SHARE * longest]
    table = table.assign(title=titles(table, material.summary))
    table = ordered(table, [*CONFIGURATION, "device", "trainer", "phase"])
    return table, [*refusals, *dict.fromkeys(roofs_said if len(table) else ())]


def _in_one_line(columns: Mapping[str, Shown]) -> dict[str, Shown]:
    return {header.replace("\n", " "): shown for header, shown in columns.items()}


# --- time breakdown --------------------------------------------------------------------------

TIME_COLOURS = {
    "step": "#7F8790",
    "arithmetic": "#0072B2",
    "bytes": "#E69F00",
    "idle": "#CC79A7",
}


def time(material: PageData) -> Chart | None:
    """The time of each step, the least times for its arithmetic and bytes, and its idle time."""
    table, notes = _accounts(material, partial(_time_of, ceilings=material.ceilings))
    basis = (
        "times of unprofiled steps; least times for counted operations and for measured DRAM bytes "
        "at measured ceilings, two bounds that overlap; idle time by hardware counters"
    )
    if table.empty:
        nothing = Table("What time is made of", [], [], tuple(notes))
        return Chart("time", basis, nothing) if notes else None
    steps = table[table.phase == STEP]
    bars = {part: steps[f"{part}_seconds"] for part in TIME_COLOURS if part != STEP}
    bars[STEP] = steps.seconds
    chart = figures.bar_chart(
        "time",
        "What time is made of",
        basis,
        steps.assign(**bars, end=pd.DataFrame(bars).max(axis="columns"), label=""),
        TIME_COLOURS,
        "ms",
        unit="ms",
    )
    notes += [HOW_TO_READ, ABOUT_SHARES.format(material.baseline)]
    notes += [*launch_bound_notes(table), *lacking(table)]
    columns = _in_one_line({"phase": ("phase", str), **TIME_COLUMNS, **ADDED_COLUMNS})
    return replace(chart, table=Table.of(chart.table.title, table, {**NAMES, **columns}, notes))


def _time_of(
    summary: pd.DataFrame, device: str, run: Run, ceilings: Roofs | None
) -> Account | None:
    """The time breakdown of steps that were timed, and whose DRAM bytes were measured."""
    measured = {*summary[summary.device == device].metric}
    if not {"step_time_seconds", "dram_read_bytes"} <= measured:
        return None
    roofs = ceilings or find_ceilings(device)
    table = time_breakdown(summary, roofs)
    added = additional(table, run.baseline).assign(phase=STEP).drop(columns=[*AXES])
    return table.merge(added, "left", PLACE), roofs
