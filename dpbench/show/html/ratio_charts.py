"""Ratios to standard training: over the grid, and along each of its axes."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from dpbench.case import BASELINE_TRAINER
from dpbench.metrics import EXPECTED_BY, METRICS
from dpbench.show.html import data
from dpbench.show.html.data import Basis
from dpbench.show.html.drawing import Material, axis, panel, trainer_keys
from dpbench.show.html.palette import NEUTRAL
from dpbench.show.html.parts import (
    CASE,
    Chart,
    Column,
    DataTable,
    Key,
    Panel,
    lines,
    times,
)
from dpbench.show.html.source import cell_label, fate


def ratio_map(material: Material) -> Chart:
    """Ratio to the baseline over the grid; one panel per configuration and trainer."""
    summary, failed, basis = material.summary, material.failed, material.basis
    found = data.ratios(summary, basis)
    title = f"{basis.name} as a multiple of standard training, over the grid"
    if found.empty:
        return Chart("map", title, missing=_no_ratio(summary, basis))
    everywhere = pd.concat([found, failed[failed.trainer != BASELINE_TRAINER]], ignore_index=True)
    low, high = min(1.0, found.ratio.min()), max(found.ratio.max(), 1.01)
    panels = [
        _heat(f"{trainer}, {what}", rows, (low, high))
        for (what, trainer), rows in everywhere.groupby(["title", "trainer"], sort=False)
    ]
    table = DataTable.of(
        f"{basis.name} ÷ those of {BASELINE_TRAINER} in the same run and cell ({basis.premise})",
        found,
        [*CASE, Column(f"{basis.name} ÷ standard", "ratio", times)],
    )
    notes = [
        f"One colour scale for all panels, from {times(low)} (dark) to {times(high)} (bright).",
        *_expected(basis),
        *data.cautions(summary, basis),
    ]
    return Chart("map", title, basis.premise, panels, [], table, notes, width=270)


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
    grid = [[ratio.get((batch, seq)) for seq in across] for batch in down]
    trace = go.Heatmap(
        z=grid,
        x=[str(seq) for seq in across],
        y=[str(batch) for batch in down],
        text=[["" if value is None else times(value) for value in line] for line in grid],
        texttemplate="%{text}",
        colorscale="Cividis",
        zmin=limits[0],
        zmax=limits[1],
        showscale=False,
        xgap=3,
        ygap=3,
        hoverinfo="text",
        hovertext=[
            [
                lines(cell_label(batch, seq), times(ratio.get((batch, seq), float("nan"))))
                for seq in across
            ]
            for batch in down
        ],
    )
    empty = [
        {
            "x": across.index(seq),  # a place: "256" would be the 256th category
            "y": down.index(batch),
            "showarrow": False,
            "text": fate(at[batch, seq]["error"]) if (batch, seq) in at else "–",
        }
        for batch in down
        for seq in across
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


def ratio_along(material: Material, along: str) -> Chart:
    """How the ratio goes with one axis of the grid, the other one fixed in each panel."""
    what, unit, other = {
        "seq_len": ("sequence length", "sequence length, tokens", "batch"),
        "batch_size": ("batch size", "batch size, examples", "sequence"),
    }[along]
    title = f"How the ratio goes with {what}"
    summary, basis = material.summary, material.basis
    found = data.ratios(summary, basis)
    if found.empty:
        return Chart(along, title, missing=_no_ratio(summary, basis))
    all_series = list(data.series(found, along))
    if not all_series:
        return Chart(
            along,
            title,
            missing=f"No trainer has a ratio at more than one {what} (all else equal).",
        )
    top = max(float(found.ratio.max()) * 1.1, 1.5)
    drawn = pd.concat([rows for _, _, rows in all_series])
    across = _across(unit, sorted(set(drawn[along])))
    panels = [
        _lines(f"{config}, {other} {value}", rows, along, across, material, top)
        for config, value, rows in all_series
    ]
    table = DataTable.of(
        f"{basis.name} ÷ those of {BASELINE_TRAINER}, by {what} ({basis.premise})",
        drawn,
        [*CASE, Column(f"{basis.name} ÷ standard", "ratio", times)],
    )
    keys = [*trainer_keys(material.look, found.trainer), Key("┄", f"{BASELINE_TRAINER} = 1")]
    if basis.metric in METRICS.expected():
        keys.append(Key("▒", "expected range", NEUTRAL))
    notes = data.cautions(summary, basis)
    return Chart(along, title, basis.premise, panels, keys, table, notes, width=340)


def _across(unit: str, points: list[int]) -> dict[str, Any]:
    """The axis that all panels share: doubling is a step of one length."""
    margin = 0.06 * math.log10(points[-1] / points[0])
    return axis(
        unit,
        type="log",
        range=[math.log10(points[0]) - margin, math.log10(points[-1]) + margin],
        tickvals=points,
        ticktext=[str(point) for point in points],
    )


def _lines(
    title: str,
    rows: pd.DataFrame,
    along: str,
    across: dict[str, Any],
    material: Material,
    top: float,
) -> Panel:
    look, basis = material.look, material.basis
    what = across["title"]["text"].partition(",")[0]
    traces = [
        go.Scatter(
            x=group[along].tolist(),
            y=group.ratio.tolist(),
            mode="lines+markers",
            line={
                "color": look[str(trainer)].colour,
                "dash": look[str(trainer)].dash,
                "width": 2.5,
            },
            marker={"symbol": look[str(trainer)].symbol, "size": 10},
            cliponaxis=False,
            hoverinfo="text",
            hovertext=[
                lines(trainer, f"{what} {x}", times(y))
                for x, y in zip(group[along], group.ratio, strict=True)
            ],
        )
        for trainer, group in rows.groupby("trainer", sort=False)
    ]
    shapes: list[dict[str, Any]] = [
        {
            "type": "line",
            "xref": "paper",
            "x0": 0,
            "x1": 1,
            "y0": 1,
            "y1": 1,
            "line": {"color": NEUTRAL, "dash": "dot", "width": 1.5},
        }
    ]
    if basis.metric in METRICS.expected():
        low, high = METRICS.expected()[basis.metric]
        shapes.append(
            {
                "type": "rect",
                "xref": "paper",
                "x0": 0,
                "x1": 1,
                "y0": low,
                "y1": min(high, top),
                "fillcolor": NEUTRAL,
                "opacity": 0.14,
                "line": {"width": 0},
                "layer": "below",
            }
        )
    return panel(
        title,
        traces,
        300,
        shapes=shapes,
        xaxis=across,
        yaxis=axis(f"{basis.name} ÷ standard", range=[0, top]),
    )
