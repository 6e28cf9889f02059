"""Bytes by trainer, stacked by phase."""

from __future__ import annotations

from typing import Any

import pandas as pd

from dpbench.case import BASELINE_TRAINER
from dpbench.results.rows import STEP
from dpbench.show.groups import in_order
from dpbench.show.html import data
from dpbench.show.html.data import Basis
from dpbench.show.html.drawing import GIGA, Material, axis, bar_panel, bar_trace, cells, label_trace
from dpbench.show.html.palette import PHASE_STYLES
from dpbench.show.html.parts import CASE, Chart, DataTable, Key, Panel, lines, plain, times
from dpbench.show.html.source import fate
from dpbench.show.layout import gigabytes


def phases(material: Material) -> Chart:
    """Bytes by trainer, stacked by phase; one panel per cell of the grid."""
    basis = material.basis
    wide = data.by_phase(material.summary, basis)
    names = data.phases_of(wide)
    title = f"{basis.name} by trainer and phase"
    if not names:
        return Chart("phases", title, missing="No bytes by phase were measured or counted.")
    drawn = _with_failures(wide, material.failed)
    drawn["label"] = [_label(row) for row in drawn.to_dict("records")]
    panels = [_bars(what, rows, names, drawn, basis) for what, rows in cells(drawn)]
    headers = {name: f"{name}, GB" for name in (*names, STEP)}
    table = DataTable.of(
        f"{basis.name} of one step by phase, {basis.premise}; ratio to {BASELINE_TRAINER}",
        wide,
        {**CASE, **headers, "ratio": "÷ standard"},
    )
    keys = [Key("■", name, PHASE_STYLES[name].colour) for name in names]
    notes = [
        "At the end of a bar: GB of the whole step, and how many times the standard trainer's.",
        *data.cautions(material.summary, basis),
    ]
    return Chart("phases", title, basis.premise, panels, keys, table, notes)


def _label(row: dict[Any, Any]) -> str:
    """What stands at the end of a bar, or in its place if the case failed."""
    if isinstance(row["error"], str):
        return f" {plain(fate(row['error']) + ': ' + row['error'])}"
    ratio = "" if pd.isna(row["ratio"]) else f" ({times(row['ratio'])})"
    return f" {gigabytes(row[STEP])}{ratio}"


def _bars(
    title: str, rows: pd.DataFrame, names: list[str], drawn: pd.DataFrame, basis: Basis
) -> Panel:
    """One cell; all panels have one scale, and the same room for labels."""
    trainers = rows.trainer.tolist()
    traces: list[Any] = []
    for name in names:
        values = [(t, None if pd.isna(v) else v) for t, v in zip(trainers, rows[name], strict=True)]
        said = ["" if v is None else lines(t, f"{name}: {gigabytes(v)} GB") for t, v in values]
        amounts = [None if v is None else v / GIGA for _, v in values]
        traces.append(bar_trace(name, trainers, amounts, PHASE_STYLES[name].colour, said))
    ends = (rows[STEP].fillna(0) / GIGA).tolist()
    traces.append(label_trace(trainers, ends, rows.label.tolist()))
    longest = float(drawn[STEP].max()) / GIGA
    return bar_panel(
        title,
        traces,
        trainers,
        drawn.label[drawn[STEP].notna()].tolist(),
        barmode="stack",
        bargap=0.25,
        xaxis=axis(basis.short, range=[0, longest if longest > 0 else 1]),
    )


def _with_failures(wide: pd.DataFrame, failed: pd.DataFrame) -> pd.DataFrame:
    """The rows of a chart with those of failed cases that have none, each where it belongs."""
    keys = ["run", "title", "batch_size", "seq_len", "trainer"]
    drawn = pd.MultiIndex.from_frame(wide[keys])
    new = failed[~pd.MultiIndex.from_frame(failed[keys]).isin(drawn)]
    if new.empty:
        return wide.assign(error=None)
    return in_order(pd.concat([wide, new.drop(columns="message")], ignore_index=True))
