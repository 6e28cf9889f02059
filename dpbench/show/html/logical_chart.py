"""Measured against logical bytes: two premises, two marks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from dpbench.show.html import data
from dpbench.show.html.drawing import GIGA, ROW, Material, axis, cells, panel, trainer_axis
from dpbench.show.html.palette import NEUTRAL, Style
from dpbench.show.html.parts import CASE, GB, Chart, Column, DataTable, Key, Panel, lines
from dpbench.show.html.source import cell_label

NEEDS_LOGICAL = (
    "These runs hold no logical counts of the measured cases. The option --with-logical of "
    "dpbench report counts them, in seconds a case and without a GPU."
)


def against_logical(material: Material) -> Chart:
    """Measured against logical bytes, one panel per cell: two marks, told apart by shape."""
    title = "Measured against logical bytes"
    found = data.measured_against_logical(material.summary)
    if found.empty:
        measured = not data.step_bytes(material.summary, data.DRAM).empty
        why = NEEDS_LOGICAL if measured else "No DRAM bytes were measured in these runs."
        return Chart("logical", title, missing=why)
    longest = max(*found.value, *found.logical) / GIGA  # one scale for all panels
    panels = [
        _pairs(f"{what}, {cell_label(batch, seq)}", rows, longest, material.look)
        for what, batch, seq, rows in cells(found)
    ]
    table = DataTable.of(
        "DRAM bytes of one step, measured, beside logical bytes, counted without hardware",
        found,
        [
            *CASE,
            Column("measured, GB", "value", GB),
            Column("logical (counted), GB", "logical", GB),
            Column("measured ÷ logical", "over_logical", "{:.3f}".format),
        ],
    )
    keys = [
        Key("●", "measured: DRAM bytes, by hardware counters"),
        Key("◇", "counted: logical bytes, without hardware"),
    ]
    notes = [
        "At the right: measured ÷ logical. Logical bytes are what operators must move if "
        "nothing stays in a cache between two of them."
    ]
    premise = "filled marks are measured, open marks are counted without hardware"
    return Chart("logical", title, premise, panels, keys, table, notes)


def _pairs(title: str, rows: pd.DataFrame, longest: float, look: Mapping[str, Style]) -> Panel:
    trainers = rows.trainer.tolist()
    colours = [look[name].colour for name in rows.trainer]
    measured, logical = (rows.value / GIGA).tolist(), (rows.logical / GIGA).tolist()
    joined = zip(trainers, measured, logical, strict=True)
    bars = [(x, name) for name, a, b in joined for x in (a, b, None)]
    shared: dict[str, Any] = {"y": trainers, "hoverinfo": "text", "cliponaxis": False}
    traces = [
        go.Scatter(
            x=[x for x, _ in bars],
            y=[name for _, name in bars],
            mode="lines",
            line={"color": NEUTRAL, "width": 2},
            hoverinfo="skip",
        ),
        go.Scatter(
            **shared,
            x=logical,
            mode="markers",
            marker={"symbol": "diamond-open", "size": 13, "color": colours, "line": {"width": 2.5}},
            hovertext=[
                lines(name, f"logical (counted): {GB(v)} GB")
                for name, v in zip(rows.trainer, rows.logical, strict=True)
            ],
        ),
        go.Scatter(
            **shared,
            x=measured,
            mode="markers",
            marker={"symbol": "circle", "size": 11, "color": colours},
            hovertext=[
                lines(name, f"measured: {GB(v)} GB")
                for name, v in zip(rows.trainer, rows.value, strict=True)
            ],
        ),
        go.Scatter(
            y=trainers,
            x=[longest] * len(rows),
            mode="text",
            textposition="middle right",
            text=["" if pd.isna(q) else f"   {q:.2f}" for q in rows.over_logical],
            cliponaxis=False,
            hoverinfo="skip",
        ),
    ]
    return panel(
        title,
        traces,
        58 + ROW * len(rows),
        margin={"l": 10, "r": 60, "t": 6, "b": 46},
        xaxis=axis("GB per step", range=[0, longest * 1.02 or 1]),
        yaxis=trainer_axis(trainers),
    )
