"""Ratios to standard training: over the grid, and along each of its axes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from dpbench.case import BASELINE_TRAINER
from dpbench.metrics import EXPECTED_BY, METRICS
from dpbench.show.html import data
from dpbench.show.html.data import Basis
from dpbench.show.html.drawing import Material, axis, level, panel, trainer_keys, trainer_trace
from dpbench.show.html.palette import NEUTRAL
from dpbench.show.html.parts import CASE, Chart, DataTable, Key, Panel, lines, times
from dpbench.show.html.source import cell_label, fate


def ratio_map(material: Material) -> Chart:
    """Ratio to the baseline over the grid; one panel per configuration and trainer."""
    summary, failed, basis = material.summary, material.failed, material.basis
    ratios = data.ratios(summary, basis)
    title = f"{basis.name} as a multiple of standard training, over the grid"
    if ratios.empty:
        return Chart("map", title, missing=_no_ratio(summary, basis))
    everywhere = pd.concat([ratios, failed[failed.trainer != BASELINE_TRAINER]], ignore_index=True)
    low, high = min(1.0, ratios.ratio.min()), max(ratios.ratio.max(), 1.01)
    panels = [
        _heat(f"{trainer}, {what}", rows, (low, high))
        for (what, trainer), rows in everywhere.groupby(["title", "trainer"], sort=False)
        if len(rows[["batch_size", "seq_len"]].drop_duplicates()) > 1
    ]
    if not panels:
        why = "No trainer was measured in more than one cell: its ratio stands at its bar above."
        return Chart("map", title, missing=why)
    notes = [
        f"One colour scale for all panels, from {times(low)} (dark) to {times(high)} (bright).",
        *_expected(basis),
        *data.cautions(summary, basis),
    ]
    what = f"{basis.name} ÷ those of {BASELINE_TRAINER} in the same run and cell ({basis.premise})"
    table = _ratio_table(what, ratios, basis)
    return Chart("map", title, basis.premise, panels, [], table, notes, width=270)


def _ratio_table(caption: str, ratios: pd.DataFrame, basis: Basis) -> DataTable:
    return DataTable.of(caption, ratios, {**CASE, "ratio": f"{basis.name} ÷ standard"})


def _no_ratio(summary: pd.DataFrame, basis: Basis) -> str:
    trainers = set(data.step_bytes(summary, basis).trainer)
    if not trainers:
        return "No bytes were measured or counted."
    if BASELINE_TRAINER not in trainers:
        return f"No ratio: the {BASELINE_TRAINER!r} trainer was not measured in these runs."
    if trainers == {BASELINE_TRAINER}:
        return f"No ratio: only the {BASELINE_TRAINER!r} trainer was measured."
    return f"No ratio: no run has a trainer and {BASELINE_TRAINER!r} in the same cell."


def _expected(basis: Basis) -> list[str]:
    if basis.metric not in METRICS.expected():
        return []
    low, high = METRICS.expected()[basis.metric]
    return [f"{EXPECTED_BY.capitalize()}: {low:g} to {high:g} times the standard's bytes."]


def _heat(title: str, rows: pd.DataFrame, limits: tuple[float, float]) -> Panel:
    across, down = sorted(set(rows.seq_len)), sorted(set(rows.batch_size))
    at = {(row["batch_size"], row["seq_len"]): row for row in rows.to_dict("records")}
    ratio = {place: row["ratio"] for place, row in at.items() if pd.notna(row["ratio"])}
    trace = go.Heatmap(
        z=[[ratio.get((batch, seq)) for seq in across] for batch in down],
        x=[str(seq) for seq in across],
        y=[str(batch) for batch in down],
        texttemplate="%{z:.2f}×",
        colorscale="Cividis",
        zmin=limits[0],
        zmax=limits[1],
        showscale=False,
        xgap=3,
        ygap=3,
        hoverongaps=False,
        hoverinfo="text",
        hovertext=[
            [
                lines(cell_label(batch, seq), times(ratio.get((batch, seq), math.nan)))
                for seq in across
            ]
            for batch in down
        ],
    )
    empty = [
        # By place: "256" would be the 256th category.
        {"x": column, "y": line, "showarrow": False, "text": _fate_of(at.get((batch, seq)))}
        for line, batch in enumerate(down)
        for column, seq in enumerate(across)
        if (batch, seq) not in ratio
    ]
    return panel(
        title,
        [trace],
        72 + 52 * len(down),
        annotations=empty,
        xaxis=axis("sequence length, tokens", type="category", showgrid=False),
        yaxis=axis("batch", type="category", showgrid=False),
    )


def _fate_of(case: Mapping[Any, Any] | None) -> str:
    """What stands in a cell without a ratio."""
    return fate(case["error"]) if case else "–"


def ratio_along(material: Material, along: str) -> Chart:
    """How the ratio goes with one axis of the grid, the other one fixed in each panel."""
    what, unit, other = {
        "seq_len": ("sequence length", "tokens", "batch"),
        "batch_size": ("batch size", "examples", "sequence"),
    }[along]
    title = f"How the ratio goes with {what}"
    summary, basis = material.summary, material.basis
    ratios = data.ratios(summary, basis)
    if ratios.empty:
        return Chart(along, title, missing=_no_ratio(summary, basis))
    series = list(data.series(ratios, along))
    if not series:
        why = f"No trainer has a ratio at more than one {what} (all else equal)."
        return Chart(along, title, missing=why)
    drawn = pd.concat([rows for _, _, rows in series])
    top = max(float(ratios.ratio.max()) * 1.1, 1.5)
    axes = {
        "xaxis": _doubling_axis(f"{what}, {unit}", sorted(set(drawn[along]))),
        "yaxis": axis(f"{basis.name} ÷ standard", range=[0, top]),
        "shapes": [level(1, NEUTRAL, "dot"), *_expected_range(basis, top)],
    }
    panels = [
        panel(f"{config}, {other} {value}", _lines(rows, along, what, material), 300, **axes)
        for config, value, rows in series
    ]
    caption = f"{basis.name} ÷ those of {BASELINE_TRAINER}, by {what} ({basis.premise})"
    keys = [*trainer_keys(material.look, ratios.trainer), Key("┄", f"{BASELINE_TRAINER} = 1")]
    if basis.metric in METRICS.expected():
        keys.append(Key("▒", "expected range", NEUTRAL))
    table, notes = _ratio_table(caption, drawn, basis), data.cautions(summary, basis)
    return Chart(along, title, basis.premise, panels, keys, table, notes, width=340)


def _doubling_axis(title: str, points: list[int]) -> dict[str, Any]:
    """The axis that all panels share: doubling is a step of one length."""
    margin = 0.06 * math.log10(points[-1] / points[0])
    return axis(
        title,
        type="log",
        range=[math.log10(points[0]) - margin, math.log10(points[-1]) + margin],
        tickvals=points,
        ticktext=[str(point) for point in points],
    )


def _expected_range(basis: Basis, top: float) -> list[dict[str, Any]]:
    """A grey band where ratios were expected."""
    if basis.metric not in METRICS.expected():
        return []
    low, high = METRICS.expected()[basis.metric]
    band = {"type": "rect", "xref": "paper", "x0": 0, "x1": 1, "y0": low, "y1": min(high, top)}
    return [{**band, "fillcolor": NEUTRAL, "opacity": 0.14, "line": {"width": 0}, "layer": "below"}]


def _lines(rows: pd.DataFrame, along: str, what: str, material: Material) -> list[Any]:
    traces = []
    for name, group in rows.groupby("trainer", sort=False):
        points = list(zip(group[along].tolist(), group.ratio.tolist(), strict=True))
        said = [lines(name, f"{what} {x}", times(y)) for x, y in points]
        across, up = zip(*points, strict=True)
        traces.append(trainer_trace(across, up, material.look[str(name)], 2.5, 10, said))
    return traces
