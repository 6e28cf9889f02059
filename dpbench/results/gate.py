"""The gate, which checks limits on the changes between two runs.

A limit is checked for each case and instrument that was asked for, if both runs have the number
that the limit is about. The gate fails if a limit is exceeded. It also fails if a limit could not
be checked for a case that was asked for, for example because the new run lacks the number. A case
that was not asked for is not checked, but a note names the case. Cases that the reference lacks are
accepted if `Gate.first_run_ok` is true or `Gate.asked` is None. The gate is one for all: tests,
``dpbench run`` and ``exec`` use it for what they have just measured, ``dpbench compare`` and
``bisect`` for saved runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from dpbench.core.case import AXES
from dpbench.core.errors import ConfigurationError
from dpbench.core.metrics import METRICS
from dpbench.core.subject import Asked, Script, Subject, samples_poisson, subject_from
from dpbench.results.changes import changes_of_all, largest_changes
from dpbench.results.conditions import (
    differing_conditions,
    other_batches,
    other_sizes,
    ratio_notes,
)
from dpbench.results.kernels import ELSEWHERE, NO_FLOPS, NOT_COUNTED, STEP_LOST
from dpbench.results.limits import RENEW, Judgement, Limit, Unjudged, listed
from dpbench.results.outcome import COMPLETE
from dpbench.results.rows import NO_HARDWARE, NUMBER, STEP
from dpbench.results.run import Run

CHANGES = [*AXES, *NUMBER[1:], "unit", "before", "after", "change", "relative"]
"""The columns of a comparison. ``change`` is ``after - before``, and ``relative`` is ``change``
divided by the absolute value of ``before``. If ``before`` is 0, ``relative`` is 0 if ``after`` is
0, too, and NaN otherwise."""


def pairs(
    before: Run, after: Run, asked: Asked | None = None, *, across: bool = False
) -> pd.DataFrame:
    """Pair numbers of two runs if their case, instrument, device, phase and metric are equal.

    With ``asked``, other numbers are left out. With ``across``, devices may differ. If they differ,
    the column ``device`` is ``X -> Y``. Ratios are left out if the runs have different baselines.

    Returns:
        One row for each pair, and one row for each number that only one of the runs has. The
        columns include `CHANGES`, where ``before`` or ``after`` is NaN if the run lacks the number.
        ``shared`` is true if the row's instrument measured the case in both runs. Without
        ``across``, the device must also be the same. ``steps``, ``steps_present`` and ``ranks``
        come from the first run's summary. Columns of the second run's summary have the same names
        with ``_new`` at the end.
    """
    which = [name for name in (*AXES, *NUMBER[1:]) if not (across and name == "device")]
    keys, measured = [*which, "of", "unit"], [n for n in which if n not in ("metric", "phase")]
    ratios = not other_baseline(before, after)
    old, new = (_of(asked, limited(run, ratios=ratios)) for run in (before, after))
    if any(side.duplicated(keys).any() for side in (old, new)):
        raise ConfigurationError(
            "cannot compare across devices, because one run has the same case on several devices"
        )
    both = old.merge(new, on=keys, how="outer", suffixes=("", "_new"))
    both = both.rename(columns={"value": "before", "value_new": "after"})
    if across:
        was, now = both.device.fillna(both.device_new), both.device_new.fillna(both.device)
        both["device"] = was.where(was == now, was + " -> " + now)
    in_run = [
        both[measured].merge(side[measured].drop_duplicates(), "left", indicator=True)
        for side in (old, new)
    ]
    both["shared"] = np.logical_and(*((side._merge == "both").to_numpy() for side in in_run))
    both["change"] = both.after - both.before
    both["relative"] = both.change / both.before.abs().where(both.before != 0)
    both.loc[(both.before == 0) & (both.change == 0), "relative"] = 0.0
    return both


def _of(asked: Asked | None, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of what was asked for, or all rows if ``asked`` is None."""
    if asked is None:
        return rows
    columns = [*AXES, "instrument"]
    places = {(*case.columns.values(), name) for case, name in asked}
    for column, values in zip(columns, zip(*places, strict=True), strict=False):
        rows = rows[rows[column].isin(values)]  # most rows of a large run go with the first axes
    found = zip(*(rows[column] for column in columns), strict=True)
    return rows.loc[[place in places for place in found]]


def limited(run: Run, *, ratios: bool = True) -> pd.DataFrame:
    """Return the numbers of a run that can have a limit, without ratios if ``ratios`` is false.

    A ratio of the baseline to the baseline is left out, because this ratio is 1.
    """
    rows = run.summary
    is_ratio = (rows.kind == "ratio") & (rows.trainer != rows.baseline) & ratios
    columns = [
        *AXES,
        *NUMBER[1:],
        "of",
        "unit",
        "value",
        "spread",
        "steps",
        "steps_present",
        "ranks",
        "sm_clock",
        "lowered",
    ]
    return rows.loc[(rows.kind == "value") | is_ratio, columns]


CLOCKS_DIFFER = 0.05
"""If the SM clocks of two times differ by more than this share, a comparison says so."""


def clock_notes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return phrases on lowered and on different clocks, from two rows of `limited`."""
    low = [row["lowered"] or "no" for row in (before, after)]
    notes = [f"lowered clocks: {' -> '.join(low)}"] if low != ["no", "no"] else []
    if abs(after["sm_clock"] / before["sm_clock"] - 1) > CLOCKS_DIFFER:  # False if one is NaN
        notes.append(
            f"SM clock {before['sm_clock'] / 1e9:.2f} -> {after['sm_clock'] / 1e9:.2f} GHz"
        )
    return notes


def other_baseline(before: Run, after: Run) -> str:
    """Return why the ratios of two runs cannot be compared, or an empty string if they can."""
    if before.frame.empty or before.baseline == after.baseline:
        return ""
    return (
        f"ratios are not compared, because the baseline of {before.name} is {before.baseline} and "
        f"the baseline of {after.name} is {after.baseline}"
    )


@dataclass(frozen=True)
class Comparison(Judgement):
    """The changes from one run to another, and what limits say of them.

    Args:
        changes: the numbers that were asked for and that the reference has, if the same instrument
            measured the case in both runs. The columns are `CHANGES`. A ratio is left out if the
            new run lacks the ratio.
        notes: cases that were not compared, other differences, and why the reference is incomplete
            or failed.
        gate: the two runs.
    """

    changes: pd.DataFrame = field(default_factory=pd.DataFrame)
    notes: list[str] = field(default_factory=list)
    gate: Gate | None = None

    @property
    def largest(self) -> list[dict[str, Any]]:
        """What changed most, whether it has a limit or not, see `changes_of_all`."""
        gate = self.gate
        return changes_of_all(gate.before, gate.after, gate.compared) if gate else []


@dataclass(frozen=True)
class Gate:
    """A new run and the reference run with which the new run is compared.

    Args:
        before: the reference. If there is no reference, this is a run without rows.
        after: a saved run, or what a session has measured.
        asked: what is compared. If None, all cases of both runs are compared.
        across: whether numbers of different devices are compared, too.
        first_run_ok: whether numbers that the reference lacks are accepted.
    """

    before: Run
    after: Run
    asked: Asked | None = None
    across: bool = False
    first_run_ok: bool = False

    def compare(self, limits: Sequence[Limit] = ()) -> Comparison:
        """Compare the two runs, and check the limits."""
        judgement = self.judge(limits)
        with METRICS.including(self.after.metrics, self.before.metrics):
            compared = self.compared
            is_shown = compared.before.notna() & compared.shared
            is_shown &= compared.after.notna() | (compared.of == "")
            return Comparison(
                **vars(judgement),
                changes=compared.loc[is_shown, CHANGES].reset_index(drop=True),
                notes=[*self._notes()],
                gate=self,
            )

    def judge(self, limits: Sequence[Limit], *, idle: bool = False) -> Judgement:
        """Check the limits. With ``idle``, accept limits for which there is no number at all."""
        judged, unjudged = list[dict[str, Any]](), list[Unjudged]()
        with METRICS.including(self.after.metrics, self.before.metrics):
            for limit in limits:
                reasons: dict[str, dict[str, None]] = {}
                for case, row in _by_case(self._about(limit)):
                    if why := self._why_not(case, row):
                        reasons.setdefault(why, {})[case.id] = None
                    if not (pd.isna(row["before"]) or pd.isna(row["after"])):
                        allowed, exceeded = limit.exceeded(row["before"], row["after"])
                        verdict = {"limit": allowed, "regressed": None if why else exceeded}
                        named = {name: row[name] for name in (*CHANGES, "of")} | verdict
                        against = {"threshold": str(limit), "reference": self.before.name}
                        judged.append(named | against)
                unjudged += [Unjudged(str(limit), [*ids], why) for why, ids in reasons.items()]
            unjudged += self._without_rows() if limits else ()
            if limits and self.after.status != COMPLETE and self.asked is None:
                counted = f"{len(self.after.outcomes)} of {self.after.cases_asked or 'its'} cases"
                why = f"{self.after.name} was interrupted after {counted}"
                unjudged.append(Unjudged("a limit", [], why))
            regressions = [self._regression(row) for row in judged if row["regressed"]]
            found = Judgement(judged, regressions, unjudged)
            unjudged += () if idle else [*self.idle(limits, found)]
        return found

    def numbers(self, limit: Limit) -> dict[tuple[Subject, str], bool]:
        """Return the cases with a number for a limit, and whether the reference has the number."""
        with METRICS.including(self.after.metrics, self.before.metrics):
            rows = _by_case(self._about(limit))
            return {(case, row["instrument"]): not pd.isna(row["before"]) for case, row in rows}

    def _about(self, limit: Limit) -> pd.DataFrame:
        at = (self.compared.metric == limit.metric) & (self.compared.phase == limit.phase)
        return self.compared[at]

    @cached_property
    def compared(self) -> pd.DataFrame:
        """The numbers that were asked for in both runs, see `pairs`."""
        return pairs(self.before, self.after, self.asked, across=self.across)

    def idle(self, limits: Sequence[Limit], found: Judgement) -> Iterator[Unjudged]:
        """Yield an entry without cases for each limit that was checked for no number.

        With `first_run_ok`, accept this if only the reference lacks the number.
        """
        seen = {row["threshold"] for row in found.judged} | {each.limit for each in found.unjudged}
        for limit in (each for each in limits if str(each) not in seen):
            with METRICS.including(self.after.metrics, self.before.metrics):
                known = [*self.numbers(limit).values()]
                other = other_baseline(self.before, self.after) if limit.of else ""
            where = f"in phase {limit.phase}" if limit.phase != STEP else "of the step"
            why = f"{self.before.name} has no {limit.metric} {where} for any requested case"
            why = "each test that measures it has its own limits" if any(known) else other or why
            if any(known) or not (self.first_run_ok and known):
                yield Unjudged(str(limit), [], why)

    def _without_rows(self) -> Iterator[Unjudged]:
        """Yield an entry with what was asked for and has an outcome, but no number in any run."""
        asked = self.asked
        known = {case for run in (self.before, self.after) for case, _ in run.places}
        if asked is not None and {case for case, _ in asked} <= known:
            return
        outcomes = [*self.before.outcomes, *self.after.outcomes]
        lost = [o for o in outcomes if asked is None or not {*o.asked}.isdisjoint(asked)]
        if names := {outcome.case.id: None for outcome in lost if outcome.case not in known}:
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
                or self._other_batches(case, row)
            )
        if self.first_run_ok and not row["steps_present"] < row["steps"]:
            return ""
        devices = self.before.places.get((case, row["instrument"]), ())
        if not devices or not (self.across or row["device"] in devices):
            remedy = "" if self.before.frame.empty else f"; {RENEW}"
            lacks = f"{self.before.name} has no number to compare with{remedy}"
            return "" if self.asked is None else lacks
        return self._lacking(self.before, case, row)

    def _other_batches(self, case: Subject, row: Mapping[str, Any]) -> str:
        old, new = (
            [o for o in run.outcomes if o.case == case and row["instrument"] in o.by]
            for run in (self.before, self.after)
        )
        return other_batches(old[0], new[0]) if old and new else ""

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
            ("not compared, because not requested", [*_without_standard(before)], requested_before),
            (f"not in {after.name}", requested_before, after.places),
            (f"not in {before.name}", requested_after, before.places),
        ):
            if names := _missing(cases, others):
                yield f"{what}: {listed(names)}"
        has_ratios = after.summary.has_baseline.any()
        other = other_baseline(before, after) if has_ratios else ""
        differences = [*differing_conditions(before, after), other]
        if any(differences):
            yield f"different from {before.name}: {'; '.join(filter(None, differences))}"
        yield from self._clocks()
        yield from dict.fromkeys(self._sizes())
        if before.status != COMPLETE:
            yield f"{before.name} was interrupted, so it has only the cases finished until then"
        elif before.verdict != COMPLETE:
            yield f"{before.name} did not pass its own comparison: its verdict is {before.verdict}"

    def _clocks(self) -> Iterator[str]:
        """Yield a note for each case whose times were compared at lowered or different clocks."""
        times = (self.compared.metric == "step_time_seconds") & (self.compared.phase == STEP)
        for case, row in _by_case(self.compared[times].dropna(subset=["before", "after"])):
            new = {name: row[f"{name}_new"] for name in ("sm_clock", "lowered")}
            if notes := clock_notes(row, new):
                yield f"{case.id}: {'; '.join(notes)}"

    def _sizes(self) -> Iterator[str]:
        """Yield a note for each script whose numbers or ratios are of batches of other sizes."""
        asked = None if self.asked is None else {case for case, _ in self.asked}
        sides = [
            [o for o in run.outcomes if asked is None or o.case in asked]
            for run in (self.before, self.after)
        ]
        yield from other_sizes(*sides)
        ratios = self.compared[self.compared.of != ""].dropna(subset=["before", "after"])
        if len(ratios):
            for run in (self.before, self.after):
                for note in ratio_notes(run.outcomes, run.baseline):
                    yield f"{run.name}: {note}"

    def _regression(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return a number that exceeds its limit, with what changed most."""
        case = subject_from(row)
        cases = [case, case.with_trainer(self.after.baseline)] if row["of"] else [case]
        by_case = [largest_changes(self.before, self.after, each, row) for each in cases]
        plain = {name: None if pd.isna(v) else v for name, v in row.items() if name != "regressed"}
        return plain | {"largest_changes": [change for changes in by_case for change in changes]}


def _by_case(rows: pd.DataFrame) -> Iterator[tuple[Subject, dict[str, Any]]]:
    for row in rows.to_dict("records"):
        yield subject_from(row), {str(name): value for name, value in row.items()}


def _without_standard(run: Run) -> Iterator[tuple[Subject, str]]:
    """Yield what a run measured, without the script that `dpbench exec --baseline` copied."""
    for case, by in run.places:
        if not (isinstance(case, Script) and case.trainer == run.baseline):
            yield case, by


def _missing(cases: Sequence[tuple[Subject, str]], others: Asked) -> list[str]:
    """List the cases that ``others`` lacks.

    If ``others`` has a case with some but not all of its instruments, the missing instruments are
    named.
    """
    partly, named = {case for case, _ in {*cases} & {*others}}, dict[Subject, list[str]]()
    for case, instrument in cases:
        if (case, instrument) not in others:
            named.setdefault(case, []).append(instrument)
    return [f"{c.id} ({', '.join(by)})" if c in partly else c.id for c, by in named.items()]
