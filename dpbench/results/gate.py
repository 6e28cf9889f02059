"""The gate: what limits say of a run beside its reference, and what they could not judge.

With a limit given, `Verdict.passed` means that it judged every case, instrument, metric and phase
that the reference has inside what was asked. What was not asked for is named and is no failure;
what was asked for and is missing is one. pytest, ``dpbench run`` and ``dpbench compare`` all use
this one function `judge`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pandas as pd

from dpbench.case import AXES, BASELINE_TRAINER, Case
from dpbench.metrics import RATIO
from dpbench.results.compare import CHANGES, Pairs, pairs, without_baseline
from dpbench.results.conditions import premise_differences
from dpbench.results.grown import grown
from dpbench.results.outcome import COMPLETE, Outcome
from dpbench.results.run import Run
from dpbench.results.threshold import Threshold

Asked = Collection[tuple[Case, str]]
"""The cases that a session was asked to measure, each with the name of an instrument."""

NAMED = 10
"""How many cases a line names before it only counts them."""

_AXES = list(AXES)
_SUBJECT = [*AXES, "instrument"]


@dataclass(frozen=True)
class Unjudged:
    """What a limit could not judge.

    Args:
        limit: as it was written.
        cases: ids; none if the limit judged nothing at all.
        why: what is missing, and where.
    """

    limit: str
    cases: tuple[str, ...]
    why: str

    def __str__(self) -> str:
        about = f" of {listed(self.cases)}" if self.cases else ""
        return f"{self.limit} judged nothing{about}: {self.why}"

    def as_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**asdict(self), "cases": list(self.cases)}


@dataclass(frozen=True)
class Verdict:
    """What became of a run since its reference, and what limits say of that.

    Args:
        changes: of `dpbench.results.compare.compare`.
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

    def as_json(self) -> dict[str, Any]:
        """What is saved of it, as plain JSON types."""
        unjudged = [missing.as_json() for missing in self.unjudged]
        return {"regressions": self.regressions, "unjudged": unjudged}


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
    found = pairs(before.frame, after.frame, across=across)
    inside = _inside(found.old, asked)
    sides = _Sides(before, after, found, asked, across, first_run_ok)
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
        [*_baselines_that_moved(found.changes, table, limits), *sides.notes(bool(limits))],
    )


@dataclass(frozen=True)
class _Sides:
    """What is compared with what, to say why a number of one is not in the other."""

    before: Run
    after: Run
    pairs: Pairs
    asked: Asked | None
    across: bool
    first_run_ok: bool

    def unjudged(
        self, limit: Threshold, needed: pd.DataFrame, judged: pd.DataFrame
    ) -> Iterator[Unjudged]:
        """What a limit had to judge and did not, or that it judged nothing at all."""
        missing = needed[~needed.index.isin(judged.old)]
        lost = {row["old"]: self._lost(limit, row) for row in _records(missing, "old")}
        yield from _grouped(limit, missing, lost)
        first, allowed = self._first(limit)
        yield from _grouped(limit, self.pairs.new.loc[list(first)], first)
        if judged.empty and missing.empty and not (first or allowed):
            there = self.pairs.old[_about(self.pairs.old, limit)]
            where = f"in phase {limit.phase}" if limit.phase != "step" else "of the step"
            why = f"neither {self.before.name} nor {self.after.name} has {limit.name} {where}"
            if not there.empty:
                names = _ids(there)
                why = f"{self.before.name} has {limit.name} {where} of {listed(names)} only"
                why += ", which was not asked for"
            yield Unjudged(str(limit), (), why)

    def _lost(self, limit: Threshold, row: dict[str, Any]) -> str:
        """Why a number of the reference is not there any more."""
        case, after = Case.from_row(row), self.after.name
        mine = [outcome for outcome in self.after.outcomes if outcome.case == case]
        for outcome in mine:
            if outcome.error:
                return f"{'skipped' if outcome.skipped else 'failed'} in {after}: {outcome.error}"
        rows = self.pairs.new[_same(self.pairs.new, row, _AXES)]
        by = rows if self.across else rows[rows.instrument == row["instrument"]]
        if rows.empty:
            return f"not in {after}"
        if by.empty:
            return f"without {row['instrument']} in {after}"
        if not (self.across or (by.device == row["device"]).any()):
            return f"on {listed(sorted(set(by.device)))} in {after}, not on {row['device']}"
        if limit.ratio and self._lacks_baseline(self.pairs.new, row):
            return f"the ratio needs its baseline {case.baseline.id}, which is not in {after}"
        phase = "" if limit.phase == "step" else f" in phase {limit.phase}"
        return f"no {limit.name} by {row['instrument']}{phase} in {after}"

    def _lacks_baseline(self, numbers: pd.DataFrame, row: dict[str, Any]) -> bool:
        same = _same(numbers, {**row, "trainer": BASELINE_TRAINER}, _AXES)
        if not self.across:
            same &= numbers.instrument == row["instrument"]
        return not same.any()

    def _first(self, limit: Threshold) -> tuple[dict[Any, str], bool]:
        """Why numbers by their place have nothing to be judged by; whether others may have none."""
        new, old = self.pairs.new, self.pairs.old
        if self.across:  # where instruments differ, so do their metrics
            return {}, False
        alone = new[_about(new, limit) & ~new.index.isin(self.pairs.changes.new.dropna())]
        alone = alone[_inside(alone, self.asked)]
        if self.first_run_ok or alone.empty:
            return {}, not alone.empty
        known = set(old[[*_SUBJECT, "device"]].itertuples(index=False, name=None))
        reasons = {}
        for row in _records(alone, "new"):
            if tuple(row[key] for key in (*_SUBJECT, "device")) in known:
                reasons[row["new"]] = self._lacking(limit, row)
            elif self.asked is not None:
                reasons[row["new"]] = f"nothing to compare with in {self.before.name}"
        return reasons, False

    def _lacking(self, limit: Threshold, row: dict[str, Any]) -> str:
        if limit.ratio and self._lacks_baseline(self.pairs.old, row):
            name = Case.from_row(row).baseline.id
            return f"the ratio needs its baseline {name}, which is not in {self.before.name}"
        return f"{self.before.name} has no such number of it"

    def notes(self, limited: bool) -> Iterator[str]:
        """What was not asked for, what stands in one of the two alone, and what else differs."""
        if self.before.frame.empty:
            yield f"{self.before.name} has nothing to compare with yet"
            return
        old, new = self.before.frame[_SUBJECT], self.after.frame[_SUBJECT]
        old, new = old.drop_duplicates(), new.drop_duplicates()
        asked = _inside(old, self.asked)
        if names := _with_instruments(old[~asked], old[asked]):
            yield f"not asked for, and so not compared: {listed(names)}"
        if not self.across:
            for run, missing, there in (
                (self.after, old[asked], new),
                (self.before, new[_inside(new, self.asked)], old),
            ):
                gone = missing[~_in(missing, there)]
                if names := _with_instruments(gone, missing[_in(missing, there)]):
                    yield f"not in {run.name}: {listed(names)}"
        gone = self.pairs.changes[without_baseline(self.pairs.changes)]
        lacking = [self._lacks_baseline(self.pairs.new, row) for row in _records(gone)]
        ratios = gone[lacking]
        if not ratios.empty and not limited:
            names = sorted({Case.from_row(row).baseline.id for row in _records(ratios)})
            yield f"ratios need their baseline, which {self.after.name} lacks: {listed(names)}"
        if self.before.status != COMPLETE:
            yield f"{self.before.name} was interrupted: it has what was finished until then"
        if self.before.regressed:
            yield f"{self.before.name} did not pass its own comparison"
        if found := premise_differences(self.before, self.after):
            yield f"different from {self.before.name}: {'; '.join(found)}"


def _grouped(limit: Threshold, rows: pd.DataFrame, reasons: dict[Any, str]) -> Iterator[Unjudged]:
    """One `Unjudged` for all cases with the same reason."""
    by_reason: dict[str, list[str]] = {}
    for place, why in reasons.items():
        by_reason.setdefault(why, []).append(Case.from_row(rows.loc[place].to_dict()).id)
    for why, cases in by_reason.items():
        yield Unjudged(str(limit), tuple(dict.fromkeys(cases)), why)


def _regressions(before: Run, after: Run, judged: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows that exceed their limit, as plain JSON types, NaN as None."""
    worse = judged[judged.regressed.astype(bool)].drop(columns="regressed")
    found = []
    for row in _records(worse.astype(object).where(worse.notna(), None)):
        cases = [Case.from_row(row)]
        if str(row["metric"]).endswith(RATIO):
            cases.append(cases[0].baseline)
        growth = [line for case in cases for line in grown(before, after, case, row)]
        found.append({**row, "reference": before.name, "grown": growth})
    return found


def _baselines_that_moved(
    changes: pd.DataFrame, judged: pd.DataFrame, limits: Iterable[Threshold]
) -> Iterator[str]:
    """Of limits of ratios, the baselines whose own value moved by more than the ratio may."""
    keys = [axis for axis in AXES if axis != "trainer"] + ["instrument", "device", "phase"]
    for limit in limits:
        if not limit.ratio:
            continue
        ratios = judged[judged.threshold == str(limit)] if len(judged) else judged
        own = changes[(changes.metric == limit.metric) & (changes.trainer == BASELINE_TRAINER)]
        both = ratios.merge(own, on=keys, suffixes=("", "_own"))
        moved = both[both.relative_own.abs() > both.limit / both.before.abs()]
        for row in _records(moved.drop_duplicates(keys)):
            case = Case.from_row(row).baseline
            where = "" if limit.phase == "step" else f"@{limit.phase}"
            yield (
                f"{limit}: the baseline itself moved by more than that: {limit.metric}{where} of "
                f"{case.id} {row['relative_own']:+.2%}"
            )


def listed(names: Sequence[str]) -> str:
    """Names for one line, which says how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"


def cases_of(outcomes: Iterable[Outcome]) -> list[tuple[Case, str]]:
    """These cases by the instruments that were to measure them, as something that was asked."""
    return [(outcome.case, name) for outcome in outcomes for name in outcome.instruments]


def _about(numbers: pd.DataFrame, limit: Threshold) -> pd.Series[bool]:
    return (numbers.metric == limit.name) & (numbers.phase == limit.phase)


def _inside(numbers: pd.DataFrame, asked: Asked | None) -> pd.Series[bool]:
    """Which rows are about what was asked."""
    if asked is None:
        return pd.Series(True, index=numbers.index)
    wanted = {(*(getattr(case, axis) for axis in AXES), name) for case, name in asked}
    keys = numbers[_SUBJECT].itertuples(index=False, name=None)
    return pd.Series([key in wanted for key in keys], index=numbers.index, dtype=bool)


def _in(rows: pd.DataFrame, others: pd.DataFrame) -> pd.Series[bool]:
    """Which rows are about a case and instrument that is in the others, too."""
    there = set(others[_SUBJECT].itertuples(index=False, name=None))
    keys = rows[_SUBJECT].itertuples(index=False, name=None)
    return pd.Series([key in there for key in keys], index=rows.index, dtype=bool)


def _same(numbers: pd.DataFrame, row: dict[str, Any], keys: Sequence[str]) -> pd.Series[bool]:
    same = pd.Series(True, index=numbers.index)
    for key in keys:
        same &= numbers[key] == row[key]
    return same


def _with_instruments(rows: pd.DataFrame, others: pd.DataFrame) -> list[str]:
    """The cases of rows; with the instruments where the others have the case by another one."""
    partly = set(others[_AXES].itertuples(index=False, name=None))
    named: dict[tuple[Any, ...], list[str]] = {}
    for *axes, instrument in rows[_SUBJECT].itertuples(index=False, name=None):
        named.setdefault(tuple(axes), []).append(instrument)
    return [
        Case(*axes).id + (f" ({', '.join(instruments)})" if axes in partly else "")
        for axes, instruments in named.items()
    ]


def _ids(rows: pd.DataFrame) -> list[str]:
    return list(dict.fromkeys(Case.from_row(row).id for row in _records(rows)))


def _records(rows: pd.DataFrame, place: str | None = None) -> list[dict[str, Any]]:
    """Rows as dictionaries, with their place in the index under a name."""
    if place:
        rows = rows.rename_axis(place).reset_index()
    return [{str(key): value for key, value in row.items()} for row in rows.to_dict("records")]
