"""The roofline: phases under the roofs of the card that ran them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from dpbench.errors import ConfigurationError
from dpbench.results.frame import CONFIGURATION
from dpbench.results.roofline import (
    LAUNCH_BOUND,
    MEASURED_BYTES,
    find_card,
    phases,
    under,
)
from dpbench.results.rows import NO_HARDWARE, STEP, identity, summed
from dpbench.show.groups import ordered
from dpbench.show.html import figures
from dpbench.show.html.data import Material, titles
from dpbench.show.html.figures import NAMES, NEUTRAL, PHASE_STYLES, Chart, Json
from dpbench.show.kernels import ROOFLINE_COLUMNS, launch_bound_notes, roofs_in_words
from dpbench.show.layout import Shown, Table
from dpbench.show.tables import SHOWN_SHARE

TERA = 1e12


def roofline(material: Material) -> Chart | None:
    """Each phase under the roofs of the card that ran it; panels per cell of the grid."""
    table, notes = _under_roofs(material)
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
    columns: dict[str, Shown] = {"phase": ("phase", str)}
    columns |= {header.replace("\n", " "): shown for header, shown in ROOFLINE_COLUMNS.items()}
    how_to_read = (
        "A mark is a phase of a trainer; rings about one centre are trainers at the same place. "
        "Operations are those of matrix products and attention. Phases without any have no place "
        "here; how much of its roof each reaches is in the table."
    )
    notes += [how_to_read, *launch_bound_notes(table)]
    as_text = Table.of("Roofline by phase", table, {**NAMES, **columns}, notes)
    return Chart("roofline", premise, as_text, panels, keys)


def _under_roofs(material: Material) -> tuple[pd.DataFrame, list[str]]:
    """Phases with counted operations and measured bytes, each device's under its card's roofs.

    Operations are those that any of the runs has counted.

    Returns:
        The phases that take enough of their step to matter, in order, with the titles of their
        cells; and notes: why a device has no roofs, and the roofs of the others.
    """
    tables, refusals, said = [], [], []
    everything = pd.concat([run.frame for run in material.runs], ignore_index=True)
    counted = everything[everything.device == NO_HARDWARE].drop_duplicates(identity())
    for run in material.runs:
        measured = run.frame[run.frame.device != NO_HARDWARE]
        for device, rows in measured.groupby("device", sort=False):
            frame = pd.concat([rows, counted], ignore_index=True)
            placed = phases(frame[frame.precision != ""]).dropna(subset="flops")
            placed = placed[placed.bytes_are == MEASURED_BYTES]
            if placed.empty:
                continue
            try:
                card = find_card(str(device))
            except ConfigurationError as error:
                refusals.append(f"{device}: {error}.")
                continue
            tables.append(
                under(placed, card).assign(
                    run=run.name,
                    peak=placed.precision.map(card.flops) / TERA,
                    ridge=placed.precision.map(card.ridge),
                )
            )
            said.append(roofs_in_words(card, sorted(set(placed.precision))))
    if not tables:
        return pd.DataFrame(), refusals
    table = pd.concat(tables, ignore_index=True)
    table["tflops_per_second"] = table.flops_per_second / TERA
    of_case = ["run", *summed("instrument", "metric", "phase")]
    table = table[table.seconds > SHOWN_SHARE * table.groupby(of_case).seconds.transform("max")]
    table = table.assign(title=titles(table, material.summary))
    table = ordered(table, [*CONFIGURATION, "device", "trainer", "phase"])
    return table, [*refusals, *dict.fromkeys(said if len(table) else ())]


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
