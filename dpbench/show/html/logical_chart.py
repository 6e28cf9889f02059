"""Measured against logical bytes: two premises, two marks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from dpbench.show.html import data
from dpbench.show.html.drawing import GIGA, Material, axis, bar_panel, cells, label_trace
from dpbench.show.html.palette import NEUTRAL, Style
from dpbench.show.html.parts import CASE, Chart, DataTable, Key, Panel, lines
from dpbench.show.layout import gigabytes, written

NEEDS_LOGICAL = (
    "These runs hold no logical counts of the measured cases. The option --with-logical of "
    "dpbench report counts them, in seconds a case and without a GPU."
)


def against_logical(material: Material) -> Chart:
    """Measured against logical bytes, one panel per cell: two marks, told apart by shape."""
    title = "Measured against logical bytes"
    both = data.measured_against_logical(material.summary)
    if both.empty:
        measured = not data.step_bytes(material.summary, data.DRAM).empty
        why = NEEDS_LOGICAL if measured else "No DRAM bytes were measured in these runs."
        return Chart("logical", title, missing=why)
    longest = max(*both.value, *both.logical) / GIGA  # one scale for all panels
    panels = [_pairs(what, rows, longest, material.look) for what, rows in cells(both)]
    table = DataTable.of(
        "DRAM bytes of one step, measured, beside logical bytes, counted without hardware",
        both,
        {
            **CASE,
            "value": "measured, GB",
            "logical": "logical (counted), GB",
            "over_logical": "measured ÷ logical",
        },
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
    joined = zip(trainers, rows.value / GIGA, rows.logical / GIGA, strict=True)
    ends = [(x, name) for name, a, b in joined for x in (a, b, None)]
    line = go.Scatter(
        x=[x for x, _ in ends],
        y=[name for _, name in ends],
        mode="lines",
        line={"color": NEUTRAL, "width": 2},
        hoverinfo="skip",
    )
    open_mark = {"symbol": "diamond-open", "size": 13, "line": {"width": 2.5}}
    labels = [written(quotient, "   {:.2f}".format, "") for quotient in rows.over_logical]
    traces = [
        line,
        _marks(rows, "logical", "logical (counted)", look, open_mark),
        _marks(rows, "value", "measured", look, {"symbol": "circle", "size": 11}),
        label_trace(trainers, [longest] * len(rows), labels),
    ]
    across = axis("GB per step", range=[0, longest * 1.02 or 1])
    return bar_panel(title, traces, trainers, labels, xaxis=across)


def _marks(
    rows: pd.DataFrame, column: str, what: str, look: Mapping[str, Style], marker: dict[str, Any]
) -> Any:
    return go.Scatter(
        y=rows.trainer.tolist(),
        x=(rows[column] / GIGA).tolist(),
        mode="markers",
        marker={**marker, "color": [look[name].colour for name in rows.trainer]},
        cliponaxis=False,
        hoverinfo="text",
        hovertext=[
            lines(name, f"{what}: {gigabytes(value)} GB")
            for name, value in zip(rows.trainer, rows[column], strict=True)
        ],
    )
