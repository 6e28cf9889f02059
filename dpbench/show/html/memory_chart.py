"""Peak memory against bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pandas as pd

from dpbench.show.html import data
from dpbench.show.html.drawing import (
    GIGA,
    Material,
    axis,
    level,
    panel,
    trainer_keys,
    trainer_trace,
)
from dpbench.show.html.palette import NEUTRAL
from dpbench.show.html.parts import CASE, Chart, DataTable, Panel, lines
from dpbench.show.html.source import cell_label
from dpbench.show.layout import gigabytes


def memory(material: Material, capacity: Mapping[str, float]) -> Chart:
    """Peak memory against bytes; one panel per configuration and batch size.

    Args:
        material: of the page.
        capacity: the memory of each device, B.
    """
    basis = material.basis
    points = data.memory_against_bytes(material.summary, basis)
    title = f"Peak memory against {basis.name}"
    if points.empty:
        return Chart(
            "memory",
            title,
            missing="No case has both its bytes and its peak memory, which a second, unprofiled "
            "process measures.",
        )
    premise = basis.premise
    if basis.measured:
        premise = "bytes by hardware counters, peak memory in a second, unprofiled process"
    reach = _reach(points, capacity)
    panels = [
        _scatter(*cast("tuple[str, int]", key), rows, material, reach, capacity)
        for key, rows in points.sort_values("seq_len", kind="stable").groupby(
            ["title", "batch_size"]
        )
    ]
    table = DataTable.of(
        f"Peak memory and {basis.name} of one step ({premise})",
        points,
        {**CASE, "value": f"{basis.name}, GB", "peak": "peak memory, GB"},
    )
    notes = [
        "Where a panel has several sequence lengths, they stand at the marks that there is room "
        "at, and a line joins those of a trainer, the shortest at the left."
    ]
    keys = trainer_keys(material.look, points.trainer)
    return Chart("memory", title, premise, panels, keys, table, notes)


def _reach(points: pd.DataFrame, capacity: Mapping[str, float]) -> tuple[float, float]:
    """Where the axes of all panels end, GB: of bytes, and of peak memory.

    The memory of a GPU is in sight where some case takes a good part of it.
    """
    right, top = float(points.value.max()) * 1.1 / GIGA, float(points.peak.max()) * 1.15 / GIGA
    sizes = [capacity[device] / GIGA for device in set(points.device) if device in capacity]
    return right or 1.0, max([top or 1.0, *(size * 1.12 for size in sizes if top > 0.4 * size)])


def _lengths_with_room(points: pd.DataFrame, reach: tuple[float, float]) -> pd.Series[str]:
    """The sequence length beside each mark; empty where another stands too near."""
    if points.seq_len.nunique() == 1:
        return pd.Series("", index=points.index)
    placed: dict[Any, tuple[float, float]] = {}
    for at, x, y in zip(points.index, points.x / reach[0], points.y / reach[1], strict=True):
        if all(
            abs(x - other) > 0.09 or abs(y - height) > 0.06 for other, height in placed.values()
        ):
            placed[at] = x, y
    return points.seq_len.astype(str).where(points.index.isin(list(placed)), "")


def _scatter(
    configuration: str,
    batch: int,
    rows: pd.DataFrame,
    material: Material,
    reach: tuple[float, float],
    capacity: Mapping[str, float],
) -> Panel:
    lengths = set(rows.seq_len)
    title = f"batch {batch}" if len(lengths) > 1 else cell_label(batch, lengths.pop())
    points = rows.assign(x=rows.value / GIGA, y=rows.peak / GIGA)
    labels = _lengths_with_room(points, reach)
    traces = []
    for name, group in points.groupby("trainer", sort=False):
        style, said = material.look[str(name)], [_said(row) for row in group.to_dict("records")]
        trace = trainer_trace(group.x.tolist(), group.y.tolist(), style, 1, 12, said)
        text = {"text": labels[group.index].tolist(), "textfont": {"size": 11}}
        traces.append(trace.update(text, mode="lines+markers+text", textposition="top center"))
    size = capacity.get(str(rows.device.iloc[0]))
    return panel(
        f"{configuration}, {title}",
        traces,
        380,
        xaxis=axis(material.basis.short, range=[0, reach[0]]),
        yaxis=axis(f"peak memory, GB ({material.basis.verb})", range=[0, reach[1]]),
        **(_capacity_line(size) if size and size / GIGA < reach[1] else {}),
    )


def _said(row: Mapping[Any, Any]) -> str:
    return lines(
        row["trainer"],
        cell_label(row["batch_size"], row["seq_len"]),
        f"{gigabytes(row['value'])} GB moved",
        f"{gigabytes(row['peak'])} GB at peak",
    )


def _capacity_line(size: float) -> dict[str, Any]:
    """A line at the memory of the GPU, with its name upon it."""
    note = {
        "xref": "paper",
        "x": 0.01,
        "y": size / GIGA,
        "showarrow": False,
        "yanchor": "bottom",
        "xanchor": "left",
        "text": f"memory of the GPU, {gigabytes(size)} GB",
    }
    return {"shapes": [level(size / GIGA, NEUTRAL, "dash")], "annotations": [note]}
