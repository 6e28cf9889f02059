"""Roofline by phase: measured time and bytes, counted operations, a named card's two roofs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pandas as pd
import plotly.graph_objects as go

from dpbench.case import AXES, OUTSIDE, PHASES
from dpbench.errors import ConfigurationError
from dpbench.results.cards import Roofs, find_card
from dpbench.results.groups import in_order
from dpbench.results.html import data
from dpbench.results.html.drawing import (
    Material,
    axis,
    cells,
    panel,
    trainer_axis,
    trainer_keys,
)
from dpbench.results.html.logical_chart import NEEDS_LOGICAL
from dpbench.results.html.palette import NEUTRAL, Style
from dpbench.results.html.parts import (
    CASE,
    GB,
    Chart,
    Column,
    DataTable,
    Key,
    Panel,
    lines,
    milliseconds,
)
from dpbench.results.html.source import Source, cell_label
from dpbench.results.roofline import MEASURED_BYTES, intensities, under
from dpbench.results.rows import STEP
from dpbench.results.tables import SHOWN_SHARE

TERA = 1e12
TITLE = "Roofline by phase"

LARGEST, SMALLEST = 15.0, 4.5
"""Diameters of the first trainer's marks and of the last's, px: they lie in one another."""

BAR = 13
"""Height of a bar among others, px."""


class _Mark(NamedTuple):
    """How a phase is drawn under a roof: plotly's symbol, and the same as text."""

    symbol: str
    glyph: str


_MARKS = {
    "forward": _Mark("circle", "○"),
    "backward": _Mark("square", "□"),
    "clip": _Mark("diamond", "◇"),
    "noise": _Mark("triangle-up", "△"),
    "optimizer": _Mark("triangle-down", "▽"),
    OUTSIDE: _Mark("star", "☆"),
}

MEASURED_CASE = ["run", *AXES, "device"]
"""What tells one measured case from another: two runs may have measured the same."""


def roofline(sources: Sequence[Source], material: Material) -> Chart:
    """Each phase under the roofs of the card that ran it; panels per cell of the grid."""
    drawn: list[pd.DataFrame] = []
    notes: list[str] = []
    roofs: dict[str, Roofs] = {}
    for run, device, frame in _with_operations(sources):
        try:
            roofs[device] = find_card(device).roofs()
            drawn.append(under(intensities(frame), roofs[device]).assign(run=run))
        except ConfigurationError as error:
            notes.append(f"{device}: {error}.")
    if not drawn:
        why = " ".join(dict.fromkeys(notes)) or _nothing(material.summary)
        return Chart("roofline", TITLE, missing=why)
    table = _shown(_titled(pd.concat(drawn, ignore_index=True), material.summary))
    window = _window(table[table.flops > 0], roofs)
    highest = float(table.share.max()) * 100
    panels = [
        part
        for what, batch, seq, rows in cells(table)
        for part in _panels(
            f"{what}, {cell_label(batch, seq)}", rows, roofs, material.look, window, highest
        )
    ]
    keys = [Key("■", key.text, key.colour) for key in trainer_keys(material.look, table.trainer)]
    placed = set(table.phase[table.flops > 0])
    keys += [Key(mark.glyph, name) for name, mark in _MARKS.items() if name in placed]
    used = {str(device): sorted(set(rows.precision)) for device, rows in table.groupby("device")}
    notes += [_roofs_in_words(roofs[name], precisions) for name, precisions in used.items()]
    notes.append(
        "A mark is a phase of a trainer; rings about one centre are trainers at the same place. "
        "Operations are those of matrix products and attention. Phases without any have no place "
        "on the first kind of panel; they are in the second and in the table."
    )
    premise = (
        "DRAM bytes by hardware counters, time by phase from an unprofiled process, floating-point "
        "operations counted without hardware"
    )
    return Chart("roofline", TITLE, premise, panels, keys, _as_table(table), list(notes))


def _nothing(summary: pd.DataFrame) -> str:
    if data.step_bytes(summary, data.DRAM).empty:
        return "No DRAM bytes were measured in these runs, so no phase has a place under a roof."
    return NEEDS_LOGICAL


def _with_operations(sources: Sequence[Source]) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """By run and device, the measured rows of cases whose operations some run has counted."""
    everything = pd.concat([source.frame for source in sources], ignore_index=True)
    counted = everything[(everything.instrument == "logical")]
    counted = counted.drop_duplicates([*AXES, "phase", "metric", "repeat"])
    cases = pd.MultiIndex.from_frame(counted[list(AXES)])
    for source in sources:
        measured = source.frame[source.frame.instrument != "logical"]
        for device, rows in measured.groupby("device", sort=False):
            both = rows[pd.MultiIndex.from_frame(rows[list(AXES)]).isin(cases)]
            both = both[
                _cases_with(both, "dram_read_bytes") & _cases_with(both, "step_time_seconds")
            ]
            if not both.empty:
                theirs = counted[cases.isin(pd.MultiIndex.from_frame(both[list(AXES)]))]
                yield source.label, str(device), pd.concat([both, theirs], ignore_index=True)


def _cases_with(rows: pd.DataFrame, metric: str) -> pd.Series[bool]:
    """Which rows belong to a case that has a metric."""
    cases = pd.MultiIndex.from_frame(rows[list(AXES)])
    having = pd.MultiIndex.from_frame(rows.loc[rows.metric == metric, list(AXES)])
    return pd.Series(cases.isin(having), index=rows.index)


def _titled(table: pd.DataFrame, summary: pd.DataFrame) -> pd.DataFrame:
    names = summary[summary.measured].drop_duplicates(MEASURED_CASE)
    return in_order(table.join(names.set_index(MEASURED_CASE).title, on=MEASURED_CASE))


def _shown(table: pd.DataFrame) -> pd.DataFrame:
    """Every phase of measured steps, and what lies outside if that takes enough to matter."""
    steps = table[table.phase == STEP].set_index(MEASURED_CASE).seconds
    share = table.seconds / table.join(steps.rename("whole"), on=MEASURED_CASE).whole
    shown = (table.bytes_are == MEASURED_BYTES) & (table.phase.isin(PHASES) | (share > SHOWN_SHARE))
    shown &= table.phase != STEP
    order = {name: place for place, name in enumerate((*PHASES, OUTSIDE))}
    return (
        table[shown].sort_values("phase", key=lambda c: c.map(order), kind="stable").pipe(in_order)
    )


def _roofs_in_words(roofs: Roofs, precisions: Sequence[str]) -> str:
    peaks = ", ".join(f"{GB(roofs.flops[p] / 1e3)} TFLOP/s at {p}" for p in precisions)
    return f"Roofs of {roofs.name}: {GB(roofs.bandwidth)} GB/s, {peaks} ({roofs.premise})."


@dataclass(frozen=True)
class _Window:
    """What all roofs are seen through: FLOP per byte, left to right; FLOP/s, low to high."""

    left: float
    right: float
    low: float
    high: float


def _window(placed: pd.DataFrame, cards: Mapping[str, Roofs]) -> _Window:
    """As much as the marks need, and the ridge and the peak of every roof above them."""
    ridges, peaks = [], []
    for (device, precision), _ in placed.groupby(["device", "precision"]):
        ridges.append(cards[str(device)].ridge(str(precision)))
        peaks.append(cards[str(device)].flops[str(precision)])
    left = min([*placed.intensity, *ridges], default=1.0) / 1.6
    right = max([*placed.intensity, *ridges], default=1.0) * 1.6
    low = min(placed.flops_per_second, default=TERA) / 2.5
    return _Window(left, right, low, max(peaks, default=TERA) * 1.6)


def _panels(
    title: str,
    rows: pd.DataFrame,
    cards: Mapping[str, Roofs],
    look: Mapping[str, Style],
    window: _Window,
    highest: float,
) -> list[Panel]:
    roofs = cards[rows.device.iloc[0]]
    placed = rows[rows.flops > 0]
    share = _shares(f"{title}: share of the roof", rows, look, highest)
    if placed.empty:
        return [share]
    return [_roof(title, placed, roofs, look, window), share]


def _roof(
    title: str, rows: pd.DataFrame, roofs: Roofs, look: Mapping[str, Style], window: _Window
) -> Panel:
    precision = str(rows.precision.iloc[0])
    peak, ridge = roofs.flops[precision], roofs.ridge(precision)
    roof = go.Scatter(
        x=[window.left, ridge, window.right],
        y=[roofs.bandwidth * window.left / TERA, peak / TERA, peak / TERA],
        mode="lines",
        line={"color": NEUTRAL, "width": 2.5},
        hoverinfo="skip",
    )
    said = {phase: _of_phase(str(phase), group) for phase, group in rows.groupby("phase")}
    trainers = [name for name in look if name in set(rows.trainer)]
    marks = []
    for place, name in enumerate(trainers):  # the largest first, so that none hides another
        group = rows[rows.trainer == name]
        marks.append(
            go.Scatter(
                x=group.intensity.tolist(),
                y=(group.flops_per_second / TERA).tolist(),
                mode="markers",
                marker={
                    "symbol": [f"{_MARKS[phase].symbol}-open" for phase in group.phase],
                    "size": LARGEST - (LARGEST - SMALLEST) * place / max(len(trainers) - 1, 1),
                    "color": look[name].colour,
                    "line": {"width": 1.5},
                },
                cliponaxis=False,
                hoverinfo="text",
                hovertext=[said[phase] for phase in group.phase],
            )
        )
    return panel(
        title,
        [roof, *marks],
        340,
        xaxis=axis(
            "FLOP (counted) per DRAM byte (measured)",
            type="log",
            range=[math.log10(window.left), math.log10(window.right)],
            dtick=1,
        ),
        yaxis=axis(
            "TFLOP/s",
            type="log",
            range=[math.log10(window.low / TERA), math.log10(window.high / TERA)],
            dtick=1,
        ),
    )


def _of_phase(phase: str, rows: pd.DataFrame) -> str:
    """What the marks of a phase say, a line a trainer: they may lie upon each other."""
    return lines(
        phase,
        *(
            f"{row['trainer']}: {row['intensity']:.1f} FLOP/B, "
            f"{row['flops_per_second'] / TERA:.1f} TFLOP/s, {row['share']:.0%} of the roof"
            for row in rows.to_dict("records")
        ),
    )


def _shares(title: str, rows: pd.DataFrame, look: Mapping[str, Style], highest: float) -> Panel:
    phases = [name for name in (*PHASES, OUTSIDE) if name in set(rows.phase)]
    trainers = [name for name in look if name in set(rows.trainer)]
    traces = []
    for name in trainers:
        group = rows[rows.trainer == name]
        traces.append(
            go.Bar(
                y=group.phase.tolist(),
                x=(group.share * 100).tolist(),
                orientation="h",
                name=name,
                marker={"color": look[name].colour},
                hoverinfo="text",
                hovertext=[
                    lines(
                        f"{name}, {row['phase']}: {row['share']:.0%} of the roof",
                        f"bound by {row['bound_by']}",
                        f"{milliseconds(row['seconds'])} ms, at least "
                        f"{milliseconds(row['least_seconds'])} ms",
                    )
                    for row in group.to_dict("records")
                ],
            )
        )
    return panel(
        title,
        traces,
        max(340, 58 + BAR * len(phases) * (len(trainers) + 1)),
        barmode="group",
        bargap=0.2,
        xaxis=axis("least possible time ÷ measured time, %", range=[0, max(100.0, highest)]),
        yaxis={**trainer_axis(phases), "categoryorder": "array", "categoryarray": phases},
    )


def _as_table(table: pd.DataFrame) -> DataTable:
    return DataTable.of(
        "Phases under the roofs: operations counted, bytes and time measured",
        table.assign(percent=table.share * 100),
        [
            *CASE,
            Column("phase", "phase"),
            Column("TFLOP (counted)", "flops", lambda v: GB(v / 1e3)),
            Column("DRAM GB (measured)", "bytes", GB),
            Column("FLOP/B", "intensity", "{:.1f}".format),
            Column("ms (measured)", "seconds", milliseconds),
            Column("least ms", "least_seconds", milliseconds),
            Column("bound by", "bound_by"),
            Column("% of roof", "percent", "{:.0f}".format),
        ],
    )
