"""The charts of bytes, of ratios and of memory; `roofline` has those that need counts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from dpbench.case import BASELINE_TRAINER
from dpbench.metrics import EXPECTED_BY
from dpbench.results.rows import STEP
from dpbench.show.html import data, figures
from dpbench.show.html.figures import (
    CASE,
    GIGA,
    NEUTRAL,
    PHASE_STYLES,
    Chart,
    DataTable,
    Json,
    Key,
    Material,
    Panel,
)
from dpbench.show.layout import gigabytes
from dpbench.show.tables import in_order

# --- bytes by trainer and phase --------------------------------------------------------------


def phases(material: Material) -> Chart:
    """Bytes by trainer, stacked by phase; one panel per cell of the grid."""
    basis = material.basis
    wide = data.by_phase(material.summary, basis)
    names = data.phases_of(wide)
    title = f"{basis.name} by trainer and phase"
    if not names:
        return Chart("phases", title, missing="No bytes by phase were measured or counted.")
    drawn = _with_failures(wide, material.failed)
    drawn["label"] = [_end_of_bar(row) for row in drawn.to_dict("records")]
    headers = {name: f"{name}, GB" for name in (*names, STEP)}
    return Chart(
        "phases",
        title,
        basis.premise,
        [_stacked(what, rows, names, drawn, basis.short) for what, rows in figures.cells(drawn)],
        [Key("■", name, PHASE_STYLES[name].colour) for name in names],
        DataTable.of(
            f"{basis.name} of one step by phase, {basis.premise}; ratio to {BASELINE_TRAINER}",
            wide,
            {**CASE, **headers, "ratio": "÷ standard"},
        ),
        [
            "At the end of a bar: GB of the whole step, and how many times the standard trainer's.",
            *data.cautions(material.summary, basis),
        ],
    )


def _with_failures(wide: pd.DataFrame, failed: pd.DataFrame) -> pd.DataFrame:
    """The rows of a chart with those of failed cases that have none, each where it belongs."""
    keys = ["run", "title", "batch_size", "seq_len", "trainer"]
    drawn = pd.MultiIndex.from_frame(wide[keys])
    new = failed[~pd.MultiIndex.from_frame(failed[keys]).isin(drawn)]
    if new.empty:
        return wide.assign(error=None)
    return in_order(pd.concat([wide, new.drop(columns="message")], ignore_index=True))


def _end_of_bar(row: Mapping[Any, Any]) -> str:
    """What stands at the end of a bar, or in its place if the case failed."""
    if isinstance(row["error"], str):
        return f" {figures.plain(figures.fate(row['error']) + ': ' + row['error'])}"
    ratio = "" if pd.isna(row["ratio"]) else f" ({figures.times(row['ratio'])})"
    return f" {gigabytes(row[STEP])}{ratio}"


def _stacked(
    title: str, rows: pd.DataFrame, names: list[str], drawn: pd.DataFrame, unit: str
) -> Panel:
    """One cell; all panels have one scale, and the same room for labels."""
    trainers = rows.trainer.tolist()
    traces = []
    for name in names:
        values = [(t, None if pd.isna(v) else v) for t, v in zip(trainers, rows[name], strict=True)]
        said = [
            "" if v is None else figures.lines(t, f"{name}: {gigabytes(v)} GB") for t, v in values
        ]
        amounts = [None if v is None else v / GIGA for _, v in values]
        traces.append(figures.bars(name, trainers, amounts, PHASE_STYLES[name].colour, said))
    ends = (rows[STEP].fillna(0) / GIGA).tolist()
    longest = float(drawn[STEP].max()) / GIGA
    return figures.bar_panel(
        title,
        traces,
        {"y": trainers, "x": ends, "text": rows.label.tolist()},
        drawn.label[drawn[STEP].notna()].tolist(),
        barmode="stack",
        bargap=0.25,
        xaxis=figures.axis(unit, range=[0, longest if longest > 0 else 1]),
    )


# --- ratios over the grid --------------------------------------------------------------------


def ratio_map(material: Material) -> Chart:
    """Ratio to the baseline over the grid; one panel per configuration and trainer."""
    summary, failed, basis = material.summary, material.failed, material.basis
    ratios = data.ratios(summary, basis)
    title = f"{basis.name} as a multiple of standard training, over the grid"
    if ratios.empty:
        return Chart("map", title, missing=_no_ratio(material))
    everywhere = pd.concat([ratios, failed[failed.trainer != BASELINE_TRAINER]], ignore_index=True)
    low, high = min(1.0, ratios.ratio.min()), max(ratios.ratio.max(), 1.01)
    panels = [
        _heat(f"{trainer}, {what}", rows, {"zmin": low, "zmax": high})
        for (what, trainer), rows in everywhere.groupby(["title", "trainer"], sort=False)
        if len(rows[["batch_size", "seq_len"]].drop_duplicates()) > 1
    ]
    if not panels:
        why = "No trainer was measured in more than one cell: its ratio stands at its bar above."
        return Chart("map", title, missing=why)
    dark, bright = figures.times(low), figures.times(high)
    notes = [f"One colour scale for all panels, from {dark} (dark) to {bright} (bright)."]
    if limits := material.expected.get(basis.metric):
        usual = f"{limits[0]:g} to {limits[1]:g} times the standard's bytes."
        notes.append(f"{EXPECTED_BY.capitalize()}: {usual}")
    notes += data.cautions(summary, basis)
    what = f"{basis.name} ÷ those of {BASELINE_TRAINER} in the same run and cell ({basis.premise})"
    table = DataTable.of(what, ratios, {**CASE, "ratio": f"{basis.name} ÷ standard"})
    return Chart("map", title, basis.premise, panels, [], table, notes, width=270)


def _no_ratio(material: Material) -> str:
    trainers = set(data.step_bytes(material.summary, material.basis).trainer)
    if not trainers:
        return "No bytes were measured or counted."
    if BASELINE_TRAINER not in trainers:
        return f"No ratio: the {BASELINE_TRAINER!r} trainer was not measured in these runs."
    if trainers == {BASELINE_TRAINER}:
        return f"No ratio: only the {BASELINE_TRAINER!r} trainer was measured."
    return f"No ratio: no run has a trainer and {BASELINE_TRAINER!r} in the same cell."


def _heat(title: str, rows: pd.DataFrame, limits: dict[str, float]) -> Panel:
    across, down = sorted(set(rows.seq_len)), sorted(set(rows.batch_size))
    at = {(row["batch_size"], row["seq_len"]): row for row in rows.to_dict("records")}
    ratio = {place: row["ratio"] for place, row in at.items() if pd.notna(row["ratio"])}
    trace = {
        "type": "heatmap",
        "z": [[ratio.get((batch, seq)) for seq in across] for batch in down],
        "x": [str(seq) for seq in across],
        "y": [str(batch) for batch in down],
        "texttemplate": "%{z:.2f}×",
        "colorscale": "Cividis",
        **limits,
        "showscale": False,
        "xgap": 3,
        "ygap": 3,
        "hoverongaps": False,
        "hoverinfo": "text",
        "hovertext": [
            [
                figures.lines(
                    figures.cell_label(batch, seq), figures.times(ratio.get((batch, seq), math.nan))
                )
                for seq in across
            ]
            for batch in down
        ],
    }
    empty = [
        # By place: "256" would be the 256th category.
        {
            "x": column,
            "y": row,
            "showarrow": False,
            "text": figures.fate(at[batch, seq]["error"]) if (batch, seq) in at else "–",
        }
        for row, batch in enumerate(down)
        for column, seq in enumerate(across)
        if (batch, seq) not in ratio
    ]
    return figures.panel(
        title,
        [trace],
        72 + 52 * len(down),
        annotations=empty,
        xaxis=figures.axis("sequence length, tokens", type="category", showgrid=False),
        yaxis=figures.axis("batch", type="category", showgrid=False),
    )


# --- ratios along an axis of the grid --------------------------------------------------------

AXES_OF_THE_GRID = {
    "seq_len": ("sequence length", "tokens", "batch"),
    "batch_size": ("batch size", "examples", "sequence"),
}
"""What each axis is called, its unit, and the other one, which is fixed in a panel."""


def ratio_along(material: Material, along: str) -> Chart:
    """How the ratio goes with one of `AXES_OF_THE_GRID`."""
    what, unit, other = AXES_OF_THE_GRID[along]
    title = f"How the ratio goes with {what}"
    summary, basis = material.summary, material.basis
    ratios = data.ratios(summary, basis)
    if ratios.empty:
        return Chart(along, title, missing=_no_ratio(material))
    series = list(data.series(ratios, along))
    if not series:
        why = f"No trainer has a ratio at more than one {what} (all else equal)."
        return Chart(along, title, missing=why)
    drawn = pd.concat([rows for _, _, rows in series])
    say = (drawn.trainer, drawn[along], drawn.ratio)
    said = [
        figures.lines(name, f"{what} {x}", figures.times(y))
        for name, x, y in zip(*say, strict=True)
    ]
    drawn = drawn.assign(x=drawn[along], y=drawn.ratio, said=said)
    points = sorted(set(drawn[along]))
    margin = 0.06 * math.log10(points[-1] / points[0])
    ends = [math.log10(points[0]) - margin, math.log10(points[-1]) + margin]
    top = max(float(ratios.ratio.max()) * 1.1, 1.5)
    layout: Json = {
        "xaxis": figures.axis(
            f"{what}, {unit}", type="log", range=ends, tickvals=points, ticktext=[*map(str, points)]
        ),
        "yaxis": figures.axis(f"{basis.name} ÷ standard", range=[0, top]),
        "shapes": [figures.level(1, "dot")],
    }
    keys = [*material.keys(ratios.trainer), Key("┄", f"{BASELINE_TRAINER} = 1")]
    if limits := material.expected.get(basis.metric):
        place = {"xref": "paper", "x0": 0, "x1": 1, "y0": limits[0], "y1": min(limits[1], top)}
        grey = {"fillcolor": NEUTRAL, "opacity": 0.14, "line": {"width": 0}, "layer": "below"}
        layout["shapes"].append({"type": "rect", **place, **grey})
        keys.append(Key("▒", "expected range", NEUTRAL))
    panels = [
        figures.panel(
            f"{config}, {other} {value}",
            [*figures.joined_marks(drawn.loc[rows.index], material.look, 2.5, 10)],
            300,
            **layout,
        )
        for config, value, rows in series
    ]
    caption = f"{basis.name} ÷ those of {BASELINE_TRAINER}, by {what} ({basis.premise})"
    table = DataTable.of(caption, drawn, {**CASE, "ratio": f"{basis.name} ÷ standard"})
    notes = data.cautions(summary, basis)
    return Chart(along, title, basis.premise, panels, keys, table, notes, width=340)


# --- peak memory -----------------------------------------------------------------------------


def memory(material: Material) -> Chart:
    """Peak memory against bytes; one panel per configuration and batch size."""
    basis = material.basis
    points = data.memory_against_bytes(material.summary, basis)
    title = f"Peak memory against {basis.name}"
    if points.empty:
        why = "No case has both its bytes and its peak memory, which a second, unprofiled process"
        return Chart("memory", title, missing=f"{why} measures.")
    premise = basis.premise
    if basis.measured:
        premise = "bytes by hardware counters, peak memory in a second, unprofiled process"
    sizes = {
        gpu["name"]: gpu["memory_bytes"] / GIGA
        for source in material.sources
        if (gpu := source.environment.get("gpu")) and gpu.get("memory_bytes")
    }
    points = points.assign(
        x=points.value / GIGA, y=points.peak / GIGA, capacity=points.device.map(sizes)
    )
    # The memory of a GPU is in sight where some case takes a good part of it.
    right, top = float(points.x.max()) * 1.1 or 1.0, float(points.y.max()) * 1.15
    seen = points.capacity[points.capacity * 0.4 < top]
    reach = right, max([top or 1.0, *(seen * 1.12)])
    ordered = points.sort_values("seq_len", kind="stable")
    table = DataTable.of(
        f"Peak memory and {basis.name} of one step ({premise})",
        points,
        {**CASE, "value": f"{basis.name}, GB", "peak": "peak memory, GB"},
    )
    return Chart(
        "memory",
        title,
        premise,
        [_scatter(rows, material, reach) for _, rows in ordered.groupby(["title", "batch_size"])],
        material.keys(points.trainer),
        table,
        [
            "Where a panel has several sequence lengths, they stand at the marks that there is "
            "room at, and a line joins those of a trainer, the shortest at the left."
        ],
    )


def _scatter(points: pd.DataFrame, material: Material, reach: tuple[float, float]) -> Panel:
    first, basis = points.iloc[0], material.basis
    one_length = points.seq_len.nunique() == 1
    cell = figures.cell_label(first.batch_size, first.seq_len)
    said = [
        figures.lines(
            row["trainer"],
            figures.cell_label(row["batch_size"], row["seq_len"]),
            f"{gigabytes(row['value'])} GB moved",
            f"{gigabytes(row['peak'])} GB at peak",
        )
        for row in points.to_dict("records")
    ]
    labelled = points.assign(said=said, label=_lengths_with_room(points, reach))
    return figures.panel(
        f"{first.title}, {cell if one_length else f'batch {first.batch_size}'}",
        [*figures.joined_marks(labelled, material.look, 1, 12)],
        380,
        xaxis=figures.axis(basis.short, range=[0, reach[0]]),
        yaxis=figures.axis(f"peak memory, GB ({basis.verb})", range=[0, reach[1]]),
        **(_capacity_line(first.capacity) if first.capacity < reach[1] else {}),
    )


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


def _capacity_line(size: float) -> Json:
    """A line at the memory of the GPU in GB, with its name upon it."""
    note = {
        "xref": "paper",
        "x": 0.01,
        "y": size,
        "showarrow": False,
        "yanchor": "bottom",
        "xanchor": "left",
        "text": f"memory of the GPU, {gigabytes(size * GIGA)} GB",
    }
    return {"shapes": [figures.level(size, "dash")], "annotations": [note]}
