"""A run for other programs: CSV, the JSON of github-action-benchmark, GitHub's step summary."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from dpbench.case import AXES, BASELINE_TRAINER, Case
from dpbench.files import write_text
from dpbench.results.frame import to_frame
from dpbench.results.outcome import Outcome
from dpbench.results.rows import COLUMNS, STEP, Measurement, as_rows
from dpbench.show.layout import Table, as_markdown
from dpbench.show.summary import summary_tables
from dpbench.show.tables import complete, in_order
from dpbench.show.view import Column, View, shown_by_default

STEP_SUMMARY = "GITHUB_STEP_SUMMARY"
STEP_SUMMARY_BYTES = 1024 * 1024
"""GitHub refuses a longer summary of one step (its documentation of workflow commands)."""


def write_renderings(
    outcomes: Sequence[Outcome],
    view: View,
    *,
    markdown: Path | None = None,
    csv: Path | None = None,
    github_benchmark: Path | None = None,
    missing: int = 0,
) -> None:
    """Write a run in each of the forms for which there is a file.

    The CSV is the long table, exact, in bytes and seconds. Ratios are not in it: they are between
    means over the steps, and a line is one step. Markdown says how many cases are ``missing``.
    """
    rows = [row for outcome in outcomes for row in outcome.rows]
    if markdown:
        note = f"Not complete: {missing} of the cases asked for are missing.\n\n" if missing else ""
        write_text(markdown, note + as_markdown(summary_tables(outcomes, view)))
    if csv:
        frame = pd.DataFrame(as_rows(rows), columns=COLUMNS, dtype=object)
        write_text(csv, frame.to_csv(index=False, lineterminator="\n"))
    if github_benchmark:
        entries = list(github_benchmark_entries(rows, view))
        write_text(github_benchmark, json.dumps(entries, indent=1) + "\n")


def github_benchmark_entries(
    measurements: Sequence[Measurement], view: View
) -> Iterator[dict[str, Any]]:
    """The entries that github-action-benchmark reads as its tool ``customSmallerIsBetter``.

    One per case and column of the view (by default those of the tables) where the case has a
    number, of whole steps. ``name`` stays the same from run to run on one kind of device, for
    the action compares by it; ``value`` is exact, in ``unit``. Spreads, and rates, of which more
    is better, have no entry.

    Source of the format: ``BenchmarkResult`` in ``src/extract.ts`` of
    benchmark-action/github-action-benchmark.
    """
    frame = to_frame(measurements)
    if frame.empty:
        return
    usual = [*shown_by_default(logical=False), *shown_by_default(logical=True)]
    shown = dict.fromkeys(view.columns or usual)
    columns = [c for c in shown if c.kind != "spread" and c.smaller_is_better]
    summary = in_order(complete(frame))
    by_instrument = frame.groupby([*AXES, "device", "instrument"], as_index=False)
    tools = by_instrument.agg(tool=("tool", lambda names: ", ".join(dict.fromkeys(names))))
    step = summary[summary.phase == STEP].merge(tools, how="left")
    for _, case in step.groupby([*AXES, "device"], sort=False):
        for column in columns:
            rows = case[case.metric.isin(column.metrics)].dropna(subset=column.kind)
            if column.kind == "ratio":  # that of standard training is always 1
                rows = rows[rows.trainer != BASELINE_TRAINER]
            for row in rows.head(1).to_dict("records"):
                yield _entry(row, column)


def _entry(row: Mapping[Any, Any], column: Column) -> dict[str, Any]:
    case = Case.from_row(row)
    unit = {"value": row["unit"], "ratio": "x standard"}.get(column.kind, "x logical")
    made_by = f"instrument: {row['instrument']}\ntool: {row['tool']}\nsteps: {row['repeats']:.0f}"
    entry = {
        "name": f"{row['device']}/{case.id}/{column.name}",
        "unit": unit,
        "value": row[column.kind],
        "extra": made_by,
    }
    if column.kind == "value" and not pd.isna(row["spread"]):
        entry["range"] = f"± {row['spread'] / 2:.2%}"
    return entry


def append_step_summary(tables: Sequence[Table]) -> str | None:
    """Append tables to GitHub's summary of a workflow step, where there is one.

    A summary that cannot be written spoils no measurement: what went wrong comes back as one
    line, to be shown as a warning.
    """
    name = os.environ.get(STEP_SUMMARY)
    if not name or not tables:
        return None
    path = Path(name)
    text = ("\n" + as_markdown(tables)).encode("utf-8", errors="replace")
    try:
        before = path.stat().st_size if path.exists() else 0
        if before + len(text) > STEP_SUMMARY_BYTES:
            return f"{STEP_SUMMARY}: the tables would make {name} longer than GitHub takes (1 MiB)"
        with path.open("ab") as stream:
            stream.write(text)
    except OSError as error:
        return f"{STEP_SUMMARY}: {name}: {error.strerror}"
    return None
