"""Limits on the change of a number between two runs, and what they say of a run.

This module does not import pandas, because pytest reads limits when it starts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from statistics import fmean, stdev
from typing import Any

from dpbench.core.case import ALL_PHASES
from dpbench.core.errors import ConfigurationError, unknown
from dpbench.core.metrics import METRICS, Metric
from dpbench.results.rows import STEP

MOST_NAMES = 10
"""The most names that a line lists. If there are more names, the line has the number of further
names."""

_LIMITED = ("value", "ratio")
"""The kinds of metrics that can have a limit."""

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

RENEW = "if this is meant, write the reference anew"

VARYING = ("_seconds", "_cycles", "_per_second", "_hz", "_joules", "_watts", "_share")
"""Suffixes of metrics that vary between runs of the same code on the same machine. These metrics
are times, cycles, rates, clocks, energy, power and shares."""

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

    def exceeded(self, before: float, after: float) -> tuple[float, bool]:
        """Return the allowed change in the metric's unit, and whether the change exceeds it."""
        percent = self.percent or 0
        # `before * percent / 100` rounds less than `before / 100 * percent`, but can overflow.
        allowed = abs(before) * percent / 100
        allowed = abs(before) / 100 * percent if math.isinf(allowed) else allowed
        allowed = max(allowed, self.amount or 0)
        change = after - before
        if self.two_sided:
            change = abs(change)
        elif (metric := METRICS.find(self.metric)) and metric.higher_is_better:
            change = -change
        # A NaN change and an infinite limit count as exceeded.
        return allowed, not change <= allowed or math.isinf(allowed)

    def exceeded_between(self, before: Interval, after: Interval) -> bool | None:
        """Return True if all changes from one interval to the other exceed the limit.

        A change goes from a number in ``before`` to a number in ``after``. If the intervals
        overlap, True is never returned. False is returned if no change exceeds the limit, and None
        in the remaining cases.
        """
        exceeded = [self.exceeded(*corner)[1] for corner in product(before, after)]
        apart = before[1] < after[0] or after[1] < before[0]
        return False if not any(exceeded) else True if all(exceeded) and apart else None


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


def listed(names: Sequence[str]) -> str:
    """Join at most `MOST_NAMES` names with commas, and append the number of further names."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"{', '.join(names[:MOST_NAMES])}{more}"


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
class Judgement:
    """What limits say of a run.

    Args:
        judged: the numbers of both runs that have a limit, as plain JSON types: `CHANGES`, ``of``,
            ``limit`` (the allowed change in the metric's unit), ``regressed`` (None if the limit
            was not checked, see ``unjudged``), ``threshold`` (the limit as written) and
            ``reference`` (the name of the run that the number is compared with).
        regressions: those that exceed a limit, each with its `largest_changes`. NaN is None.
        unjudged: the limits that could not be checked, each with the cases and the reason.
    """

    judged: list[dict[str, Any]] = field(default_factory=list)
    regressions: list[dict[str, Any]] = field(default_factory=list)
    unjudged: list[Unjudged] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """False if a number exceeds its limit, or a limit could not be checked."""
        return not (self.regressions or self.unjudged)

    @classmethod
    def merge(cls, parts: Iterable[Judgement]) -> Judgement:
        """Merge the judgements on the parts of a run. Equal entries are merged into one."""
        names = ("judged", "regressions", "unjudged")
        lists = ([each for part in parts for each in getattr(part, name)] for name in names)
        return cls(*([*{repr(each): each for each in entries}.values()] for entries in lists))
