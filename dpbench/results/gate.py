"""The gate: what limits say of a run beside its reference, and what they could not judge.

With a limit given, `Verdict.passed` means that it judged every case, instrument, metric and phase
that the reference has inside what was asked. What was not asked for is named and is no failure;
what was asked for and is missing is one. pytest, ``dpbench run`` and ``dpbench compare`` all use
this one function `judge`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import pandas as pd

from dpbench.case import AXES, SCRIPT, Case
from dpbench.metrics import RATIO
from dpbench.results.compare import CHANGES, Pairs, grown, other_baseline, pairs, without_baseline
from dpbench.results.conditions import premise_differences
from dpbench.results.frame import CONFIGURATION
from dpbench.results.outcome import COMPLETE
from dpbench.results.rows import STEP
from dpbench.results.run import Run
from dpbench.results.threshold import Threshold

Asked = Collection[tuple[Case, str]]
"""The cases that a session was asked to measure, each with the name of an instrument."""

NAMED = 10
"""How many cases a line names before it only counts them."""

_SUBJECT = [*AXES, "instrument"]


@dataclass(frozen=True)
class Unjudged:
    """What a limit could not judge, and why; no ``cases`` if it judged nothing at all."""

    limit: str
    cases: tuple[str, ...]
    why: str

    def __str__(self) -> str:
        about = f" of {listed(self.cases)}" if self.cases else ""
        return f"{self.limit} judged nothing{about}: {self.why}"

    def as_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**vars(self), "cases": list(self.cases)}


@dataclass(frozen=True)
class Verdict:
    """What became of a run since its reference, and what limits say of that.

    Args:
        changes: what `dpbench.results.compare.pairs` says of each number that was asked for and is
            still there; a ratio only where both have its baseline.
        judged: the rows that a limit judged, once a limit, with ``limit`` (the change that is
            allowed, in the metric's unit), ``threshold`` (the limit as written) and ``regressed``.
        regressions: those that exceed it, as plain JSON types; ``grown`` names the operators or
            kernels that moved more.
        unjudged: what a limit should have judged and could not.
        notes: what a reader should know beside it.
    """

    changes: pd.DataFrame
    judged: pd.DataFrame
    regressions: list[dict[str, Any]] = field(default_factory=list)
    unjudged: list[Unjudged] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether the limits judged everything that they had to, and nothing exceeds one."""
        return not (self.regressions or self.unjudged)


def judge(
    before: Run,
    after: Run,
    limits: Sequence[Threshold] = (),
    *,
    asked: Asked | None = None,
    across: bool = False,
    first_run_ok: bool = False,
) -> Verdict:
    """Compare a run with its reference, and hold it to limits.

    Args:
        before: the reference; one without rows if there is none.
        after: a saved run, or a session so far.
        limits: what may change by how much.
        asked: what the session was asked to measure; None stands for all that the reference has.
        across: compare also what different devices or instruments measured.
        first_run_ok: what the reference lacks may be measured for the first time.
    """
    found = pairs(before, after, across=across)
    subjects = None
    if asked is not None:
        subjects = {(*(getattr(case, axis) for axis in AXES), name) for case, name in asked}
    inside = _inside(found.old, subjects)
    sides = _Sides(before, after, found, subjects, across, first_run_ok)
    judged: list[pd.DataFrame] = []
    unjudged: list[Unjudged] = []
    for limit in limits:
        chosen = found.changes[_about(found.changes, limit)]
        rows = chosen[inside.reindex(chosen.old).to_numpy(dtype=bool) & chosen.after.notna()]
        verdict = limit.exceeded(rows.before, rows.after)
        judged.append(rows.join(verdict).assign(threshold=str(limit)))
        needed = found.old[inside & _about(found.old, limit)]
        unjudged += sides.unjudged(limit, needed, rows)
    if limits and after.status != COMPLETE and asked is None:
        counted = f"{len(after.outcomes)} of {after.cases_asked or 'its'} cases"
        unjudged.append(Unjudged("a limit", (), f"{after.name} was interrupted, with {counted}"))
    columns = [*CHANGES, "limit", "regressed", "threshold"]
    table = pd.concat(judged, ignore_index=True) if judged else pd.DataFrame(columns=columns)
    changes = found.changes[~without_baseline(found.changes)]
    if asked is not None:  # baselines may have been measured for their ratios alone
        changes = changes[inside.reindex(changes.old).to_numpy(dtype=bool)]
    return Verdict(
        changes[CHANGES].reset_index(drop=True),
        table[columns],
        _regressions(before, after, table[columns]),
        unjudged,
        [
            *_baselines_that_moved(found.changes, table, limits, after.baseline),
            *sides.notes(bool(limits)),
        ],
    )


@dataclass(frozen=True)
class _Sides:
    """What is compared with what, to say why a number of one is not in the other."""

    before: Run
    after: Run
    pairs: Pairs
    asked: Collection[tuple[Any, ...]] | None
    across: bool
    first_run_ok: bool

    @cached_property
    def there(self) -> dict[Case, dict[str, set[str]]]:
        """By case and instrument, the devices on which the reference has numbers."""
        return _places(self.pairs.old)

    @cached_property
    def here(self) -> dict[Case, dict[str, set[str]]]:
        """The same of the run that is judged."""
        return _places(self.pairs.new)

    def unjudged(
        self, limit: Threshold, needed: pd.DataFrame, judged: pd.DataFrame
    ) -> Iterator[Unjudged]:
        """What a limit had to judge and did not, or that it judged nothing at all."""
        missing = needed[~needed.index.isin(judged.old)]
        yield from _by_reason(limit, missing, self._lost)
        yield from _by_reason(limit, judged, self._cut_short)
        new = self.pairs.new
        first = new[_about(new, limit) & ~new.index.isin(self.pairs.changes.new.dropna())]
        first = first[_inside(first, self.asked)]
        if self.across:  # where instruments differ, so do their metrics
            first = first[:0]
        unknown = [] if self.first_run_ok else list(_by_reason(limit, first, self._new))
        yield from unknown
        is_first = bool(unknown) or (self.first_run_ok and not first.empty)
        if judged.empty and missing.empty and not is_first:
            yield self._nothing(limit)

    def _nothing(self, limit: Threshold) -> Unjudged:
        there = self.pairs.old[_about(self.pairs.old, limit)]
        where = f"in phase {limit.phase}" if limit.phase != STEP else "of the step"
        if limit.ratio and (other := other_baseline(self.before, self.after)):
            return Unjudged(str(limit), (), other)
        why = f"neither {self.before.name} nor {self.after.name} has {limit.name} {where}"
        if not there.empty:
            names = listed([*dict.fromkeys(case.id for case, _ in _by_case(there))])
            why = f"{self.before.name} has {limit.name} {where} of {names} only, which was not "
            why += "asked for"
        return Unjudged(str(limit), (), why)

    def _lost(self, limit: Threshold, case: Case, instrument: str, device: str) -> str:
        """Why a number of the reference is not there any more."""
        after, by = self.after.name, self.here.get(case, {})
        for outcome in self.after.outcomes:
            if outcome.case == case and outcome.error:
                return f"{'skipped' if outcome.skipped else 'failed'} in {after}: {outcome.error}"
        if not by:
            return f"not in {after}"
        if not self.across and instrument not in by:
            return f"without {instrument} in {after}"
        if not self.across and device not in by[instrument]:
            return f"on {listed(sorted(by[instrument]))} in {after}, not on {device}"
        if limit.ratio and self._lacks_baseline(self.here, case, instrument):
            return f"the ratio needs its baseline {self._baseline(case)}, which is not in {after}"
        phase = "" if limit.phase == STEP else f" in phase {limit.phase}"
        return f"no {limit.name} by {instrument}{phase} in {after}"

    def _new(self, limit: Threshold, case: Case, instrument: str, device: str) -> str:
        """Why a number has nothing to be judged by; empty if it need not be judged."""
        before = self.before.name
        if device not in self.there.get(case, {}).get(instrument, ()):
            return "" if self.asked is None else f"nothing to compare with in {before}"
        if limit.ratio and self._lacks_baseline(self.there, case, instrument):
            return f"the ratio needs its baseline {self._baseline(case)}, which is not in {before}"
        return f"{before} has no such number of it"

    def _cut_short(self, limit: Threshold, case: Case, instrument: str, device: str) -> str:
        """Whether a script ended before all steps were counted that the reference has of it."""
        if case.workload != SCRIPT:
            return ""
        (asked, there), (again, here) = (
            _steps_of(run, case, instrument) for run in (self.before, self.after)
        )
        if asked != again or here >= there:
            return ""
        return f"{self.before.name} has {there} steps of it, {self.after.name} only {here}"

    def _baseline(self, case: Case) -> str:
        return replace(case, trainer=self.after.baseline).id

    def _lacks_baseline(
        self, places: Mapping[Case, Collection[str]], case: Case, instrument: str
    ) -> bool:
        by = places.get(replace(case, trainer=self.after.baseline), ())
        return not by if self.across else instrument not in by

    def notes(self, limited: bool) -> Iterator[str]:
        """What was not asked for, what stands in one of the two alone, and what else differs."""
        if self.before.frame.empty:
            yield f"{self.before.name} has nothing to compare with yet"
            return
        old, new = (run.frame[_SUBJECT].drop_duplicates() for run in (self.before, self.after))
        if other := other_baseline(self.before, self.after):
            yield other
        asked = _inside(old, self.asked)
        if names := _with_instruments(old[~asked], old[asked]):
            yield f"not asked for, and so not compared: {listed(names)}"
        if not self.across:
            for run, missing, there in (
                (self.after, old[asked], new),
                (self.before, new[_inside(new, self.asked)], old),
            ):
                found = _inside(missing, set(there.itertuples(index=False, name=None)))
                if names := _with_instruments(missing[~found], missing[found]):
                    yield f"not in {run.name}: {listed(names)}"
        changes = self.pairs.changes
        gone = without_baseline(changes)
        lacking = {
            self._baseline(case)
            for case, row in _by_case(changes[gone])
            if self._lacks_baseline(self.here, case, row["instrument"])
        }
        if lacking and not limited:
            names = sorted(lacking)
            yield f"ratios need their baseline, which {self.after.name} lacks: {listed(names)}"
        lost = changes[changes.after.isna() & (changes.phase != STEP) & ~gone]
        if names := sorted({f"{case.id} {row['phase']}" for case, row in _by_case(lost)}):
            yield f"without these phases in {self.after.name}: {listed(names)}"
        if self.before.status != COMPLETE:
            yield f"{self.before.name} was interrupted: it has what was finished until then"
        if self.before.regressed:
            yield f"{self.before.name} did not pass its own comparison"
        if differences := premise_differences(self.before, self.after):
            yield f"different from {self.before.name}: {'; '.join(differences)}"


def _steps_of(run: Run, case: Case, instrument: str) -> tuple[int | None, int]:
    """How many steps of a script were asked for, if that is known, and how many were counted."""
    asked = run.session.get("settings", {}).get(instrument, {}).get("steps")
    rows = run.frame[run.frame.trainer.eq(case.trainer) & run.frame.instrument.eq(instrument)]
    return asked, rows[rows.workload == SCRIPT].repeat.nunique()


def _by_reason(
    limit: Threshold, rows: pd.DataFrame, reason: Callable[[Threshold, Case, str, str], str]
) -> Iterator[Unjudged]:
    """One `Unjudged` for all cases with the same reason; none for those without."""
    cases: dict[str, dict[str, None]] = {}
    for case, row in _by_case(rows):
        why = reason(limit, case, row["instrument"], row["device"])
        cases.setdefault(why, {})[case.id] = None
    for why, names in cases.items():
        if why:
            yield Unjudged(str(limit), tuple(names), why)


def _baselines_that_moved(
    changes: pd.DataFrame, judged: pd.DataFrame, limits: Iterable[Threshold], baseline: str
) -> Iterator[str]:
    """Of limits of ratios, the baselines whose own value moved by more than the ratio may."""
    keys = [*CONFIGURATION, "instrument", "device", "phase"]
    for limit in limits:
        if not limit.ratio:
            continue
        own = changes[(changes.metric == limit.metric) & (changes.trainer == baseline)]
        both = judged[judged.threshold == str(limit)].merge(own, on=keys, suffixes=("", "_own"))
        moved = both[both.relative_own.abs() > both.limit / both.before.abs()]
        for case, row in _by_case(moved.drop_duplicates(keys)):
            where = "" if limit.phase == STEP else f"@{limit.phase}"
            yield (
                f"{limit}: the baseline itself moved by more than that: {limit.metric}{where} of "
                f"{replace(case, trainer=baseline).id} {row['relative_own']:+.2%}"
            )


def listed(names: Sequence[str]) -> str:
    """Names for one line, which says how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"


def _about(numbers: pd.DataFrame, limit: Threshold) -> pd.Series[bool]:
    return (numbers.metric == limit.name) & (numbers.phase == limit.phase)


def _inside(numbers: pd.DataFrame, subjects: Collection[tuple[Any, ...]] | None) -> pd.Series[bool]:
    """Which rows are about a case and instrument that is among these; None stands for all."""
    keys = numbers[_SUBJECT].itertuples(index=False, name=None)
    found = [subjects is None or key in subjects for key in keys]
    return pd.Series(found, index=numbers.index, dtype=bool)


def _places(numbers: pd.DataFrame) -> dict[Case, dict[str, set[str]]]:
    found: dict[Case, dict[str, set[str]]] = {}
    subjects = numbers[[*_SUBJECT, "device"]].drop_duplicates()
    for *axes, instrument, device in subjects.itertuples(index=False, name=None):
        found.setdefault(Case(*axes), {}).setdefault(instrument, set()).add(device)
    return found


def _with_instruments(rows: pd.DataFrame, others: pd.DataFrame) -> list[str]:
    """The cases of rows; with the instruments where the others have the case by another one."""
    partly = set(others[[*AXES]].itertuples(index=False, name=None))
    named: dict[tuple[Any, ...], list[str]] = {}
    for *axes, instrument in rows[_SUBJECT].itertuples(index=False, name=None):
        named.setdefault(tuple(axes), []).append(instrument)
    return [
        Case(*axes).id + (f" ({', '.join(instruments)})" if axes in partly else "")
        for axes, instruments in named.items()
    ]


def _by_case(rows: pd.DataFrame) -> Iterator[tuple[Case, dict[str, Any]]]:
    for row in rows.to_dict("records"):
        yield Case.from_row(row), {str(key): value for key, value in row.items()}


def _regressions(before: Run, after: Run, judged: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows that exceed their limit, as plain JSON types, NaN as None."""
    worse = judged[judged.regressed.astype(bool)].drop(columns="regressed")
    found = []
    for case, row in _by_case(worse.astype(object).where(worse.notna(), None)):
        growth = grown(before, after, case, row["metric"], row["phase"])
        if row["metric"].endswith(RATIO):
            growth += grown(before, after, case.baseline, row["metric"], row["phase"])
        found.append({**row, "reference": before.name, "grown": growth})
    return found
