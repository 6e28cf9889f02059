"""The gate: checks limits on the changes between a reference run and a new run.

A limit is checked for each requested case and instrument if both runs have the number that the
limit is about. The gate fails if a limit is exceeded. It also fails if a limit could not be checked
for a requested case, for example because the new run lacks the number. A case that was not
requested is not checked, but a note names the case. Cases that the reference lacks are accepted if
`Gate.first_run_ok` is true or `Gate.asked` is None. A session uses the gate at its end. ``dpbench
compare`` and ``dpbench bisect`` use the gate for saved runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from dpbench.core.case import AXES
from dpbench.core.metrics import METRICS
from dpbench.core.subject import Subject, samples_poisson, subject_from
from dpbench.results.changes import changes_of_all, largest_changes
from dpbench.results.compare import CHANGES, Limit, Unjudged, Verdict, listed, other_baseline, pairs
from dpbench.results.conditions import differing_conditions
from dpbench.results.kernels import ELSEWHERE, NO_FLOPS, NOT_COUNTED, STEP_LOST
from dpbench.results.outcome import COMPLETE
from dpbench.results.rows import NO_HARDWARE, STEP
from dpbench.results.run import Run

RequestedCases = Collection[tuple[Subject, str]]
"""The cases that a session should measure, each with the name of an instrument."""


@dataclass(frozen=True)
class Gate:
    """A new run and the reference run with which the new run is compared.

    Args:
        before: the reference. If there is no reference, this is a run without rows.
        after: a saved run, or the unfinished run of a session.
        asked: the cases to compare. If None, all cases of both runs are compared.
        across: whether numbers of different devices are compared, too.
        first_run_ok: whether numbers that the reference lacks are accepted.
    """

    before: Run
    after: Run
    asked: RequestedCases | None = None
    across: bool = False
    first_run_ok: bool = False

    def check_limits(
        self, limits: Sequence[Limit] = (), asked: RequestedCases | None = None
    ) -> Verdict:
        """Compare the two runs, and check the limits.

        Args:
            limits: the limits on the changes.
            asked: the cases for which limits are checked. If None, limits are checked for all
                cases that are compared.
        """
        with METRICS.including(self.after.metrics, self.before.metrics):
            return self._judge(limits, self.asked if asked is None else asked)

    def _judge(self, limits: Sequence[Limit], asked: RequestedCases | None) -> Verdict:
        compared, after, judged, unjudged = self.compared, self.after, [], list[Unjudged]()
        for limit in limits:
            about = (
                self._about(limit) if asked is self.asked else _requested(self._about(limit), asked)
            )
            rows = about.dropna(subset=["before", "after"])
            allowed = limit.exceeded(rows.before, rows.after)
            judged.append(rows[[*CHANGES, "of"]].join(allowed).assign(threshold=str(limit)))
            unjudged += self._unjudged(limit, about)
        unjudged += self._without_rows(asked) if limits else ()
        if limits and after.status != COMPLETE and self.asked is None:
            counted = f"{len(after.outcomes)} of {after.cases_asked or 'its'} cases"
            why = f"{after.name} was interrupted after {counted}"
            unjudged.append(Unjudged("a limit", [], why))
        nothing = pd.DataFrame(columns=[*CHANGES, "of", "limit", "regressed", "threshold"])
        table = pd.concat(judged, ignore_index=True) if judged else nothing
        is_shown = compared.before.notna() & compared.shared
        is_shown &= compared.after.notna() | (compared.of == "")
        return Verdict(
            compared.loc[is_shown, CHANGES].reset_index(drop=True),
            table,
            self._regressions(table),
            unjudged,
            [*self._notes()],
            self._largest,
        )

    def cases(self, limit: Limit) -> dict[tuple[Subject, str], bool]:
        """Return the cases with a number for a limit, and whether the reference has the number."""
        with METRICS.including(self.after.metrics, self.before.metrics):
            rows = _by_case(self._about(limit))
            return {(case, row["instrument"]): not pd.isna(row["before"]) for case, row in rows}

    def _about(self, limit: Limit) -> pd.DataFrame:
        at = (self.compared.metric == limit.metric) & (self.compared.phase == limit.phase)
        return self.compared[at]

    @cached_property
    def _largest(self) -> list[dict[str, Any]]:
        return changes_of_all(self.before, self.after, self.compared)

    @cached_property
    def compared(self) -> pd.DataFrame:
        """The numbers of the requested cases in both runs, see `pairs`."""
        return _requested(pairs(self.before, self.after, across=self.across), self.asked)

    def _unjudged(self, limit: Limit, about: pd.DataFrame) -> Iterator[Unjudged]:
        """Yield the cases for which a limit could not be checked, grouped by reason.

        If the reference has no number for the limit in any case, and no case was yielded, yield one
        entry without cases. With `first_run_ok`, do so only if the new run lacks the number, too.
        """
        cases: dict[str, dict[str, None]] = {}
        for case, row in _by_case(about):
            if why := self._why_not(case, row):
                cases.setdefault(why, {})[case.id] = None
        yield from (Unjudged(str(limit), [*names], why) for why, names in cases.items())
        if cases or about.before.notna().any() or (self.first_run_ok and not about.empty):
            return
        where = f"in phase {limit.phase}" if limit.phase != STEP else "of the step"
        nothing = f"{self.before.name} has no {limit.metric} {where} for any requested case"
        other = other_baseline(self.before, self.after) if limit.of else ""
        yield Unjudged(str(limit), [], other or nothing)

    def _without_rows(self, asked: RequestedCases | None) -> Iterator[Unjudged]:
        """Yield an entry with the requested cases that have an outcome but no number in any run."""
        outcomes = [*self.before.outcomes, *self.after.outcomes]
        known = {case for run in (self.before, self.after) for case, _ in run.places}
        requested = [o for o in outcomes if asked is None or not {*o.asked}.isdisjoint(asked)]
        if names := {outcome.case.id: None for outcome in requested if outcome.case not in known}:
            yield Unjudged("a limit", [*names], "there is no number in either run")

    def _why_not(self, case: Subject, row: Mapping[str, Any]) -> str:
        """Return why a limit cannot be checked for a number, or an empty string.

        The string is also empty if the limit need not be checked, because only the new run has the
        number and this is accepted.
        """
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
            return "" if self.asked is None else f"{self.before.name} has no number to compare with"
        return self._lacking(self.before, case, row)

    def _lacking(self, run: Run, case: Subject, row: Mapping[str, Any]) -> str:
        """Return why a run lacks a number."""
        metric, phase, instrument = row["metric"], row["phase"], row["instrument"]
        for outcome in run.outcomes:
            if outcome.case == case and outcome.error:
                return f"failed in {run.name}: {outcome.error}"
        if not (devices := run.places.get((case, instrument))):
            return f"not in {run.name}"
        if not self.across and row["device"] not in devices:
            return f"{run.name} measured it on {listed(devices)}, not on {row['device']}"
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
            return f"{run.name} has no {row['of']}{where} of the baseline {needed} to divide by"
        return f"{run.name} has no {metric}{where} by {instrument}"

    def _other_ranks(self, row: Mapping[str, Any]) -> str:
        """Return how the numbers of ranks differ, or an empty string if they are equal.

        The numbers can differ only for a script, because a case of a grid has a fixed number of
        ranks.
        """
        before, after = row["ranks"], row["ranks_new"]
        if before == after:
            return ""
        return f"{self.before.name} has {before:.0f} ranks, but {self.after.name} has {after:.0f}"

    def _fewer_steps(self, case: Subject, row: Mapping[str, Any]) -> str:
        """Return how the numbers of steps differ, or an empty string if the limit can be checked.

        More steps than in the reference are accepted. Fewer steps are accepted only if the settings
        of the runs request different numbers of steps. With Poisson batches, the numbers of steps
        must be equal, because only then do both runs have the same batch sizes.
        """
        requested = [
            run.session.get("settings", {}).get(row["instrument"], {}).get("steps")
            for run in (self.before, self.after)
        ]
        before, after = row["steps"], row["steps_new"]
        poisson = samples_poisson(case)
        if after >= before and not (poisson and after != before):
            return ""
        if not poisson and None not in requested and requested[0] != requested[1]:
            return ""
        needs = "Poisson batches need equally many steps: " if poisson else ""
        return (
            f"{needs}{self.before.name} has {before:.0f} steps, but {self.after.name} has "
            f"{after:.0f}"
        )

    def _not_counted(self, case: Subject, row: Mapping[str, Any]) -> str:
        """Return a note on uncounted operators that can hide growth, or an empty string.

        An operator that was counted only in the reference can hide growth. Work in other threads,
        and operators without counted FLOPs, can hide growth even if neither run counted them.
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
        before = {note for note in before if not note.startswith((ELSEWHERE, STEP_LOST))}
        fresh = sorted(note for note in after - before if note.startswith(NOT_COUNTED))
        return f"{fresh[0]} in {self.after.name}" if fresh else ""

    def _notes(self) -> Iterator[str]:
        """Yield notes on cases that were not compared, different conditions and a failed run."""
        before, after = self.before, self.after
        if before.frame.empty:
            yield f"{before.name} has nothing to compare with yet"
            return
        requested_before, requested_after = (
            [key for key in run.places if self.asked is None or key in self.asked]
            for run in (before, after)
        )
        for what, cases, others in (
            ("not compared, because not requested", [*before.places], requested_before),
            (f"not in {after.name}", requested_before, after.places),
            (f"not in {before.name}", requested_after, before.places),
        ):
            if names := _missing(cases, others):
                yield f"{what}: {listed(names)}"
        differences = [*differing_conditions(before, after), other_baseline(before, after)]
        if any(differences):
            yield f"different from {before.name}: {'; '.join(filter(None, differences))}"
        if before.status != COMPLETE:
            yield f"{before.name} was interrupted, so it has only the cases finished until then"
        elif before.verdict != COMPLETE:
            yield f"{before.name} did not pass its own comparison: its verdict is {before.verdict}"

    def _regressions(self, judged: pd.DataFrame) -> list[dict[str, Any]]:
        """Return the rows that exceed their limit, as plain JSON types. NaN becomes None."""
        worse = judged[judged.regressed.astype(bool)].drop(columns="regressed")
        regressions = []
        for case, row in _by_case(worse.astype(object).where(worse.notna(), None)):
            cases = [case, case.with_trainer(self.after.baseline)] if row["of"] else [case]
            by_case = [largest_changes(self.before, self.after, each, row) for each in cases]
            largest = [change for changes in by_case for change in changes]
            regressions.append(row | {"reference": self.before.name, "largest_changes": largest})
        return regressions


def _requested(pairs: pd.DataFrame, asked: RequestedCases | None) -> pd.DataFrame:
    if asked is None:
        return pairs
    names = {(*case.columns.values(), name) for case, name in asked}
    places = zip(*(pairs[column] for column in (*AXES, "instrument")), strict=True)
    return pairs.loc[[place in names for place in places]]


def _by_case(rows: pd.DataFrame) -> Iterator[tuple[Subject, dict[str, Any]]]:
    for row in rows.to_dict("records"):
        yield subject_from(row), {str(name): value for name, value in row.items()}


def _missing(cases: Sequence[tuple[Subject, str]], others: RequestedCases) -> list[str]:
    """List the cases that ``others`` lacks.

    If ``others`` has a case with some but not all of its instruments, the missing instruments are
    named.
    """
    partly, named = {case for case, _ in {*cases} & {*others}}, dict[Subject, list[str]]()
    for case, instrument in cases:
        if (case, instrument) not in others:
            named.setdefault(case, []).append(instrument)
    return [f"{c.id} ({', '.join(by)})" if c in partly else c.id for c, by in named.items()]
