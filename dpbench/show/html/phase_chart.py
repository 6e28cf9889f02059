"""Bytes by trainer, stacked by phase."""

from __future__ import annotations

from typing import Any

import pandas as pd
import plotly.graph_objects as go

from dpbench.case import BASELINE_TRAINER
from dpbench.results.rows import STEP
from dpbench.show.groups import in_order
from dpbench.show.html import data
from dpbench.show.html.data import Basis
from dpbench.show.html.drawing import GIGA, ROW, Material, axis, cells, panel, trainer_axis
from dpbench.show.html.palette import PHASE_COLOURS
from dpbench.show.html.parts import (
    CASE,
    GB,
    Chart,
    Column,
    DataTable,
    Key,
    Panel,
    lines,
    plain,
    times,
)
from dpbench.show.html.source import cell_label, fate


def phases(material: Material) -> Chart:
    """Bytes by trainer, stacked by phase; one panel per cell of the grid."""
    basis = material.basis
    wide = data.by_phase(material.summary, basis)
    names = data.phases_of(wide)
    title = f"{basis.name} by trainer and phase"
    if not names:
        return Chart("phases", title, missing="No bytes by phase were measured or counted.")
    drawn = with_failures(wide, material.failed)
    longest = float(drawn[STEP].max()) / GIGA  # one scale for all panels
    panels = [
        _bars(f"{what}, {cell_label(batch, seq)}", rows, names, longest, basis)
        for what, batch, seq, rows in cells(drawn)
    ]
    columns = [Column(f"{name}, GB", name, GB) for name in (*names, STEP)]
    table = DataTable.of(
        f"{basis.name} of one step by phase, {basis.premise}; ratio to {BASELINE_TRAINER}",
        wide,
        [*CASE, *columns, Column("÷ standard", "ratio", times)],
    )
    keys = [Key("■", name, PHASE_COLOURS[name]) for name in names]
    notes = [
        "At the end of a bar: GB of the whole step, and how many times the standard trainer's.",
        *data.cautions(material.summary, basis),
    ]
    return Chart("phases", title, basis.premise, panels, keys, table, notes)


def _bars(title: str, rows: pd.DataFrame, names: list[str], longest: float, basis: Basis) -> Panel:
    trainers = rows.trainer.tolist()
    traces: list[Any] = [
        go.Bar(
            y=trainers,
            x=[None if pd.isna(v) else v / GIGA for v in rows[name]],
            orientation="h",
            name=name,
            marker={"color": PHASE_COLOURS[name]},
            hoverinfo="text",
            hovertext=[
                lines(trainer, f"{name}: {GB(value)} GB") if pd.notna(value) else ""
                for trainer, value in zip(rows.trainer, rows[name], strict=True)
            ],
        )
        for name in names
    ]
    ends = []
    for row in rows.to_dict("records"):
        ratio = "" if pd.isna(row["ratio"]) else f" ({times(row['ratio'])})"
        error = row["error"]
        failed = isinstance(error, str)
        ends.append(plain(f"{fate(error)}: {error}") if failed else GB(row[STEP]) + ratio)
    traces.append(
        go.Scatter(
            y=trainers,
            x=[0 if pd.isna(value) else value / GIGA for value in rows[STEP]],
            text=[f" {end}" for end in ends],
            mode="text",
            textposition="middle right",
            cliponaxis=False,
            hoverinfo="skip",
        )
    )
    return panel(
        title,
        traces,
        58 + ROW * len(rows),
        barmode="stack",
        bargap=0.25,
        margin={"l": 10, "r": 104, "t": 6, "b": 46},
        xaxis=axis(basis.short, range=[0, longest if longest > 0 else 1]),
        yaxis=trainer_axis(trainers),
    )


def with_failures(found: pd.DataFrame, failed: pd.DataFrame) -> pd.DataFrame:
    """The rows of a chart with those of failed cases that have none, each where it belongs."""
    keys = ["run", "title", "batch_size", "seq_len", "trainer"]
    has = set(found[keys].itertuples(index=False, name=None))
    new = failed[[key not in has for key in failed[keys].itertuples(index=False, name=None)]]
    if new.empty:
        return found.assign(error=None)
    return in_order(pd.concat([found, new.drop(columns="message")], ignore_index=True))
