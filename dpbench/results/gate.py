"""The gate: holds a run to limits against its reference, and says what they could not judge.

With a limit given, `Verdict.passed` means that it judged every case, instrument, metric and phase
that the reference has and the session was asked for. What was not asked for is noted and is no
failure; what was asked for and is missing is one. pytest, ``dpbench run`` and ``dpbench compare``
all use `Gate`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from dpbench.case import AXES, SCRIPT, Case
from dpbench.metrics import METRICS
from dpbench.results.compare import CHANGES, Threshold, largest_changes, other_baseline, pairs
from dpbench.results.conditions import premise_differences
from dpbench.results.frame import as_tuples
from dpbench.results.kernels import NOT_COUNTED
from dpbench.results.outcome import COMPLETE
from dpbench.results.rows import NO_HARDWARE, STEP, summed
from dpbench.results.run import Run

CasesAsked = Collection[tuple[Case, str]]
"""The cases that a session was asked to measure, each with the name of an instrument."""

NAMED = 10
"""How many cases a line names; further ones are only counted."""


@dataclass(frozen=True)
class Unjudged:
    """What a limit could not judge, and why; no ``cases`` if it judged nothing at all."""

    limit: str
    cases: list[str]
    why: str

    def __str__(self) -> str:
        about = f" of {listed(self.cases)}" if self.cases else ""
        return f"{self.limit} judged nothing{about}: {self.why}"


@dataclass(frozen=True)
class Verdict:
    """How a run differs from its reference, and what limits say of that.

    Args:
        changes: the columns `CHANGES` of each number that was asked for and whose case both have;
            of a ratio only where both have its baseline.
        judged: the rows that each limit judged, with ``limit`` (the allowed change, in the metric's
            unit), ``threshold`` (the limit as written) and ``regressed``.
        regressions: those that exceed it, as plain JSON types, with `largest_changes`.
        unjudged: what a limit should have judged and could not.
        notes: what was not compared, what else differs, and baselines that moved.
    """

    changes: pd.DataFrame
    judged: pd.DataFrame
    regressions: list[dict[str, Any]]
    unjudged: list[Unjudged]
    notes: list[str]

    @property
    def passed(self) -> bool:
        """Whether the limits judged everything that they had to, and nothing exceeds one."""
        return not (self.regressions or self.unjudged)


@dataclass(frozen=True)
class Gate:
    """A run and the reference that it is compared with.

    Args:
        before: the reference; one without rows if there is none.
        after: a saved run, or a session so far.
        asked: what the session was asked to measure; None stands for all that the reference has.
        across: compare also what different devices measured.
        first_run_ok: what the reference lacks may be measured for the first time.
    """

    before: Run
    after: Run
    asked: CasesAsked | None = None
    across: bool = False
    first_run_ok: bool = False

    def judge(self, limits: Sequence[Threshold] = ()) -> Verdict:
        """Compare the two, and apply the limits."""
        with METRICS.including(self.after.metrics, self.before.metrics):
            return self._judge(limits)

    def _judge(self, limits: Sequence[Threshold]) -> Verdict:
        inside, after, judged, unjudged = self.inside, self.after, [], list[Unjudged]()
        for limit in limits:
            about = _about(inside, limit)
            rows = about.dropna(subset=["before", "after"])
            allowed = limit.exceeded(rows.before, rows.after)
            judged.append(rows[[*CHANGES, "of"]].join(allowed).assign(threshold=str(limit)))
            unjudged += self._unjudged(limit, about)
        if limits and after.status != COMPLETE and self.asked is None:
            counted = f"{len(after.outcomes)} of {after.cases_asked or 'its'} cases"
            why = f"{after.name} was interrupted, with {counted}"
            unjudged.append(Unjudged("a limit", [], why))
        nothing = pd.DataFrame(columns=[*CHANGES, "of", "limit", "regressed", "threshold"])
        table = pd.concat(judged, ignore_index=True) if judged else nothing
        # A ratio that only one of the two has is not shown.
        is_shown = inside.before.notna() & inside.shared
        is_shown &= inside.after.notna() | (inside.of == "")
        return Verdict(
            inside.loc[is_shown, CHANGES].reset_index(drop=True),
            table,
            self._regressions(table),
            unjudged,
            [*self._notes(table, limits)],
        )

    @cached_property
    def pairs(self) -> pd.DataFrame:
        """Every number of either run, side by side."""
        return pairs(self.before, self.after, across=self.across)

    @cached_property
    def inside(self) -> pd.DataFrame:
        """The numbers that were asked for."""
        if self.asked is None:
            return self.pairs
        asked = {(*(getattr(case, axis) for axis in AXES), name) for case, name in self.asked}
        names = as_tuples(self.pairs, [*AXES, "instrument"])
        return self.pairs.loc[[name in asked for name in names]]

    def _unjudged(self, limit: Threshold, about: pd.DataFrame) -> Iterator[Unjudged]:
        """What a limit had to judge and could not, by reason, or that it judged nothing at all."""
        cases: dict[str, dict[str, None]] = {}
        for case, row in _by_case(about):
            if why := self._why_not(case, row):
                cases.setdefault(why, {})[case.id] = None
        yield from (Unjudged(str(limit), [*names], why) for why, names in cases.items())
        if cases or about.before.notna().any() or (self.first_run_ok and not about.empty):
            return
        where = f"in phase {limit.phase}" if limit.phase != STEP else "of the step"
        why = f"neither {self.before.name} nor {self.after.name} has {limit.metric} {where}"
        elsewhere = _about(self.pairs.dropna(subset="before"), limit)
        if limit.of and (other := other_baseline(self.before, self.after)):
            why = other
        elif names := list(dict.fromkeys(case.id for case, _ in _by_case(elsewhere))):
            only = f"{self.before.name} has {limit.metric} {where} of {listed(names)} only"
            why = f"{only}, which was not asked for"
        yield Unjudged(str(limit), [], why)

    def _why_not(self, case: Case, row: Mapping[str, Any]) -> str:
        """Why a number is not judged; empty if it is, or need not be."""
        if pd.isna(row["after"]):
            return self._lacking(self.after, case, row)
        if not pd.isna(row["before"]):
            return self._fewer_steps(row) or self._not_counted(case, row)
        if self.first_run_ok and not row["came"] < row["steps"]:
            return ""
        devices = self.before.places.get(case, {}).get(row["instrument"], ())
        if not devices or not (self.across or row["device"] in devices):
            return "" if self.asked is None else f"nothing to compare with in {self.before.name}"
        return self._lacking(self.before, case, row)

    def _lacking(self, run: Run, case: Case, row: Mapping[str, Any]) -> str:
        """Why a run has no such number."""
        metric, phase, instrument = row["metric"], row["phase"], row["instrument"]
        for outcome in run.outcomes:
            if outcome.case == case and outcome.error:
                how = "skipped" if outcome.skipped else "failed"
                return f"{how} in {run.name}: {outcome.error}"
        by = run.places.get(case, {})
        if instrument not in by:
            return f"{f'without {instrument}' if by else 'not'} in {run.name}"
        if not self.across and row["device"] not in by[instrument]:
            return f"on {listed(by[instrument])} in {run.name}, not on {row['device']}"
        where = "" if phase == STEP else f" in phase {phase}"
        steps, came = (row[f"{name}{'_new' * (run is self.after)}"] for name in ("steps", "came"))
        if came < steps:
            return f"only {came:.0f} of {steps:.0f} steps have {metric}{where} in {run.name}"
        if row["of"]:
            needed = f"the ratio needs its baseline {_baseline(run, case).id}"
            if instrument in run.places.get(_baseline(run, case), {}):
                return f"{needed}, which has nothing to divide by{where} in {run.name}"
            return f"{needed}, which is not in {run.name}"
        return f"no {metric} by {instrument}{where} in {run.name}"

    def _fewer_steps(self, row: Mapping[str, Any]) -> str:
        """Whether steps are missing that the reference has, unless fewer were asked for."""
        asked = [
            run.session.get("settings", {}).get(row["instrument"], {}).get("steps")
            for run in (self.before, self.after)
        ]
        there, here = row["steps"], row["steps_new"]
        if here >= there or (None not in asked and asked[0] != asked[1]):
            return ""
        return f"{self.before.name} has {there:.0f} steps of it, {self.after.name} only {here:.0f}"

    def _not_counted(self, case: Case, row: Mapping[str, Any]) -> str:
        """An operator that logical counting left out, if it did not, or less often, before."""
        if row["device"] != NO_HARDWARE:
            return ""
        before, after = (
            {note for o in run.outcomes if o.case == case for note in o.notes}
            for run in (self.before, self.after)
        )
        fresh = sorted(note for note in after - before if note.startswith(NOT_COUNTED))
        return f"{fresh[0]} in {self.after.name}" if fresh else ""

    def _notes(self, judged: pd.DataFrame, limits: Sequence[Threshold]) -> Iterator[str]:
        """What was not compared, what differs between the sessions, and baselines that moved."""
        if self.before.frame.empty:
            yield f"{self.before.name} has nothing to compare with yet"
            return
        yield from self._not_compared()
        yield from self._differences()
        yield from self._baselines_that_moved(judged, limits)

    def _not_compared(self) -> Iterator[str]:
        """The cases that only one of the two has, or that were not asked for."""
        old, new = (
            [(case, by) for case, places in run.places.items() for by in places]
            for run in (self.before, self.after)
        )
        asked_old, asked_new = (
            [each for each in subjects if self.asked is None or each in self.asked]
            for subjects in (old, new)
        )
        for what, mine, others in (
            ("not asked for, and so not compared", old, asked_old),
            (f"not in {self.after.name}", asked_old, new),
            (f"not in {self.before.name}", asked_new, old),
        ):
            if names := _missing(mine, others):
                yield f"{what}: {listed(names)}"

    def _differences(self) -> Iterator[str]:
        """What differs between the sessions, or is wrong with one of them."""
        before, after = self.before, self.after
        if differences := premise_differences(before, after):
            yield f"different from {before.name}: {'; '.join(differences)}"
        if other := other_baseline(before, after):
            yield other
        was, now = (run.frame["rank"].nunique() for run in (before, after))
        if now not in (was, 0):
            yield f"{before.name} is the sum over {was} ranks, {after.name} over {now}"
        if before.status != COMPLETE:
            yield f"{before.name} was interrupted: it has what was finished until then"
        if before.regressed:
            yield f"{before.name} did not pass its own comparison"
        for run in (before, after):
            if run.repeated:
                yield f"{run.name} has {run.repeated} rows twice, which count once"
        scripts = self.inside[(self.inside.workload == SCRIPT) & (self.inside.phase != STEP)]
        scripts = scripts.dropna(subset=["came", "came_new"])
        moved = scripts[scripts.came * scripts.steps_new != scripts.came_new * scripts.steps]
        for case, row in _by_case(moved.drop_duplicates(summed("metric"))):
            old = "{phase} of {} came in {came:.0f} of {steps:.0f} steps".format(case.id, **row)
            new = "{came_new:.0f} of {steps_new:.0f}".format(**row)
            yield f"{old} in {before.name}, in {new} in {after.name}"

    def _baselines_that_moved(
        self, judged: pd.DataFrame, limits: Iterable[Threshold]
    ) -> Iterator[str]:
        """For limits of ratios, the baselines that changed by more than the ratio may."""
        keys = summed("trainer", "metric")
        for limit in (each for each in limits if each.of):
            own = self.pairs[self.pairs.metric == limit.of]
            own = own[own.trainer == self.after.baseline]
            both = judged[judged.threshold == str(limit)].merge(own, on=keys, suffixes=("", "_own"))
            moved = both[both.relative_own.abs() > both.limit / both.before.abs()]
            for case, row in _by_case(moved.drop_duplicates(keys)):
                where = "" if limit.phase == STEP else f"@{limit.phase}"
                yield (
                    f"{limit}: the baseline itself moved by more than that: {limit.of}{where} of "
                    f"{_baseline(self.after, case).id} {row['relative_own']:+.2%}"
                )

    def _regressions(self, judged: pd.DataFrame) -> list[dict[str, Any]]:
        """The rows that exceed their limit, as plain JSON types, NaN as None."""
        worse = judged[judged.regressed.astype(bool)].drop(columns="regressed")
        listed = []
        for case, row in _by_case(worse.astype(object).where(worse.notna(), None)):
            cases = [case, _baseline(self.after, case)] if row["of"] else [case]
            largest = [
                change
                for each in cases
                for change in largest_changes(self.before, self.after, each, row)
            ]
            row |= {"reference": self.before.name, "largest_changes": largest}
            listed.append(row)
        return listed


def _about(numbers: pd.DataFrame, limit: Threshold) -> pd.DataFrame:
    return numbers[(numbers.metric == limit.metric) & (numbers.phase == limit.phase)]


def _baseline(run: Run, case: Case) -> Case:
    return case.under(run.baseline)


def _by_case(rows: pd.DataFrame) -> Iterator[tuple[Case, dict[str, Any]]]:
    for values in as_tuples(rows, rows.columns):
        row = dict(zip(rows.columns, values, strict=True))
        yield Case.from_row(row), row


def _missing(mine: Sequence[tuple[Case, str]], others: Collection[tuple[Case, str]]) -> list[str]:
    """The cases that others lack; with the instruments where they have it by another one."""
    partly, named = {case for case, _ in {*mine} & {*others}}, dict[Case, list[str]]()
    for case, instrument in mine:
        if (case, instrument) not in others:
            named.setdefault(case, []).append(instrument)
    return [f"{c.id} ({', '.join(by)})" if c in partly else c.id for c, by in named.items()]


def listed(names: Sequence[str]) -> str:
    """Names for one line, which says how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"
