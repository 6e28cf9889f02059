"""The gate: applies limits to a run and its reference, and lists what could not be judged.

A limit judges every case, instrument, metric and phase that the session was asked for and the
reference has. Numbers that were not asked for are only noted. The gate fails if a requested number
is missing, or if a limit judged nothing. A session judges once, at its end. ``dpbench compare``
does the same with two saved runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from dpbench.core.case import AXES
from dpbench.core.metrics import METRICS
from dpbench.core.subject import Subject, samples_poisson, subject_from
from dpbench.results.changes import grown_memory, largest_changes
from dpbench.results.compare import CHANGES, Threshold, other_baseline, pairs
from dpbench.results.conditions import differing_conditions
from dpbench.results.kernels import ELSEWHERE, NO_FLOPS, NOT_COUNTED
from dpbench.results.outcome import COMPLETE
from dpbench.results.rows import NO_HARDWARE, STEP
from dpbench.results.run import Run

CasesAsked = Collection[tuple[Subject, str]]
"""The cases that a session was asked to measure, each with the name of an instrument."""

NAMED = 10
"""How many cases a line names; further ones are only counted."""


@dataclass(frozen=True)
class Unjudged:
    """The cases that a limit could not judge, and why. Without cases: the limit judged nothing."""

    limit: str
    cases: list[str]
    why: str

    def __str__(self) -> str:
        about = f" of {listed(self.cases)}" if self.cases else ""
        return f"{self.limit} judged nothing{about}: {self.why}"


@dataclass(frozen=True)
class Verdict:
    """How a run differs from its reference, and which limits it exceeds.

    Args:
        changes: the columns `CHANGES` of each requested number whose case both have; ratios only
            where both have the baseline.
        judged: the rows that each limit judged, with ``limit`` (the allowed change, in the metric's
            unit), ``threshold`` (the limit as written) and ``regressed``.
        regressions: the rows that exceed their limit, as plain JSON types, with `largest_changes`.
        unjudged: requested numbers that a limit could not judge.
        notes: what was not compared, other differences, and defects of the reference.
        memory: the functions of scripts that hold more or less at the peak, see `grown_memory`.
    """

    changes: pd.DataFrame
    judged: pd.DataFrame
    regressions: list[dict[str, Any]]
    unjudged: list[Unjudged]
    notes: list[str]
    memory: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def merge(cls, verdicts: Sequence[Verdict]) -> Verdict:
        """Merge the verdicts of several limits on the same two runs; each finding occurs once."""
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

    @property
    def passed(self) -> bool:
        """Whether the limits judged all that they had to, and none is exceeded."""
        return not (self.regressions or self.unjudged)


@dataclass(frozen=True)
class Gate:
    """A run and the reference that it is compared with.

    Args:
        before: the reference; a run without rows if there is no reference.
        after: a saved run, or the unfinished run of a session.
        asked: the cases to compare; None for all that either run has.
        across: also compare numbers of different devices.
        first_run_ok: accept cases that the reference lacks.
    """

    before: Run
    after: Run
    asked: CasesAsked | None = None
    across: bool = False
    first_run_ok: bool = False

    def judge(self, limits: Sequence[Threshold] = (), asked: CasesAsked | None = None) -> Verdict:
        """Compare the two, and apply the limits.

        Args:
            limits: the largest changes that are allowed.
            asked: the cases that the limits judge; None for all that are compared.
        """
        with METRICS.including(self.after.metrics, self.before.metrics):
            return self._judge(limits, self.asked if asked is None else asked)

    def _judge(self, limits: Sequence[Threshold], asked: CasesAsked | None) -> Verdict:
        compared, after, judged, unjudged = self.compared, self.after, [], list[Unjudged]()
        inside = compared if asked is self.asked else _of(compared, asked)
        for limit in limits:
            about = inside[(inside.metric == limit.metric) & (inside.phase == limit.phase)]
            rows = about.dropna(subset=["before", "after"])
            allowed = limit.exceeded(rows.before, rows.after)
            judged.append(rows[[*CHANGES, "of"]].join(allowed).assign(threshold=str(limit)))
            unjudged += self._unjudged(limit, about)
        unjudged += self._without_rows(asked) if limits else ()
        if limits and after.status != COMPLETE and self.asked is None:
            counted = f"{len(after.outcomes)} of {after.cases_asked or 'its'} cases"
            why = f"{after.name} was interrupted, with {counted}"
            unjudged.append(Unjudged("a limit", [], why))
        nothing = pd.DataFrame(columns=[*CHANGES, "of", "limit", "regressed", "threshold"])
        table = pd.concat(judged, ignore_index=True) if judged else nothing
        # Ratios that only one run has are not shown.
        is_shown = compared.before.notna() & compared.shared
        is_shown &= compared.after.notna() | (compared.of == "")
        cases = dict.fromkeys(each.case for each in after.outcomes if each.memory_lines)
        return Verdict(
            compared.loc[is_shown, CHANGES].reset_index(drop=True),
            table,
            self._regressions(table),
            unjudged,
            [*self._notes()],
            [change for case in cases for change in grown_memory(self.before, after, case)],
        )

    @cached_property
    def compared(self) -> pd.DataFrame:
        """The numbers of either run that were asked for, side by side."""
        return _of(pairs(self.before, self.after, across=self.across), self.asked)

    def _unjudged(self, limit: Threshold, about: pd.DataFrame) -> Iterator[Unjudged]:
        """The cases that a limit could not judge, by reason; or that it judged nothing at all."""
        cases: dict[str, dict[str, None]] = {}
        for case, row in _by_case(about):
            if why := self._why_not(case, row):
                cases.setdefault(why, {})[case.id] = None
        yield from (Unjudged(str(limit), [*names], why) for why, names in cases.items())
        if cases or about.before.notna().any() or (self.first_run_ok and not about.empty):
            return
        where = f"in phase {limit.phase}" if limit.phase != STEP else "of the step"
        nothing = f"{self.before.name} has no {limit.metric} {where} of what was asked for"
        other = other_baseline(self.before, self.after) if limit.of else ""
        yield Unjudged(str(limit), [], other or nothing)

    def _without_rows(self, asked: CasesAsked | None) -> Iterator[Unjudged]:
        """Cases without a number in either run, though one run tried to measure them."""
        tried = [*self.before.outcomes, *self.after.outcomes]
        known = {case for run in (self.before, self.after) for case, _ in run.places}
        of_asked = [o for o in tried if asked is None or not {*o.asked}.isdisjoint(asked)]
        if names := {outcome.case.id: None for outcome in of_asked if outcome.case not in known}:
            yield Unjudged("a limit", [*names], "neither run has a number of it")

    def _why_not(self, case: Subject, row: Mapping[str, Any]) -> str:
        """Why a number is not judged; empty if it is judged or need not be."""
        if pd.isna(row["after"]):
            return self._lacking(self.after, case, row)
        if not pd.isna(row["before"]):
            return (
                self._other_ranks(row)
                or self._fewer_steps(case, row)
                or self._not_counted(case, row)
            )
        if self.first_run_ok and not row["steps_present"] < row["steps"]:
            return ""
        devices = self.before.places.get((case, row["instrument"]), ())
        if not devices or not (self.across or row["device"] in devices):
            return "" if self.asked is None else f"nothing to compare with in {self.before.name}"
        return self._lacking(self.before, case, row)

    def _lacking(self, run: Run, case: Subject, row: Mapping[str, Any]) -> str:
        """Why a run lacks a number."""
        metric, phase, instrument = row["metric"], row["phase"], row["instrument"]
        for outcome in run.outcomes:
            if outcome.case == case and outcome.error:
                return f"failed in {run.name}: {outcome.error}"
        if not (devices := run.places.get((case, instrument))):
            return f"not in {run.name}"
        if not self.across and row["device"] not in devices:
            return f"on {listed(devices)} in {run.name}, not on {row['device']}"
        where = "" if phase == STEP else f" in phase {phase}"
        steps, steps_present = (
            row[f"{name}{'_new' * (run is self.after)}"] for name in ("steps", "steps_present")
        )
        if steps_present < steps:
            return (
                f"only {steps_present:.0f} of {steps:.0f} steps have {metric}{where} in {run.name}"
            )
        if row["of"]:
            needed = case.with_trainer(run.baseline).id
            return f"no {row['of']}{where} of its baseline {needed} to divide by in {run.name}"
        return f"no {metric} by {instrument}{where} in {run.name}"

    def _other_ranks(self, row: Mapping[str, Any]) -> str:
        """Whether a script ran with another number of ranks, which its case does not record."""
        there, here = row["ranks"], row["ranks_new"]
        if there == here:
            return ""
        return f"{self.before.name} has {there:.0f} ranks of it, {self.after.name} {here:.0f}"

    def _fewer_steps(self, case: Subject, row: Mapping[str, Any]) -> str:
        """Whether steps are missing that the reference has, unless fewer were asked for.

        With Poisson batches, runs of equally many steps have the same batch sizes; others have
        another mean size.
        """
        asked = [
            run.session.get("settings", {}).get(row["instrument"], {}).get("steps")
            for run in (self.before, self.after)
        ]
        there, here = row["steps"], row["steps_new"]
        if here != there and samples_poisson(case):
            return (
                f"Poisson batches: {self.before.name} has {there:.0f} steps of it, here {here:.0f}"
            )
        if here >= there or (None not in asked and asked[0] != asked[1]):
            return ""
        return f"{self.before.name} has {there:.0f} steps of it, {self.after.name} only {here:.0f}"

    def _not_counted(self, case: Subject, row: Mapping[str, Any]) -> str:
        """Why a count is not judged: logical counting left out more than in the reference.

        Work in other threads, or of operators left out, is unknown and may have grown.
        """
        if row["device"] != NO_HARDWARE:
            return ""
        before, after = (
            {note for o in run.outcomes if o.case == case for note in o.notes}
            for run in (self.before, self.after)
        )
        if row["metric"] == "flops" or row["of"] == "flops":
            unknown = sorted(note for note in before | after if note.startswith(NO_FLOPS))
            if unknown:
                return unknown[0]
        before -= {ELSEWHERE}
        fresh = sorted(note for note in after - before if note.startswith(NOT_COUNTED))
        return f"{fresh[0]} in {self.after.name}" if fresh else ""

    def _notes(self) -> Iterator[str]:
        """Notes: what was not compared, how the sessions differ, and which run is the reference."""
        before, after = self.before, self.after
        if before.frame.empty:
            yield f"{before.name} has nothing to compare with yet"
            return
        asked_old, asked_new = (
            [key for key in run.places if self.asked is None or key in self.asked]
            for run in (before, after)
        )
        for what, mine, others in (
            ("not asked for, and so not compared", [*before.places], asked_old),
            (f"not in {after.name}", asked_old, after.places),
            (f"not in {before.name}", asked_new, before.places),
        ):
            if names := _missing(mine, others):
                yield f"{what}: {listed(names)}"
        differences = [*differing_conditions(before, after), other_baseline(before, after)]
        if any(differences):
            yield f"different from {before.name}: {'; '.join(filter(None, differences))}"
        if before.status != COMPLETE:
            yield f"{before.name} was interrupted: it has what was finished until then"
        elif before.verdict != COMPLETE:
            yield f"{before.name} did not pass its own comparison: it is {before.verdict}"

    def _regressions(self, judged: pd.DataFrame) -> list[dict[str, Any]]:
        """The rows that exceed their limit, as plain JSON types, NaN as None."""
        worse = judged[judged.regressed.astype(bool)].drop(columns="regressed")
        regressions = []
        for case, row in _by_case(worse.astype(object).where(worse.notna(), None)):
            cases = [case, case.with_trainer(self.after.baseline)] if row["of"] else [case]
            by_case = [largest_changes(self.before, self.after, each, row) for each in cases]
            largest = [change for changes in by_case for change in changes]
            regressions.append(row | {"reference": self.before.name, "largest_changes": largest})
        return regressions


def _of(pairs: pd.DataFrame, asked: CasesAsked | None) -> pd.DataFrame:
    """The numbers that were asked for."""
    if asked is None:
        return pairs
    names = {(*case.columns.values(), name) for case, name in asked}
    places = zip(*(pairs[column] for column in (*AXES, "instrument")), strict=True)
    return pairs.loc[[place in names for place in places]]


def _distinct(entries: Iterable[Any]) -> list[Any]:
    known: list[Any] = []
    for entry in entries:
        known += [entry] if entry not in known else []
    return known


def _by_case(rows: pd.DataFrame) -> Iterator[tuple[Subject, dict[str, Any]]]:
    for row in rows.to_dict("records"):
        yield subject_from(row), {str(name): value for name, value in row.items()}


def _missing(mine: Sequence[tuple[Subject, str]], others: CasesAsked) -> list[str]:
    """The cases that ``others`` lack, with instruments if it has the case by another one."""
    partly, named = {case for case, _ in {*mine} & {*others}}, dict[Subject, list[str]]()
    for case, instrument in mine:
        if (case, instrument) not in others:
            named.setdefault(case, []).append(instrument)
    return [f"{c.id} ({', '.join(by)})" if c in partly else c.id for c, by in named.items()]


def listed(names: Sequence[str]) -> str:
    """Names in one line, which says how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"
