"""A whole run: every table of it, and forms for other programs.

These are CSV, the JSON of github-action-benchmark, and GitHub's step summary.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from dpbench.case import AXES, Case
from dpbench.files import write_text
from dpbench.results.frame import to_frame
from dpbench.results.operators import guesses
from dpbench.results.outcome import Outcome, trainer_summary
from dpbench.results.rows import COLUMNS, STEP, Measurement, as_rows
from dpbench.show.kernels import case_kernel_tables
from dpbench.show.layout import Shown, Table, as_markdown, gigabytes
from dpbench.show.profile import profile_tables
from dpbench.show.tables import complete, in_order, tables
from dpbench.show.timeline import timeline_tables
from dpbench.show.view import View, usual_columns

STEP_SUMMARY = "GITHUB_STEP_SUMMARY"
STEP_SUMMARY_BYTES = 1024 * 1024
"""GitHub refuses a longer summary of one step (its documentation of workflow commands)."""


def summary_tables(outcomes: Sequence[Outcome], view: View | None = None) -> list[Table]:
    """Every table of a run; last, how many cases of each trainer succeeded, and why not.

    The notes below say what was assumed about values that logical counting does not have.
    """
    if not outcomes:
        return []
    view = view or View()
    frame = to_frame(row for outcome in outcomes for row in outcome.rows)
    found = tables(frame, view)
    guessed = [
        f"WARNING: {outcome.case.id}: {part:.0%} of the logical bytes are {operator}, which has no "
        f"rule of its own and was counted by the general one."
        for outcome in outcomes
        for operator, part in guesses(outcome.operators).items()
    ]
    found[:1] = [replace(table, notes=(*table.notes, *guessed)) for table in found[:1]]
    assumed = [f"{o.case.id}: {note}." for o in outcomes for note in o.notes]
    return [
        *found,
        *profile_tables(frame),
        *timeline_tables(frame),
        *(table for outcome in outcomes for table in case_kernel_tables(outcome, view.top)),
        trainer_table(trainer_summary(outcomes), assumed),
    ]


def trainer_table(summary: Sequence[dict[str, Any]], notes: Sequence[str] = ()) -> Table:
    """`trainer_summary` for people; the reason of each failure is said below, then the notes.

    Peak memory that was only predicted has a column of its own.
    """
    lines = pd.DataFrame(summary)
    tried, skipped = lines.ok + lines.failed, lines.skipped.map(", {} skipped".format)
    lines["cases"] = lines.ok.astype(str) + "/" + tried.astype(str)
    lines["cases"] += skipped.where(lines.skipped > 0, "")
    columns: dict[str, Shown] = {
        "trainer": ("trainer", str),
        "instruments": ("instruments", ", ".join),
        "cases\nok": ("cases", str),
        "success": ("success_rate", "{:.0%}".format),
        "peak\nmemory GB": ("peak_memory_bytes", gigabytes),
    }
    if lines.logical_peak_memory_bytes.notna().any():
        columns["logical\npeak GB"] = ("logical_peak_memory_bytes", gigabytes)
    failures = [failure for line in summary for failure in line["failures"]]
    reasons = [f"{failure['error']}: {failure['message']}" for failure in failures]
    return Table.of("Cases by trainer", lines, columns, [*reasons, *notes])


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
    columns = [
        column
        for column in view.columns or usual_columns()
        if column.kind != "spread" and column.smaller_is_better
    ]
    summary = in_order(complete(frame, view.baseline))
    by_instrument = frame.groupby([*AXES, "device", "instrument"], as_index=False)
    tools = by_instrument.agg(tool=("tool", lambda names: ", ".join(dict.fromkeys(names))))
    step = summary[summary.phase == STEP].merge(tools, how="left")
    for _, case in step.groupby([*AXES, "device"], sort=False):
        for column in columns:
            rows = case[case.metric.isin(column.metrics)].dropna(subset=column.kind)
            if column.kind == "ratio":  # that of the baseline is always 1
                rows = rows[rows.trainer != view.baseline]
            for row in rows.head(1).to_dict("records"):
                ratio = f"x {view.baseline}"
                units = {"value": row["unit"], "ratio": ratio, "over_logical": "x logical"}
                entry = {
                    "name": f"{row['device']}/{Case.from_row(row).id}/{column.name}",
                    "unit": units[column.kind],
                    "value": row[column.kind],
                    "extra": f"instrument: {row['instrument']}\ntool: {row['tool']}\n"
                    f"steps: {row['repeats']:.0f}",
                }
                if column.kind == "value" and not pd.isna(row["spread"]):
                    entry["range"] = f"± {row['spread'] / 2:.2%}"
                yield entry


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
