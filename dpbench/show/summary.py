"""Every table of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from dpbench.results.frame import to_frame
from dpbench.results.operators import guesses
from dpbench.results.outcome import Outcome, trainer_summary
from dpbench.show.kernels import case_kernel_tables
from dpbench.show.layout import Table, gigabytes, written
from dpbench.show.profile import profile_tables
from dpbench.show.tables import tables
from dpbench.show.timeline import timeline_tables
from dpbench.show.view import View


def summary_tables(outcomes: Sequence[Outcome], view: View | None = None) -> list[Table]:
    """Every table of a run; last, how many cases of each trainer succeeded, and why not.

    The notes below say what was assumed about values that logical counting does not have.
    """
    if not outcomes:
        return []
    view = view or View()
    frame = to_frame(row for outcome in outcomes for row in outcome.rows)
    assumed = [f"{o.case.id}: {note}." for o in outcomes for note in o.notes]
    found = tables(frame, view)
    if found and (guessed := tuple(_guessed(outcomes))):
        found[0] = replace(found[0], notes=(*found[0].notes, *guessed))
    return [
        *found,
        *profile_tables(frame),
        *timeline_tables(frame),
        *(table for outcome in outcomes for table in case_kernel_tables(outcome, view.top)),
        trainer_table(trainer_summary(outcomes), assumed),
    ]


def _guessed(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The operators whose rule is a guess, and that weigh in a case's logical bytes."""
    for outcome in outcomes:
        for operator, part in guesses(outcome.operators).items():
            yield (
                f"WARNING: {outcome.case.id}: {part:.0%} of the logical bytes are {operator}, "
                f"which has no rule of its own and was counted by the general one."
            )


def trainer_table(summary: Sequence[dict[str, Any]], notes: Sequence[str] = ()) -> Table:
    """`trainer_summary` for people; the reason of each failure is said below, then the notes.

    Peak memory that was only predicted has a column of its own.
    """
    peaks = {"peak\nmemory GB": "peak_memory_bytes"}
    if any(line["logical_peak_memory_bytes"] is not None for line in summary):
        peaks["logical\npeak GB"] = "logical_peak_memory_bytes"
    cells = [
        [
            line["trainer"],
            ", ".join(line["instruments"]),
            f"{line['ok']}/{line['ok'] + line['failed']}"
            + (f", {line['skipped']} skipped" if line["skipped"] else ""),
            written(line["success_rate"], "{:.0%}".format),
            *(written(line[key], gigabytes) for key in peaks.values()),
        ]
        for line in summary
    ]
    failures = [failure for line in summary for failure in line["failures"]]
    reasons = [f"{failure['error']}: {failure['message']}" for failure in failures]
    headers = ["trainer", "instruments", "cases\nok", "success", *peaks]
    return Table("Cases by trainer", headers, cells, (*reasons, *notes))
