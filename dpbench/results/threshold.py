"""How much a number may change: ``METRIC[@PHASE]:[±]LIMIT``.

A limit is a share (``5%``), an amount in SI units (``0.5GB``, ``2ms``, a plain number in the
metric's own unit), or both (``5%+0.1GB``): then only a change beyond both counts. Without ``±``
(or ``+-``) only a change for the worse counts.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

import pandas as pd

from dpbench.case import ALL_PHASES
from dpbench.errors import ConfigurationError, unknown
from dpbench.metrics import METRICS, RATIO, ratio_name
from dpbench.results.rows import STEP

_PHASES = (STEP, *ALL_PHASES)
_SCALES = {
    "B": {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12},
    "s": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9},
}
_UNITS = {unit: base for base, scales in _SCALES.items() for unit in scales}
_NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_SPEC = re.compile(rf"([^:@]+)(?:@([^:@]+))?:(±|\+-)?\s*({_NUMBER}[^\d+]*)(?:\+({_NUMBER}.*))?")

SYNTAX = "METRIC[@PHASE]:5%, METRIC:0.5GB, METRIC:5%+0.1GB (beyond both), METRIC:±5% (either way)"


@dataclass(frozen=True)
class Threshold:
    """The change of one metric that is still no regression.

    Args:
        metric: the metric, e.g. ``dram_bytes``, whose value or ratio is meant.
        ratio: whether it is the metric's ratio to standard.
        phase: a phase, or ``"step"``.
        percent: of the value before, or None.
        amount: in the metric's unit, or None.
        two_sided: whether a change for the better counts too.
        written: how the user put it.
    """

    metric: str
    ratio: bool = False
    phase: str = STEP
    percent: float | None = None
    amount: float | None = None
    two_sided: bool = False
    written: str = field(default="", compare=False)

    @classmethod
    def parse(cls, text: str) -> Threshold:
        """Read what a user wrote, such as ``dram_bytes@clip:5%+0.1GB``."""
        text = re.sub(r"\s*([:@])\s*", r"\1", text.strip())
        match = _SPEC.fullmatch(text)
        if match is None:
            raise ConfigurationError(f"threshold {text!r}: write {SYNTAX}")
        name, phase, sign, *parts = match.groups()
        metric, ratio = _resolve(name)
        if phase is not None and phase not in _PHASES:
            raise unknown("phase", phase, _PHASES)
        limits: dict[str, float] = {}
        for part in filter(None, parts):
            kind, value = _limit(part, metric, ratio, text)
            if kind in limits:
                raise ConfigurationError(f"threshold {text!r} has two limits of one kind; {SYNTAX}")
            limits[kind] = value
        return cls(metric, ratio, phase or STEP, two_sided=bool(sign), written=text, **limits)

    @property
    def name(self) -> str:
        """The metric as a user names it, e.g. ``dram_ratio``."""
        return ratio_name(self.metric) if self.ratio else self.metric

    @property
    def limit(self) -> str:
        """The limit as it was written, e.g. ``±5%``."""
        return self.written.rpartition(":")[2]

    def __str__(self) -> str:
        return self.written

    def exceeded(self, before: pd.Series[float], after: pd.Series[float]) -> pd.DataFrame:
        """For each pair of numbers the change that is allowed, and whether it is exceeded."""
        allowed = (before.abs() * (self.percent or 0) / 100).clip(lower=self.amount or 0)
        change = after - before
        if self.two_sided:
            change = change.abs()
        elif self.metric in METRICS and METRICS[self.metric].higher_is_better:
            change = -change
        return allowed.to_frame("limit").assign(regressed=change > allowed)


def _resolve(name: str) -> tuple[str, bool]:
    """The metric that a name means, and whether its ratio is meant."""
    if name in METRICS or ("__" in name and not name.endswith(RATIO)):
        return name, False
    if name.endswith(RATIO):
        own = name.removesuffix(RATIO)
        if metric := METRICS.of_ratio(name) or (own if own in METRICS or "__" in own else None):
            return metric, True
    if (total := re.sub("_bytes$", "_total_bytes", name)) in METRICS:  # of l2_bytes
        return total, False
    made_of = {metric.stem: metric.name for metric in METRICS.values()}
    whole, _, worked_out = name.rpartition("_")
    metric = made_of.get(whole.removesuffix("_over"))
    if metric is None or worked_out not in ("throughput", "spread", "logical"):
        hint = "or the ratio of one to standard, such as dram_ratio"
        raise unknown("metric", name, METRICS, hint)
    raise ConfigurationError(
        f"{name} is worked out from what was measured, and has no limit: set one for {metric}"
        f"{' or step_time_seconds' * (worked_out == 'throughput')}"
    )


def _limit(text: str, metric: str, ratio: bool, whole: str) -> tuple[str, float]:
    """One part of a limit as the name of its field and its value."""
    [(written, unit)] = re.findall(rf"({_NUMBER})\s*(.*)", text.strip())
    number = float(written)
    if not math.isfinite(number * max(_SCALES["B"].values())):
        raise ConfigurationError(f"threshold {whole!r}: no number is as large as {written}")
    if unit == "%":
        return "percent", number
    base = "B" if metric.endswith("_bytes") else "s" if metric.endswith("_seconds") else None
    if not unit:
        return "amount", number
    if ratio or base is None or _UNITS.get(unit) != base:
        allowed = ["%", *(_SCALES[base] if base and not ratio else ())]
        raise ConfigurationError(
            f"threshold {whole!r}: {unit!r} is no unit of this metric; "
            f"use {', '.join(allowed)}, or a plain number"
        )
    return "amount", number * _SCALES[base][unit]
