"""Outputs: functions that turn runs into the content of a file, and all tables of a run.

An output is a function of runs and `TableOptions` that returns text or bytes. `OUTPUTS` has an
output for each supported file extension. A session writes one run to a file. ``dpbench show`` can
write several runs to one file, but some outputs refuse several runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from dpbench.core.errors import ConfigurationError, DpbenchError, own_line
from dpbench.core.files import in_words, write_bytes
from dpbench.core.registry import OUTPUTS
from dpbench.core.subject import Subject
from dpbench.results.kernels import guesses
from dpbench.results.outcome import COMPLETE, Outcome, trainer_summary
from dpbench.results.rows import COLUMNS, STEP
from dpbench.results.run import Run
from dpbench.show.comparison import amount
from dpbench.show.layout import Shown, Table, as_markdown, filled
from dpbench.show.profile import kernel_tables, recorded_tables
from dpbench.show.tables import tables
from dpbench.show.view import TableOptions

Output = Callable[[Sequence[Run], TableOptions], str | bytes]


def write_output(kind: str, path: Path, runs: Sequence[Run], view: TableOptions) -> None:
    """Write runs to a file with the output ``kind``. If the output fails, the file stays unchanged.

    Raises:
        ConfigurationError: the file cannot be written, or an output from outside dpbench failed.
    """
    output: Output = OUTPUTS[kind]
    try:
        content = output(runs, view)
        write_bytes(path, content if isinstance(content, bytes) else content.encode())
    except OSError as error:
        raise ConfigurationError(in_words(error)) from error
    except Exception as error:
        if isinstance(error, DpbenchError) or OUTPUTS.is_builtin(kind):
            raise
        why = f"{type(error).__name__}: {error}{own_line(error.__traceback__)}"
        raise ConfigurationError(f"{path}: the output {kind!r} failed: {why}") from error


def json_document(runs: Sequence[Run], view: TableOptions) -> str:
    """Return the document of one run as JSON text. Raise an error for several runs."""
    if len(runs) > 1:
        names = ", ".join(run.name for run in runs)
        raise ConfigurationError(f"a JSON file can have one run only, not {names}: name one run")
    return runs[0].text


def markdown_tables(runs: Sequence[Run], view: TableOptions) -> str:
    """Return the tables of each run. For an interrupted run, a line counts the missing cases."""
    text = ""
    for run in runs:
        missing = run.cases_asked - len({outcome.case for outcome in run.outcomes})
        if run.status != COMPLETE and missing > 0:
            text += f"Not complete: {missing} of the requested cases are missing.\n\n"
        text += as_markdown(summary_tables(run, view))
    return text


def labels_of(outcomes: Iterable[Outcome]) -> dict[str, str]:
    """Return the labels of each trainer on one line, e.g. ``clips flat``."""
    return {o.case.trainer: ", ".join(map(" ".join, o.labels.items())) for o in outcomes}


def csv_rows(runs: Sequence[Run], view: TableOptions) -> str:
    """Return the long table as CSV, with exact numbers and each trainer's labels.

    The long table has no ratios, because a ratio is computed over all steps, and each row is about
    one step. An apostrophe is put before a text that a spreadsheet would run as a formula, as
    OWASP's "CSV Injection" advises.
    """
    rows = [row for run in runs for row in run.document["rows"]]
    frame = pd.DataFrame(rows, columns=COLUMNS, dtype=object)
    labels = labels_of(outcome for run in runs for outcome in run.outcomes)
    frame["labels"] = frame.trainer.map(labels)
    return frame.map(_no_formula).to_csv(index=False, lineterminator="\n")


def _no_formula(cell: object) -> object:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(tuple("=+-@\t\r")) else cell


# --- all tables of a run ---------------------------------------------------------------------

LINE_WIDTH = 40
"""The width in characters at which the name of a source line is wrapped."""

SMALL = 0.01
"""A source line is shown if at least this share of the recorded memory was allocated there."""

STEP_SUMMARY = "GITHUB_STEP_SUMMARY"


def summary_tables(run: Run, view: TableOptions | None = None) -> list[Table]:
    """Make all tables of a run. The last table counts the successful cases of each trainer.

    Below the last table are the reasons of failures and the notes of cases. For example, a note
    says what logical counting assumed where a step depends on the values of tensors.
    """
    if not (outcomes := run.outcomes):
        return []
    view = view or TableOptions()
    summary = run.summary
    listed = tables(summary, view, outcomes)
    guessed = _of_cases(
        (
            outcome.case,
            f"{part:.0%} of the logical bytes are a guess from the schema of {operator}, because "
            f"dpbench does not know the operator's kernels",
        )
        for outcome in outcomes
        for operator, part in guesses(outcome.operators).items()
    )
    guessed = [f"WARNING: {line}" for line in guessed]
    listed[:1] = [replace(table, notes=(*table.notes, *guessed)) for table in listed[:1]]
    assumed = _of_cases((o.case, note) for o in outcomes for note in o.notes)
    return [
        *listed,
        *recorded_tables(summary, run.frame),
        *(memory_table(o, view.top) for o in outcomes if o.memory_lines),
        *(table for o in outcomes for table in kernel_tables(o, summary, view.top)),
        trainer_table(trainer_summary(outcomes), assumed),
    ]


def _of_cases(notes: Iterable[tuple[Subject, str]]) -> list[str]:
    """Return each note once, with the first case for which it holds and the number of others."""
    cases: dict[str, dict[Subject, None]] = {}
    for case, note in notes:
        cases.setdefault(note, {})[case] = None
    lines = []
    for note, (first, *others) in cases.items():
        more = f" and {len(others)} more case{'s' * (len(others) > 1)}" if others else ""
        lines.append(f"{first.id}{more}: {note}.")
    return lines


def memory_table(outcome: Outcome, top: int) -> Table:
    """Make a table of the source lines that allocated most of the peak memory.

    The table has at most ``top`` lines.
    """
    lines = pd.DataFrame(map(asdict, outcome.memory_lines))
    lines["share"] = lines.held_bytes / lines.held_bytes.sum()
    peaks = [row for row in outcome.rows if row.metric == "peak_memory_bytes"]
    peak = max((row for row in peaks if row.phase != STEP), key=lambda row: row.value)
    columns: dict[str, Shown] = {
        "allocated at": ("line", partial(filled, width=LINE_WIDTH)),
        "in": ("phase", str),
        "bytes": ("held_bytes", partial(amount, unit="B", beside=peak.value)),
        "share": ("share", "{:.1%}".format),
    }
    held = amount(peak.value, "B")
    title = f"{outcome.case.id}: counted memory at the peak, {held} in {peak.phase}"
    return Table.of(title, lines[lines.share >= SMALL].head(top), columns)


def trainer_table(summary: Sequence[dict[str, Any]], notes: Sequence[str] = ()) -> Table:
    """Make a table of cases by trainer, from the result of `trainer_summary`.

    Below the table are the reasons of failures and the notes. Peak memory that was counted without
    hardware has a separate column.
    """
    if not summary:
        return Table("Cases by trainer", [], [])
    lines = pd.DataFrame(summary)
    lines["instruments"] = lines.instruments.map(", ".join)
    lines["cases"] = lines.ok.astype(str) + "/" + (lines.ok + lines.failed).astype(str)
    columns: dict[str, Shown] = {
        "trainer": ("trainer", str),
        "instruments": ("instruments", str),
        "cases\nok": ("cases", str),
        "success": ("success_rate", "{:.0%}".format),
        "peak\nmemory": ("peak_memory_bytes", partial(amount, unit="B")),
    }
    if lines.logical_peak_memory_bytes.notna().any():
        columns["logical\npeak"] = ("logical_peak_memory_bytes", partial(amount, unit="B"))
    failures = [failure for line in summary for failure in line["failures"]]
    reasons = [f"{failure['error']}: {failure['message']}" for failure in failures]
    return Table.of("Cases by trainer", lines, columns, [*reasons, *notes])


def append_step_summary(tables: Sequence[Table]) -> str | None:
    """Append tables to GitHub's summary of a workflow step, if this process runs in one.

    Returns:
        A warning if the summary cannot be written, otherwise None.
    """
    name = os.environ.get(STEP_SUMMARY)
    if not name or not tables:
        return None
    try:
        with Path(name).open("a", encoding="utf-8", errors="replace") as stream:
            stream.write("\n" + as_markdown(tables))
    except OSError as error:
        return f"{STEP_SUMMARY}: {name}: {error.strerror}"
    return None
