"""The gate: what limits say of a run beside its reference, and what they could not judge.

With a limit given, `Verdict.passed` means that it judged every case, instrument, metric and phase
that the reference has inside what was asked. What was not asked for is named and is no failure;
what was asked for and is missing is one. pytest, ``dpbench run`` and ``dpbench compare`` all use
this one `Gate`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pandas as pd

from dpbench.case import AXES, SCRIPT, Case
from dpbench.metrics import METRICS
from dpbench.results.compare import CHANGES, Threshold, grown, other_baseline, pairs
from dpbench.results.conditions import premise_differences
from dpbench.results.frame import as_tuples
from dpbench.results.kernels import NOT_COUNTED
from dpbench.results.outcome import COMPLETE
from dpbench.results.rows import STEP, summed
from dpbench.results.run import Run

CasesAsked = Collection[tuple[Case, str]]
"""The cases that a session was asked to measure, each with the name of an instrument."""

NAMED = 10
"""How many cases a line names before it only counts them."""


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
    """What became of a run since its reference, and what limits say of that.

    Args:
        changes: the columns `CHANGES` of each number that was asked for and whose case is still
            there; a ratio only where both have its baseline.
        judged: the rows that a limit judged, once a limit, with ``limit`` (the change that is
            allowed, in the metric's unit), ``threshold`` (the limit as written) and ``regressed``.
        regressions: those that exceed it, as plain JSON types; ``grown`` names the operators or
            kernels that moved more.
        unjudged: what a limit should have judged and could not.
        notes_of: works out its `notes`.
    """

    changes: pd.DataFrame
    judged: pd.DataFrame
    regressions: list[dict[str, Any]]
    unjudged: list[Unjudged]
    notes_of: Callable[[], list[str]]

    @cached_property
    def notes(self) -> list[str]:
        """What a reader should know beside it, worked out where it is read."""
        return self.notes_of()

    @property
    def passed(self) -> bool:
        """Whether the limits judged everything that they had to, and nothing exceeds one."""
        return not (self.regressions or self.unjudged)


@dataclass(frozen=True)
class Gate:
    """A run beside its reference, to be held to limits.

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
        """What changed, and what limits say of that: what may change by how much."""
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
        # Without the baselines that were measured for their ratios alone.
        is_shown = inside.before.notna() & inside.shared
        is_shown &= inside.after.notna() | (inside.of == "")
        return Verdict(
            inside.loc[is_shown, CHANGES].reset_index(drop=True),
            table,
            self._regressions(table),
            unjudged,
            lambda: [*self._baselines_that_moved(table, limits), *self._notes(bool(limits))],
        )

    @cached_property
    def pairs(self) -> pd.DataFrame:
        """Every number of either."""
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
        """What a limit had to judge and did not, by reason, or that it judged nothing at all."""
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
            return self._fewer_steps(row) or self._not_counted(case, row["instrument"])
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
            if _lacks_baseline(run, case, instrument):
                return f"{needed}, which is not in {run.name}"
            return f"{needed}, which has nothing to divide by{where} in {run.name}"
        return f"no {metric} by {instrument}{where} in {run.name}"

    def _fewer_steps(self, row: Mapping[str, Any]) -> str:
        """Whether steps are missing that the reference has; settings that differ are named."""
        asked = [
            run.session.get("settings", {}).get(row["instrument"], {}).get("steps")
            for run in (self.before, self.after)
        ]
        there, here = row["steps"], row["steps_new"]
        if here >= there or (None not in asked and asked[0] != asked[1]):
            return ""
        return f"{self.before.name} has {there:.0f} steps of it, {self.after.name} only {here:.0f}"

    def _not_counted(self, case: Case, instrument: str) -> str:
        """An operator that was left out of the count, if it was not, or less often, before."""
        before, after = (
            {note for o in run.outcomes if o.case == case for note in o.notes}
            for run in (self.before, self.after)
        )
        fresh = sorted(note for note in after - before if note.startswith(NOT_COUNTED))
        return f"{fresh[0]} in {self.after.name}" if fresh and instrument == "logical" else ""

    def _notes(self, limited: bool) -> Iterator[str]:
        """What was not asked for, what stands in one of the two alone, and what else differs."""
        before, after = self.before.name, self.after.name
        if self.before.frame.empty:
            yield f"{before} has nothing to compare with yet"
            return
        if other := other_baseline(self.before, self.after):
            yield other
        was, now = (run.frame["rank"].nunique() for run in (self.before, self.after))
        if now not in (was, 0):
            yield f"{before} is the sum over {was} ranks, {after} over {now}"
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
            (f"not in {after}", asked_old, new),
            (f"not in {before}", asked_new, old),
        ):
            if names := _missing(mine, others):
                yield f"{what}: {listed(names)}"
        is_lost = self.pairs.before.notna() & self.pairs.after.isna()
        lost = self.pairs[self.pairs.shared & is_lost]
        is_ratio = lost.of != ""
        lacking = {
            _baseline(self.after, case).id
            for case, row in _by_case(lost[is_ratio])
            if _lacks_baseline(self.after, case, row["instrument"])
        }
        if lacking and not limited:
            yield f"ratios need their baseline, which {after} lacks: {listed(sorted(lacking))}"
        phases = lost[(lost.phase != STEP) & ~is_ratio]
        if names := sorted({f"{case.id} {row['phase']}" for case, row in _by_case(phases)}):
            yield f"without these phases in {after}: {listed(names)}"
        yield from self._phases_that_come_and_go()
        for run in (self.before, self.after):
            if run.repeated:
                yield f"{run.name} has {run.repeated} rows twice, which count once"
        if self.before.status != COMPLETE:
            yield f"{before} was interrupted: it has what was finished until then"
        if self.before.regressed:
            yield f"{before} did not pass its own comparison"
        if differences := premise_differences(self.before, self.after):
            yield f"different from {before}: {'; '.join(differences)}"

    def _phases_that_come_and_go(self) -> Iterator[str]:
        """Phases of scripts that came in another part of the steps than before."""
        scripts = self.inside[(self.inside.workload == SCRIPT) & (self.inside.phase != STEP)]
        before, after = scripts.came / scripts.steps, scripts.came_new / scripts.steps_new
        other = scripts[before.notna() & after.notna() & (before != after)]
        for case, row in _by_case(other.drop_duplicates(summed("metric"))):
            came = "{came:.0f} of {steps:.0f}".format(**row)
            now = "{came_new:.0f} of {steps_new:.0f}".format(**row)
            where = f"steps in {self.before.name}, in {now} in {self.after.name}"
            yield f"{row['phase']} of {case.id} came in {came} {where}"

    def _baselines_that_moved(
        self, judged: pd.DataFrame, limits: Iterable[Threshold]
    ) -> Iterator[str]:
        """Of limits of ratios, the baselines whose own value moved by more than the ratio may."""
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
            where = row["metric"], row["phase"]
            growth = grown(self.before, self.after, case, *where)
            if row["of"]:
                growth += grown(self.before, self.after, _baseline(self.after, case), *where)
            listed.append({**row, "reference": self.before.name, "grown": growth})
        return listed


def _about(numbers: pd.DataFrame, limit: Threshold) -> pd.DataFrame:
    return numbers[(numbers.metric == limit.metric) & (numbers.phase == limit.phase)]


def _lacks_baseline(run: Run, case: Case, instrument: str) -> bool:
    return instrument not in run.places.get(_baseline(run, case), {})


def _baseline(run: Run, case: Case) -> Case:
    return replace(case, trainer=run.baseline)


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
