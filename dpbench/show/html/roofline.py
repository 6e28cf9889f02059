"""The roofline by phase, from measured bytes and times and from counted operations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from dpbench.case import ALL_PHASES, AXES, PHASES
from dpbench.errors import ConfigurationError
from dpbench.results.roofline import MEASURED_BYTES, Roofs, find_card, intensities, under
from dpbench.results.rows import STEP
from dpbench.show.html import figures
from dpbench.show.html.data import (
    CASE,
    DRAM,
    NEEDS_LOGICAL,
    UNMEASURED,
    Material,
    has_case_of,
)
from dpbench.show.html.figures import NEUTRAL, PHASE_STYLES, Chart, Json, Key, Style, milliseconds
from dpbench.show.layout import Shown, Table, gigabytes
from dpbench.show.tables import SHOWN_SHARE, in_order

TERA = 1e12


def roofline(material: Material) -> Chart:
    """Each phase under the roofs of the card that ran it; panels per cell of the grid."""
    title = "Roofline by phase"
    drawn: list[pd.DataFrame] = []
    refusals: list[str] = []
    cards: dict[str, Roofs] = {}
    for run, device, frame in _with_operations(material):
        try:
            card = cards[device] = find_card(device)
            rows = under(intensities(frame), card).assign(run=run)
            ridges = [card.ridge(precision) for precision in rows.precision]
            drawn.append(rows.assign(peak=rows.precision.map(card.flops), ridge=ridges))
        except ConfigurationError as error:
            refusals.append(f"{device}: {error}.")
    if not drawn:
        why = " ".join(dict.fromkeys(refusals)) or NEEDS_LOGICAL
        if not refusals and material.step_bytes(DRAM).empty:
            why = "No DRAM bytes were measured in these runs, so no phase has a place under a roof."
        return Chart("roofline", title, missing=why)
    table = _phases_to_show(pd.concat(drawn, ignore_index=True), material.summary)
    placed = table[table.flops > 0]
    speeds = [*placed.flops_per_second / TERA, *placed.peak / TERA]
    layout = {
        "xaxis": _log_axis(
            "FLOP (counted) per DRAM byte (measured)", [*placed.intensity, *placed.ridge]
        ),
        "yaxis": _log_axis("TFLOP/s", speeds),
    }
    panels = [
        figures.panel(what, [*_marks_under(rows, material.look)], 340, **layout)
        for what, rows in figures.cells(placed)
    ]
    keys = [Key("■", key.text, key.colour) for key in material.keys(table.trainer)]
    keys += [Key(s.glyph, name) for name, s in PHASE_STYLES.items() if name in set(placed.phase)]
    used = []
    for device, card in cards.items():
        precisions = sorted(set(table.precision[table.device == device]))
        peaks = [f"{_in_tera(card.flops[name])} TFLOP/s at {name}" for name in precisions]
        roof = ", ".join([f"{gigabytes(card.bandwidth)} GB/s", *peaks])
        used += [f"Roofs of {card.name}: {roof} ({card.premise})."] if peaks else []
    columns: dict[str, Shown] = {
        "phase": ("phase", str),
        "TFLOP (counted)": ("flops", _in_tera),
        "DRAM GB (measured)": ("bytes", gigabytes),
        "FLOP/B": ("intensity", "{:.1f}".format),
        "ms (measured)": ("seconds", milliseconds),
        "least ms": ("least_seconds", milliseconds),
        "bound by": ("bound_by", str),
        "% of roof": ("percent", "{:.0f}".format),
    }
    as_text = Table.of(
        "Phases under the roofs: operations counted, bytes and time measured",
        table.assign(percent=table.share * 100),
        {**CASE, **columns},
    )
    premise = (
        "DRAM bytes by hardware counters, time by phase from an unprofiled process, floating-point "
        "operations counted without hardware"
    )
    how_to_read = (
        "A mark is a phase of a trainer; rings about one centre are trainers at the same place. "
        "Operations are those of matrix products and attention. Phases without any have no place "
        "here; how much of its roof every phase reaches is in the table."
    )
    notes = [*refusals, *used, how_to_read]
    return Chart("roofline", title, premise, panels, keys, as_text, notes)


def _in_tera(value: float) -> str:
    return gigabytes(value / 1e3)


def _with_operations(material: Material) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """By run and device, the measured rows of cases whose operations some run has counted."""
    everything = pd.concat([source.frame for source in material.sources], ignore_index=True)
    counted = everything[everything.instrument == UNMEASURED]
    counted = counted.drop_duplicates([*AXES, "phase", "metric", "repeat"])
    for source in material.sources:
        measured = source.frame[source.frame.instrument != UNMEASURED]
        for device, rows in measured.groupby("device", sort=False):
            complete = has_case_of(rows, counted)
            for metric in ("dram_read_bytes", "step_time_seconds"):
                complete &= has_case_of(rows, rows[rows.metric == metric])
            if complete.any():
                theirs = counted[has_case_of(counted, rows[complete])]
                both = pd.concat([rows[complete], theirs], ignore_index=True)
                yield source.label, str(device), both


def _phases_to_show(table: pd.DataFrame, summary: pd.DataFrame) -> pd.DataFrame:
    """Every phase of measured steps, and what lies outside if that takes enough to matter."""
    case = ["run", *AXES, "device"]  # two runs may have measured the same
    titles = summary[summary.measured].drop_duplicates(case).set_index(case).title
    steps = table[table.phase == STEP].set_index(case).seconds
    table = table.join(titles, on=case).join(steps.rename("whole"), on=case)
    matters = table.phase.isin(PHASES) | (table.seconds / table.whole > SHOWN_SHARE)
    table = table[(table.bytes_are == MEASURED_BYTES) & matters & (table.phase != STEP)]
    order = {name: place for place, name in enumerate(ALL_PHASES)}
    return in_order(table.sort_values("phase", key=lambda c: c.map(order), kind="stable"))


def _log_axis(title: str, seen: list[float]) -> Json:
    """As much as the marks and the roofs need; one scale for all panels."""
    ends = [math.log10(min(seen, default=1.0) / 1.6), math.log10(max(seen, default=1.0) * 1.6)]
    return figures.axis(title, type="log", range=ends, dtick=1)


def _marks_under(placed: pd.DataFrame, look: Mapping[str, Style]) -> Iterator[Json]:
    """The roof, and a ring a phase, the first trainer's the largest, so that none hides another."""
    ridge, peak = placed.ridge.iloc[0], placed.peak.iloc[0] / TERA
    x, y = np.array([1e-6, 1, 1e6]) * ridge, np.array([1e-6, 1, 1]) * peak
    line = {"color": NEUTRAL, "width": 2.5}
    roof = {"type": "scatter", "mode": "lines", "x": x.tolist(), "y": y.tolist(), "line": line}
    yield {**roof, "hoverinfo": "skip"}
    said = {
        phase: figures.lines(phase, *map(_under, group.to_dict("records")))
        for phase, group in placed.groupby("phase")
    }  # a line a trainer: they may lie upon each other
    present = [name for name in look if name in set(placed.trainer)]
    for name, size in zip(present, np.linspace(15, 4.5, len(present)), strict=True):
        group = placed[placed.trainer == name]
        marker = {
            "symbol": [f"{PHASE_STYLES[phase].symbol}-open" for phase in group.phase],
            "size": float(size),
            "color": look[name].colour,
            "line": {"width": 1.5},
        }
        speeds = (group.flops_per_second / TERA).tolist()
        yield figures.marks(
            group.intensity.tolist(), speeds, marker, [said[p] for p in group.phase]
        )


def _under(row: Mapping[Any, Any]) -> str:
    speed = f"{row['intensity']:.1f} FLOP/B, {row['flops_per_second'] / TERA:.1f} TFLOP/s"
    return f"{row['trainer']}: {speed}, {row['share']:.0%} of the roof"
