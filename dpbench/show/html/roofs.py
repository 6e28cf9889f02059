"""The charts of phases under the roofs of their card: the roofline, and what time is made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from dpbench.errors import ConfigurationError
from dpbench.results.frame import CONFIGURATION
from dpbench.results.roofline import (
    LAUNCH_BOUND,
    MEASURED_BYTES,
    find_card,
    find_ceilings,
    phases,
    under,
)
from dpbench.results.rows import NO_HARDWARE, STEP, identity, summed
from dpbench.results.run import Run
from dpbench.results.times import account, additional
from dpbench.show.groups import ordered
from dpbench.show.html import figures
from dpbench.show.html.data import Material, titles
from dpbench.show.html.figures import NAMES, NEUTRAL, PHASE_STYLES, Chart, Json
from dpbench.show.kernels import ROOFLINE_COLUMNS, launch_bound_notes, roofs_in_words
from dpbench.show.layout import Shown, Table, step_milliseconds
from dpbench.show.tables import SHOWN_SHARE
from dpbench.show.times import ADDED_COLUMNS, HOW_TO_READ, TIME_COLUMNS, about_shares, lacking

TERA = 1e12


def roofline(material: Material) -> Chart | None:
    """Each phase under the roofs of the card that ran it; panels per cell of the grid."""
    table, refusals = _under_roofs(material)
    premise = (
        "DRAM bytes by hardware counters, time by phase from an unprofiled process, floating-point "
        "operations counted without hardware"
    )
    if table.empty:
        nothing = Table("Roofline by phase", [], [], tuple(refusals))
        return Chart("roofline", premise, nothing) if refusals else None
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
    cards = [
        roofs_in_words(find_card(str(device)), sorted(rows.precision))
        for device, rows in table.groupby("device", sort=False)
    ]
    how_to_read = (
        "A mark is a phase of a trainer; rings about one centre are trainers at the same place. "
        "Operations are those of matrix products and attention. Phases without any have no place "
        "here; how much of its roof each reaches is in the table."
    )
    notes = [*refusals, *cards, how_to_read, *launch_bound_notes(table)]
    as_text = Table.of("Roofline by phase", table, {**NAMES, **columns}, notes)
    return Chart("roofline", premise, as_text, panels, keys)


def _under_roofs(material: Material) -> tuple[pd.DataFrame, list[str]]:
    """The phases that take enough to matter under the roofs of their cards; why some have none."""
    tables, refusals = [], []
    for run, device, frame in _by_device(material):
        rows = phases(frame[frame.precision != ""]).dropna(subset="flops")
        rows = rows[rows.bytes_are == MEASURED_BYTES]
        if rows.empty:
            continue
        try:
            card = find_card(device)
        except ConfigurationError as error:
            refusals.append(f"{device}: {error}.")
            continue
        peak, ridge = rows.precision.map(card.flops) / TERA, rows.precision.map(card.ridge)
        tables.append(under(rows, card).assign(run=run.name, peak=peak, ridge=ridge))
    table = _that_matter(tables, material)
    if len(table):
        table = table[table.phase != STEP]
        table = table.assign(tflops_per_second=table.flops_per_second / TERA)
    return table, refusals


def _by_device(material: Material) -> Iterator[tuple[Run, str, pd.DataFrame]]:
    """Of each run what was measured on a device, beside what any run has counted."""
    everything = pd.concat([run.frame for run in material.runs], ignore_index=True)
    counted = everything[everything.device == NO_HARDWARE]
    counted = counted.drop_duplicates(identity())
    for run in material.runs:
        measured = run.frame[run.frame.device != NO_HARDWARE]
        for device, rows in measured.groupby("device", sort=False):
            yield run, str(device), pd.concat([rows, counted], ignore_index=True)


def _that_matter(tables: list[pd.DataFrame], material: Material) -> pd.DataFrame:
    """Phases that take enough of their step, in order, with the titles of their cells."""
    if not tables:
        return pd.DataFrame()
    table = pd.concat(tables, ignore_index=True)
    of_case = ["run", *summed("instrument", "metric", "phase")]
    whole = table.groupby(of_case).seconds.transform("max")
    table = table[table.seconds > SHOWN_SHARE * whole]
    table = table.assign(title=titles(table, material.summary))
    return ordered(table, [*CONFIGURATION, "device", "trainer", "phase"])


def _in_one_line(columns: Mapping[str, Shown]) -> dict[str, Shown]:
    return {header.replace("\n", " "): shown for header, shown in columns.items()}


def _marks_under(placed: pd.DataFrame, colours: Mapping[str, str]) -> list[Json]:
    """The roof, and a ring a phase, the first trainer's the largest, so that none hides another."""
    ridge, peak = placed.ridge.iloc[0], placed.peak.iloc[0]
    present = [name for name in colours if name in set(placed.trainer)]
    sizes = dict(zip(present, np.linspace(15, 4.5, len(present)), strict=True))
    shapes = {phase: style.symbol for phase, style in PHASE_STYLES.items()}
    ends = (placed.busy < LAUNCH_BOUND).map({True: "-open-dot", False: "-open"})
    said = {
        phase: figures.lines(phase, *map(_under, group.to_dict("records")))
        for phase, group in placed.groupby("phase")
    }  # a line a trainer: they may lie upon each other
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
            "opacity": 1,  # of several sizes plotly.js makes bubbles
        },
        "cliponaxis": False,
        "hoverinfo": "text",
        "hovertext": placed.phase.map(said).tolist(),
    }
    return [roof, rings]


def _under(row: Mapping[Any, Any]) -> str:
    speed = f"{row['intensity']:.1f} FLOP/B, {row['tflops_per_second']:.1f} TFLOP/s"
    return f"{row['trainer']}: {speed}, {row['share']:.0%} of the roof, {row['bound']}"


# --- what time is made of --------------------------------------------------------------------

TIME_COLOURS = {"arithmetic": "#0072B2", "bytes": "#E69F00", "idle": NEUTRAL}


def time(material: Material) -> Chart | None:
    """Of each step's time, the least for its arithmetic and for its bytes, and the idle part."""
    table, refusals, ceilings = _times(material)
    premise = (
        "times of steps that are not counted; the least time for counted operations and measured "
        "DRAM bytes at measured ceilings, two bounds, which overlap; idle by hardware counters"
    )
    if table.empty:
        nothing = Table("What time is made of", [], [], tuple(refusals))
        return Chart("time", premise, nothing) if refusals else None
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
    notes = [*refusals, *ceilings, HOW_TO_READ]
    notes += [about_shares(material.baseline), *launch_bound_notes(table), *lacking(table)]
    columns = _in_one_line({"phase": ("phase", str), **TIME_COLUMNS, **ADDED_COLUMNS})
    return replace(chart, table=Table.of(chart.table.title, table, {**NAMES, **columns}, notes))


def _times(material: Material) -> tuple[pd.DataFrame, list[str], list[str]]:
    """The account of all that was timed and counted; why some has none; the ceilings in words."""
    tables, refusals, ceilings = [], [], []
    for run, device, frame in _by_device(material):
        measured = frame[frame.device == device].metric
        if not {"step_time_seconds", "dram_read_bytes"} <= set(measured):
            continue
        try:
            roofs = material.ceilings or find_ceilings(device)
            table = account(frame, roofs)
        except ConfigurationError as error:
            refusals.append(f"{device}: {error}.")
            continue
        added = additional(table, run.baseline).assign(phase=STEP)
        table = table.merge(added, "left", summed("instrument", "metric"))
        tables.append(table.assign(run=run.name))
        ceilings.append(roofs_in_words(roofs, sorted(set(table.precision))))
    return _that_matter(tables, material), refusals, [*dict.fromkeys(ceilings)]
