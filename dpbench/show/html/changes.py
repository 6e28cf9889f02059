"""The changes from the first run of a page to each other run: numbers, operators, conditions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pandas as pd

from dpbench.core.files import printable
from dpbench.results.changes import kernel_changes, operator_changes
from dpbench.results.conditions import differing_conditions
from dpbench.results.gate import Gate
from dpbench.results.run import Run
from dpbench.show.comparison import amount, comparison_tables
from dpbench.show.layout import Shown, Table

MOST_LINES = 60
"""The most operators and kernels in a list."""

SMALLEST = 0.001
"""A change of at most this share of the largest change is left out."""


@dataclass(frozen=True)
class Changes:
    """The changes from one run to another.

    Args:
        title: the names of the two runs.
        grown: the operators and kernels whose bytes changed most.
        steps: tables that compare the metrics of whole steps.
        differences: other differences, such as versions, settings, code and machine.
    """

    title: str
    grown: Table
    steps: Sequence[Table]
    differences: Sequence[str]


def changes(runs: Sequence[Run]) -> list[Changes]:
    """Return the changes from the first run to each later run with numbers of the same cases."""
    return [found for after in runs[1:] if (found := _changes(runs[0], after))]


def _changes(before: Run, after: Run) -> Changes | None:
    found = Gate(before, after).compare()
    if found.changes.empty:
        return None
    differences = [printable(each) for each in differing_conditions(before, after)]
    title = f"{before.name} → {after.name}"
    return Changes(title, _grown(before, after), comparison_tables(found), differences)


def _grown(before: Run, after: Run) -> Table:
    """List the operators and kernels whose bytes changed most, for cases that both runs have."""
    frames = [frame for frame in _by_case(before, after) if len(frame)]
    found = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame({"change": []})
    found = found.sort_values("change", key=abs, ascending=False, kind="stable")
    found = found[found.change.abs() > SMALLEST * found.change.abs().max()].head(MOST_LINES)
    if found.empty:
        why = "No operator or kernel with changed bytes is known in the cases of both runs."
        return Table("What changed most", [], [], (why,))
    found = found.assign(relative=(found.change / found.before).where(found.before > 0))
    columns: dict[str, Shown] = {
        "change": ("change", lambda size: f"{'+' if size > 0 else '-'}{amount(abs(size), 'B')}"),
        "by": ("relative", "{:+.1%}".format),
        "phase": ("phase", str),
        "operator or kernel": ("name", str),
        "module": ("module", str),
        "line": ("line", str),
        "before": ("before", lambda size: amount(size, "B")),
        "after": ("after", lambda size: amount(size, "B")),
        "case": ("case", str),
    }
    return Table.of("What changed most", found, columns)


def _by_case(before: Run, after: Run) -> Iterator[pd.DataFrame]:
    cases = {outcome.case for outcome in before.outcomes}
    for case in dict.fromkeys(each.case for each in after.outcomes if each.case in cases):
        for found in (operator_changes(before, after, case), kernel_changes(before, after, case)):
            yield found.assign(case=case.id)
