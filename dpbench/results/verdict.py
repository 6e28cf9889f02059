"""The verdict of a gate: changes, exceeded limits, and limits that could not be checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

MOST_NAMES = 10
"""The most names that a line lists. If there are more names, the line has the number of further
names."""


@dataclass(frozen=True)
class Unjudged:
    """The cases for which a limit was not checked, with the reason.

    Without cases, the reason is not about single cases: the reference has no number for the limit,
    the baselines differ, or the new run was interrupted.
    """

    limit: str
    cases: list[str]
    why: str

    def __str__(self) -> str:
        about = f" for {listed(self.cases)}" if self.cases else ""
        return f"{self.limit} was not checked{about}: {self.why}"


@dataclass(frozen=True)
class Verdict:
    """The changes of a run from its reference, and the limits that the run exceeds.

    Args:
        changes: the requested numbers that the reference has, if the same instrument measured the
            case in both runs. The columns are `CHANGES`. A ratio is left out if the new run lacks
            the ratio.
        judged: the rows for which limits were checked, with ``limit`` (the allowed change in the
            metric's unit), ``threshold`` (the limit as written) and ``regressed``.
        regressions: the rows that exceed a limit, as plain JSON types, each with its
            `largest_changes`.
        unjudged: the limits that could not be checked, each with the cases and the reason.
        notes: cases that were not compared, other differences, and why the reference is incomplete
            or failed.
        memory: the functions of scripts whose memory at the peak changed, see `grown_memory`.
    """

    changes: pd.DataFrame
    judged: pd.DataFrame
    regressions: list[dict[str, Any]]
    unjudged: list[Unjudged]
    notes: list[str]
    memory: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def merge(cls, verdicts: Sequence[Verdict]) -> Verdict:
        """Merge the verdicts of several limits on the same two runs.

        Equal regressions are merged into one, and so are equal entries of ``unjudged``.
        """
        first, *others = verdicts
        if not others:
            return first
        return cls(
            first.changes,
            pd.concat([each.judged for each in verdicts if len(each.judged)] or [first.judged]),
            _distinct(row for each in verdicts for row in each.regressions),
            _distinct(row for each in verdicts for row in each.unjudged),
            first.notes,
            first.memory,
        )


def _distinct(entries: Iterable[Any]) -> list[Any]:
    known: list[Any] = []
    for entry in entries:
        known += [entry] if entry not in known else []
    return known


def listed(names: Sequence[str]) -> str:
    """Join at most `MOST_NAMES` names with commas, and append the number of further names."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"{', '.join(names[:MOST_NAMES])}{more}"
