"""Every table of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dpbench.files import write_text
from dpbench.results.by_trainer import trainer_summary
from dpbench.results.frame import to_frame
from dpbench.results.outcome import Outcome
from dpbench.show.by_trainer import trainer_table
from dpbench.show.kernels import case_kernel_tables
from dpbench.show.layout import Table, as_markdown
from dpbench.show.profile import profile_tables
from dpbench.show.tables import tables
from dpbench.show.view import View


def summary_tables(outcomes: Sequence[Outcome], view: View | None = None) -> list[Table]:
    """Every table of a run, then how many cases of each trainer succeeded, and why not.

    Below are the notes: what was assumed about values that logical counting does not have.
    """
    view = view or View()
    frame = to_frame(row for outcome in outcomes for row in outcome.rows)
    found = tables(frame, view) + profile_tables(frame)
    for outcome in outcomes:
        found += case_kernel_tables(outcome, view.top)
    assumed = [f"{o.case.id}: {note}." for o in outcomes for note in o.notes]
    return [*found, trainer_table(trainer_summary(outcomes), assumed)] if outcomes else found


def write_markdown(path: Path, outcomes: Sequence[Outcome], view: View | None = None) -> None:
    """Write a run's tables."""
    write_text(path, as_markdown(summary_tables(outcomes, view)))
