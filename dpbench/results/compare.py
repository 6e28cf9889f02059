"""Comparison of the numbers of two runs, limits on the changes of the numbers, and the verdict.

`dpbench.results.gate` applies the limits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pandas as pd

from dpbench.core.case import ALL_PHASES, AXES
from dpbench.core.errors import ConfigurationError, unknown
from dpbench.core.metrics import METRICS, Metric
from dpbench.results.rows import NUMBER, STEP
from dpbench.results.run import Run

MOST_NAMES = 10
"""The most names that a line lists. If there are more names, the line has the number of further
names."""

CHANGES = [*AXES, *NUMBER[1:], "unit", "before", "after", "change", "relative"]
"""The columns of a comparison. ``change`` is ``after - before``, and ``relative`` is ``change``
divided by the absolute value of ``before``. If ``before`` is 0, ``relative`` is 0 if ``after`` is
0, too, and NaN otherwise."""

_LIMITED = ("value", "ratio")
"""The kinds of metrics that can have a limit."""


def pairs(before: Run, after: Run, *, across: bool = False) -> pd.DataFrame:
    """Pair numbers of two runs if their case, instrument, device, phase and metric are equal.

    With ``across``, devices may differ. If they differ, the column ``device`` is ``X -> Y``. Ratios
    are left out if the runs have different baselines.

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
    old, new = (limited(run, ratios=not other_baseline(before, after)) for run in (before, after))
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
    ]
    return rows.loc[(rows.kind == "value") | is_ratio, columns]


def other_baseline(before: Run, after: Run) -> str:
    """Return why the ratios of two runs cannot be compared, or an empty string if they can."""
    if before.frame.empty or before.baseline == after.baseline:
        return ""
    return (
        f"ratios are not compared, because the baseline of {before.name} is {before.baseline} and "
        f"the baseline of {after.name} is {after.baseline}"
    )


# --- limits ---------------------------------------------------------------------------------
#
# A limit is written METRIC[@PHASE]:[±]CHANGE. The change is a share (5%), an amount in SI units
# (0.5GB, 2ms; a plain number is in the metric's own unit), or both (5%+0.1GB). A limit with both is
# exceeded only by a change that is larger than the share and larger than the amount. A limit
# without ± (or +-) is exceeded only by a change for the worse.

_PHASES = (STEP, *ALL_PHASES)
_SCALES = {
    "B": {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12},
    "s": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9},
}
_NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_SPEC = re.compile(rf"([^:@]+)(?:@([^:@]+))?:(±|\+-)?\s*({_NUMBER}[^\d+]*)(?:\+({_NUMBER}.*))?")

VARYING = ("_seconds", "_cycles", "_per_second", "_joules", "_watts", "_share")
"""Suffixes of metrics that vary between runs of the same code on the same machine. These metrics
are times, cycles, rates, energy, power and shares."""

STUDENT = (12.7, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Student's t for 95 % confidence intervals of the mean, for 1, 2, …, 9 degrees of freedom. If the
intervals of two means have a similar width and do not overlap, the means differ with more than 99 %
confidence."""

Interval = tuple[float, float]
"""A lower and an upper bound of a number."""

SYNTAX = (
    "METRIC[@PHASE]:5%, METRIC:0.5GB, METRIC:5%+0.1GB (both must be exceeded) or METRIC:±5% "
    "(in either direction)"
)


@dataclass(frozen=True)
class Limit:
    """A limit, which is the largest allowed change of one metric in one phase or the whole step.

    Args:
        metric: a metric such as ``dram_bytes``, or a ratio to the baseline such as ``dram_ratio``.
        phase: a phase, or ``"step"``.
        percent: the allowed change in percent of the reference's value, or None.
        amount: the allowed change in the metric's unit, or None.
        two_sided: whether a change for the better can exceed the limit, too.
        written: the limit as the user wrote it.
    """

    metric: str
    phase: str = STEP
    percent: float | None = None
    amount: float | None = None
    two_sided: bool = False
    written: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not all(math.isfinite(limit or 0) for limit in (self.percent, self.amount)):
            raise ConfigurationError(
                f"threshold {self.written or self.metric!r}: a limit must be finite"
            )

    @classmethod
    def parse(cls, text: str) -> Limit:
        """Read a limit from text such as ``dram_bytes@clip:5%+0.1GB``."""
        text = re.sub(r"\s*([:@])\s*", r"\1", text.strip())
        match = _SPEC.fullmatch(text)
        if match is None:
            raise ConfigurationError(f"threshold {text!r}: write {SYNTAX}")
        name, phase, sign, *parts = match.groups()
        metric = METRICS.find(name)
        if metric is None or metric.kind not in _LIMITED:
            limited = [each for each in METRICS.every().values() if each.kind in _LIMITED]
            hint = "throughputs and spreads cannot have a limit"
            raise unknown("metric", name, (each.name for each in limited), hint)
        if phase is not None and phase not in _PHASES:
            raise unknown("phase", phase, _PHASES)
        limits: dict[str, float] = {}
        for part in filter(None, parts):
            kind, value = _limit(part, metric, text)
            if kind in limits:
                raise ConfigurationError(
                    f"threshold {text!r} has two limits of one kind; write {SYNTAX}"
                )
            limits[kind] = value
        return cls(metric.name, phase or STEP, two_sided=bool(sign), written=text, **limits)

    @cached_property
    def of(self) -> str:
        """The base metric of the limited ratio, or an empty string if a value is limited."""
        metric = METRICS.find(self.metric)
        return metric.of if metric else ""

    @property
    def varies(self) -> bool:
        """True if the metric varies between runs of the same code, see `VARYING`."""
        return (self.of or self.metric).endswith(VARYING)

    def __str__(self) -> str:
        return self.written

    def exceeded(self, before: pd.Series[float], after: pd.Series[float]) -> pd.DataFrame:
        """Apply the limit to each pair of numbers.

        Returns:
            A row for each pair, with ``limit``, the allowed change in the metric's unit, and
            ``regressed``, which is true if the change exceeds the limit.
        """
        share, percent = before.abs() / 100, self.percent or 0
        # `before * percent / 100` rounds less than `share * percent`, but can overflow.
        allowed = (before.abs() * percent / 100).replace(math.inf, math.nan).fillna(share * percent)
        allowed = allowed.clip(lower=self.amount or 0)
        change = after - before
        if self.two_sided:
            change = change.abs()
        elif (metric := METRICS.find(self.metric)) and metric.higher_is_better:
            change = -change
        # A NaN change and an infinite limit count as exceeded.
        regressed = ~(change <= allowed) | (allowed == math.inf)
        return allowed.to_frame("limit").assign(regressed=regressed)

    def exceeded_between(self, before: Interval, after: Interval) -> bool | None:
        """Return True if all changes from one interval to the other exceed the limit.

        A change goes from a number in ``before`` to a number in ``after``. If the intervals
        overlap, True is never returned. False is returned if no change exceeds the limit, and None
        in the remaining cases.
        """
        corners = pd.DataFrame(product(before, after), columns=["before", "after"])
        exceeded = self.exceeded(corners.before, corners.after).regressed
        apart = before[1] < after[0] or after[1] < before[0]
        return False if not exceeded.any() else True if exceeded.all() and apart else None


def _limit(text: str, metric: Metric, whole: str) -> tuple[str, float]:
    """Read one part of a limit.

    Returns:
        ``"percent"`` or ``"amount"``, and the number in percent or in the metric's unit.
    """
    [(written, unit)] = re.findall(rf"({_NUMBER})\s*(.*)", text.strip())
    number = float(written)
    scales = {"%": 1.0, **_SCALES.get(metric.unit, {})}
    if unit and unit not in scales:
        raise ConfigurationError(
            f"threshold {whole!r}: {unit!r} is no unit of this metric; "
            f"use {', '.join(scales)}, or a plain number"
        )
    return "percent" if unit == "%" else "amount", number * scales.get(unit, 1)


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the 95 % confidence interval of the mean. A single value has an infinite interval.

    For more than 10 values, the interval is slightly too wide, because `STUDENT` has no numbers for
    more than 9 degrees of freedom.
    """
    t = STUDENT[min(len(values) - 1, len(STUDENT)) - 1]
    half = t * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return fmean(values) - half, fmean(values) + half


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
        largest: what changed most, whether it has a limit or not, see `changes_of_all`.
    """

    changes: pd.DataFrame
    judged: pd.DataFrame
    regressions: list[dict[str, Any]]
    unjudged: list[Unjudged]
    notes: list[str]
    largest: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def merge(cls, verdicts: Sequence[Verdict]) -> Verdict:
        """Merge the verdicts of several limits, or of several references, on the same run.

        Equal entries of lists are merged into one, and so are equal changes.
        """
        first, *others = verdicts
        if not others:
            return first
        return cls(
            _joined([each.changes for each in verdicts]).drop_duplicates(ignore_index=True),
            _joined([each.judged for each in verdicts]),
            _distinct(row for each in verdicts for row in each.regressions),
            _distinct(row for each in verdicts for row in each.unjudged),
            _distinct(row for each in verdicts for row in each.notes),
            _distinct(row for each in verdicts for row in each.largest),
        )


def _joined(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    return pd.concat([frame for frame in frames if len(frame)] or [*frames[:1]])


def _distinct(entries: Iterable[Any]) -> list[Any]:
    known: list[Any] = []
    for entry in entries:
        known += [entry] if entry not in known else []
    return known


def listed(names: Sequence[str]) -> str:
    """Join at most `MOST_NAMES` names with commas, and append the number of further names."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"{', '.join(names[:MOST_NAMES])}{more}"
