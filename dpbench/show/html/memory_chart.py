"""Peak memory against bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from dpbench.show.html import data
from dpbench.show.html.drawing import GIGA, Material, axis, panel, trainer_keys
from dpbench.show.html.palette import NEUTRAL
from dpbench.show.html.parts import CASE, GB, Chart, Column, DataTable, Panel, lines
from dpbench.show.html.source import cell_label


def memory(material: Material, capacity: Mapping[str, float]) -> Chart:
    """Peak memory against bytes; one panel per configuration."""
    basis = material.basis
    found = data.memory_against_bytes(material.summary, basis)
    title = f"Peak memory against {basis.name}"
    if found.empty:
        return Chart(
            "memory",
            title,
            missing="No case has both its bytes and its peak memory, which a second, unprofiled "
            "process measures.",
        )
    premise = basis.premise
    if basis.measured:
        premise = "bytes by hardware counters, peak memory in a second, unprofiled process"
    reach = _reach(found, capacity)
    panels = [
        _scatter(
            f"{what}, batch {batch}",
            rows,
            material,
            reach,
            capacity.get(str(rows.device.iloc[0])),
        )
        for what, batch, rows in data.by_batch(found)
    ]
    table = DataTable.of(
        f"Peak memory and {basis.name} of one step ({premise})",
        found,
        [*CASE, Column(f"{basis.name}, GB", "value", GB), Column("peak memory, GB", "peak", GB)],
    )
    notes = [
        "Where a panel has several sequence lengths, they stand at the marks that there is room "
        "at, and a line joins those of a trainer, the shortest at the left."
    ]
    keys = trainer_keys(material.look, found.trainer)
    return Chart("memory", title, premise, panels, keys, table, notes)


def _reach(found: pd.DataFrame, capacity: Mapping[str, float]) -> tuple[float, float]:
    """Where the axes of all panels end, GB: of bytes, and of peak memory.

    The memory of a GPU is in sight where some case takes a good part of it.
    """
    right, top = float(found.value.max()) * 1.1 / GIGA, float(found.peak.max()) * 1.15 / GIGA
    sizes = [capacity[device] / GIGA for device in set(found.device) if device in capacity]
    return right or 1.0, max([top or 1.0, *(size * 1.12 for size in sizes if top > 0.4 * size)])


def _apart(rows: pd.DataFrame, reach: tuple[float, float]) -> set[Any]:
    """The rows whose sequence length there is room for beside their marks, by index."""
    said: dict[Any, tuple[float, float]] = {}
    for at, value, peak in zip(rows.index, rows.value, rows.peak, strict=True):
        x, y = value / GIGA / reach[0], peak / GIGA / reach[1]
        if all(abs(x - other) > 0.09 or abs(y - level) > 0.06 for other, level in said.values()):
            said[at] = x, y
    return set(said)


def _scatter(
    title: str,
    rows: pd.DataFrame,
    material: Material,
    reach: tuple[float, float],
    capacity: float | None,
) -> Panel:
    look = material.look
    lengths = sorted(set(rows.seq_len))
    if len(lengths) == 1:
        title = f"{title} × sequence {lengths[0]}"
    said = _apart(rows, reach) if len(lengths) > 1 else set()
    traces = [
        go.Scatter(
            x=(group.value / GIGA).tolist(),
            y=(group.peak / GIGA).tolist(),
            mode="lines+markers+text",
            line={"color": look[str(trainer)].colour, "dash": look[str(trainer)].dash, "width": 1},
            marker={"symbol": look[str(trainer)].symbol, "size": 12},
            text=[str(seq) if at in said else "" for at, seq in group.seq_len.items()],
            textposition="top center",
            textfont={"size": 11},
            cliponaxis=False,
            hoverinfo="text",
            hovertext=[
                lines(
                    trainer,
                    cell_label(row["batch_size"], row["seq_len"]),
                    f"{GB(row['value'])} GB moved",
                    f"{GB(row['peak'])} GB at peak",
                )
                for row in group.to_dict("records")
            ],
        )
        for trainer, group in rows.groupby("trainer", sort=False)
    ]
    layout: dict[str, Any] = {}
    if capacity and capacity / GIGA < reach[1]:
        line = {"color": NEUTRAL, "dash": "dash", "width": 1.5}
        level = {"y0": capacity / GIGA, "y1": capacity / GIGA}
        layout["shapes"] = [
            {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "line": line, **level}
        ]
        layout["annotations"] = [
            {
                "xref": "paper",
                "x": 0.01,
                "y": capacity / GIGA,
                "showarrow": False,
                "yanchor": "bottom",
                "xanchor": "left",
                "text": f"memory of the GPU, {GB(capacity)} GB",
            }
        ]
    return panel(
        title,
        traces,
        380,
        xaxis=axis(material.basis.short, range=[0, reach[0]]),
        yaxis=axis(f"peak memory, GB ({material.basis.verb})", range=[0, reach[1]]),
        **layout,
    )
