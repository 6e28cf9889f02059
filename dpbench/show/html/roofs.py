"""The charts of phases under the roofs of their card: roofline and time breakdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from dpbench.core.case import AXES
from dpbench.core.errors import ConfigurationError
from dpbench.results.roofline import (
    LAUNCH_BOUND,
    MEASURED_BYTES,
    Roofs,
    find_card,
    find_ceilings,
    phases,
    under,
)
from dpbench.results.rows import NO_HARDWARE, NUMBER, OF_CASE, PLACE, STEP
from dpbench.results.run import Run
from dpbench.results.times import account, additional
from dpbench.show.groups import CONFIGURATION, ordered
from dpbench.show.html import figures
from dpbench.show.html.data import PageData, titles
from dpbench.show.html.figures import NAMES, NEUTRAL, PHASE_STYLES, Chart, Json
from dpbench.show.kernels import ROOFLINE_COLUMNS, launch_bound_notes, roofs_in_words
from dpbench.show.layout import Shown, Table, step_milliseconds
from dpbench.show.tables import SHOWN_SHARE
from dpbench.show.times import ABOUT_SHARES, ADDED_COLUMNS, HOW_TO_READ, TIME_COLUMNS, lacking

TERA = 1e12


def roofline(material: PageData) -> Chart | None:
    """Each phase under the roofs of the card that ran it; panels per cell of the grid."""
    table, notes = _accounts(material, _under_roofs)
    premise = (
        "DRAM bytes by hardware counters, time by phase from an unprofiled process, floating-point "
        "operations counted without hardware"
    )
    if table.empty:
        nothing = Table("Roofline by phase", [], [], tuple(notes))
        return Chart("roofline", premise, nothing) if notes else None
    table = table[table.phase != STEP]
    placed = table[table.flops > 0]
    layout = {
        "height": 340,
        "xaxis": figures.log_axis(
            "FLOP (counted) per DRAM byte (measured)", [*placed.intensity, *placed.ridge]
        ),
        "yaxis": figures.log_axis("TFLOP/s", [*placed.tflops_per_second, *placed.peak]),
    }
    colours = figures.trainer_colours(table.trainer)
    panels = {
        cell: {"data": _marks_under(rows, colours), "layout": layout}
        for cell, rows in figures.cells(placed)
    }
    keys = figures.squares(colours)
    keys += [(s.glyph, n, "inherit") for n, s in PHASE_STYLES.items() if n in set(placed.phase)]
    if (placed.busy < LAUNCH_BOUND).any():
        waits = f"in a mark: launch-bound, GPU busy below {LAUNCH_BOUND:.0%}"
        keys.append(("·", waits, "inherit"))
    columns = _in_one_line({"phase": ("phase", str), **ROOFLINE_COLUMNS})
    how_to_read = (
        "A mark is a phase of a trainer; rings about one centre are trainers at the same place. "
        "Operations are those of matrix products and attention. Phases without any have no place "
        "here; how much of its roof each reaches is in the table."
    )
    notes += [how_to_read, *launch_bound_notes(table)]
    as_text = Table.of("Roofline by phase", table, {**NAMES, **columns}, notes)
    return Chart("roofline", premise, as_text, panels, keys)


Account = tuple[pd.DataFrame, Roofs]
"""The phases of a run on one device, and the roofs that apply."""


def _under_roofs(summary: pd.DataFrame, device: str, run: Run) -> Account | None:
    """Phases with counted operations and measured bytes under the roofs of their card."""
    rows = phases(summary[summary.precision != ""]).dropna(subset="flops")
    rows = rows[rows.bytes_are == MEASURED_BYTES]
    if rows.empty:
        return None
    card = find_card(device)
    table = under(rows, card)
    return table.assign(
        peak=table.precision.map(card.flops) / TERA,
        ridge=table.precision.map(card.ridge),
        tflops_per_second=table.flops_per_second / TERA,
    ), card


def _accounts(
    material: PageData, account_of: Callable[[pd.DataFrame, str, Run], Account | None]
) -> tuple[pd.DataFrame, list[str]]:
    """An account of each run and device, beside what any run has counted.

    Returns:
        The phases that take enough of their step to matter, in order, with the titles of their
        cells; and notes: why a device has no account, and the roofs of the others.
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


def _marks_under(placed: pd.DataFrame, colours: Mapping[str, str]) -> list[Json]:
    """The roof, and a ring for each phase; trainers have rings of different sizes."""
    ridge, peak = placed.ridge.iloc[0], placed.peak.iloc[0]
    present = [name for name in colours if name in set(placed.trainer)]
    sizes = dict(zip(present, np.linspace(15, 4.5, len(present)), strict=True))
    shapes = {phase: style.symbol for phase, style in PHASE_STYLES.items()}
    ends = (placed.busy < LAUNCH_BOUND).map({True: "-open-dot", False: "-open"})
    said = {
        phase: figures.lines(phase, *map(_under, group.to_dict("records")))
        for phase, group in placed.groupby("phase")
    }  # one line per trainer: they may overlap
    x, y = [ridge * 1e-6, ridge, ridge * 1e6], [peak * 1e-6, peak, peak]
    line = {"color": NEUTRAL, "width": 2.5}
    roof = {"type": "scatter", "mode": "lines", "x": x, "y": y, "line": line, "hoverinfo": "skip"}
    rings = {
        "type": "scatter",
        "mode": "markers",
        "x": placed.intensity.tolist(),
        "y": placed.tflops_per_second.tolist(),
        "marker": {
            "symbol": (placed.phase.map(shapes) + ends).tolist(),
            "size": placed.trainer.map(sizes).tolist(),
            "color": placed.trainer.map(colours).tolist(),
            "line": {"width": 1.5},
            "opacity": 1,  # several sizes would make plotly.js draw bubbles
        },
        "cliponaxis": False,
        "hoverinfo": "text",
        "hovertext": placed.phase.map(said).tolist(),
    }
    return [roof, rings]


def _under(row: Mapping[Any, Any]) -> str:
    speed = f"{row['intensity']:.1f} FLOP/B, {row['tflops_per_second']:.1f} TFLOP/s"
    return f"{row['trainer']}: {speed}, {row['share']:.0%} of the roof, {row['bound']}"


# --- time breakdown --------------------------------------------------------------------------

TIME_COLOURS = {"arithmetic": "#0072B2", "bytes": "#E69F00", "idle": NEUTRAL}


def time(material: PageData) -> Chart | None:
    """Each step's least time for its arithmetic and for its bytes, and its idle time."""
    table, notes = _accounts(material, partial(_time_of, ceilings=material.ceilings))
    premise = (
        "times of steps that are not counted; the least time for counted operations and measured "
        "DRAM bytes at measured ceilings, two bounds, which overlap; idle by hardware counters"
    )
    if table.empty:
        nothing = Table("What time is made of", [], [], tuple(notes))
        return Chart("time", premise, nothing) if notes else None
    steps = table[table.phase == STEP]
    bars = {part: steps[f"{part}_seconds"] / steps.seconds for part in TIME_COLOURS}
    waits = (steps.busy < LAUNCH_BOUND).map({True: ", launch-bound", False: ""})
    labels = " " + steps.seconds.map(step_milliseconds) + " ms" + waits
    chart = figures.bar_chart(
        "time",
        "What time is made of",
        premise,
        steps.assign(**bars, end=pd.DataFrame(bars).max(axis="columns"), label=labels),
        TIME_COLOURS,
        "% of the step's time",
        unit="%",
    )
    notes += [HOW_TO_READ, ABOUT_SHARES.format(material.baseline)]
    notes += [*launch_bound_notes(table), *lacking(table)]
    columns = _in_one_line({"phase": ("phase", str), **TIME_COLUMNS, **ADDED_COLUMNS})
    return replace(chart, table=Table.of(chart.table.title, table, {**NAMES, **columns}, notes))


def _time_of(
    summary: pd.DataFrame, device: str, run: Run, ceilings: Roofs | None
) -> Account | None:
    """The time breakdown of steps that were timed and whose DRAM bytes were counted."""
    measured = {*summary[summary.device == device].metric}
    if not {"step_time_seconds", "dram_read_bytes"} <= measured:
        return None
    roofs = ceilings or find_ceilings(device)
    table = account(summary, roofs)
    added = additional(table, run.baseline).assign(phase=STEP).drop(columns=[*AXES])
    return table.merge(added, "left", PLACE), roofs
