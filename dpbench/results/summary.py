"""The summary of a run, from which tables, charts, comparisons and limits take their numbers.

`dpbench.results.aggregation` combines ranks and steps. This module adds derived metrics: ratios,
spreads, throughputs, and quotients of measured and logical numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from dpbench.core.case import AXES, BASELINE_TRAINER, Case
from dpbench.core.metrics import DERIVED, LARGEST_SPREAD, METRICS, Kind, derived_name
from dpbench.core.subject import Subject
from dpbench.results.aggregation import aggregate, each_case, lookup
from dpbench.results.rows import (
    COLUMNS,
    NO_HARDWARE,
    NUMBER,
    OF_CASE,
    PLACE,
    STEP,
    Measurement,
)

IN_CACHE_BYTES = 1e9
"""If a step moves fewer DRAM bytes than this, tables warn about ratios of DRAM bytes: much of the
data of the step can stay in the L2 cache between kernels."""


def to_frame(measurements: Iterable[Measurement]) -> pd.DataFrame:
    """Make a long table: one row per measurement, with the columns of `Measurement.as_row`."""
    return pd.DataFrame([each.as_row() for each in measurements], columns=COLUMNS)


def summary(frame: pd.DataFrame, baseline: str = BASELINE_TRAINER) -> pd.DataFrame:
    """Summarise a long table.

    Returns:
        One row for each case, device, instrument, phase and metric. The columns include ``case``,
        the fields of the case, ``instrument``, ``device``, ``phase``, ``metric``, ``unit``, and:

        - ``value``: the mean over the steps, the median for times, rates and shares, or the maximum
          for peaks. With Poisson batches, times, rates and shares also have the mean.
          Ranks are combined as the metric defines. Some steps of a script can lack a phase, such as
          the optimizer under gradient accumulation. In these steps, a metric whose phases add up to
          the step counts as 0. If a case is no script and one of its steps lacks the metric, the
          value is NaN. A ratio without a baseline is also NaN.
        - ``kind``: the kind of a derived metric, such as ``ratio``, or ``value`` for other metrics.
          ``of``: the metric from which a derived metric was computed.
        - ``least`` and ``most``: the smallest and the largest value over the steps.
        - ``steps``: the number of steps.
        - ``steps_present``: the number of steps that have a value.
        - ``ranks``: the number of ranks.
        - ``imbalance``: the largest value of a rank divided by the mean over ranks.
        - ``ratio``: the value divided by the value of the same case with the trainer ``baseline``.
        - ``spread``: ``(most - least) / value``, or NaN for a single step.
        - ``logical``: the number that was counted without hardware for the same case and phase.
        - ``over_logical``: the value divided by ``logical``.
        - ``over_one_gpu``: the value divided by the value of the same trainer on one GPU, with the
          same batch.
        - ``preferred``: true unless another instrument with the same number is preferred.
        - ``has_baseline``: true if the same device has rows of the same case with the baseline.
        - ``in_cache``: true if the step moves fewer DRAM bytes than `IN_CACHE_BYTES`.
        - ``timed_by``: the instrument that measured the time of a throughput.
    """
    rows = with_logical(_with_ratios(aggregate(frame), baseline))
    rows["over_one_gpu"] = _over_one_gpu(rows)
    preferred = rows.index.isin(of_one_instrument(rows).index)
    rows = rows.assign(of="", kind="value", timed_by="", preferred=preferred)
    parts = [
        rows,
        *(_derived(rows, kind) for kind in DERIVED),
        _throughputs(rows),
        _largest(rows),
    ]
    whole = pd.concat([part for part in parts if not part.empty] or [rows], ignore_index=True)
    small = (whole.metric == "dram_bytes") & (whole.phase == STEP) & (whole.value < IN_CACHE_BYTES)
    standard = each_case(whole.case, lambda case: case.trainer == baseline)
    cell = [each_case(whole.case, lambda case: case.cell), *(whole[c] for c in OF_CASE[1:])]
    whole["has_baseline"] = standard.astype(bool).groupby(cell, sort=False).transform("any")
    whole["in_cache"] = small.groupby([whole[c] for c in OF_CASE], sort=False).transform("any")
    return with_axes(whole)


def with_axes(rows: pd.DataFrame) -> pd.DataFrame:
    """Add a column for each field of the cases."""
    axes = pd.DataFrame([case.columns for case in rows.case], columns=AXES, index=rows.index)
    return pd.concat([axes, rows], axis="columns")


def own_values(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a summary that are not derived from other metrics."""
    return rows[rows.kind == "value"]


def of_one_instrument(rows: pd.DataFrame, preferred: Sequence[str] = ()) -> pd.DataFrame:
    """Keep one row for each case, device, phase and metric.

    If several instruments have the number, the row of the instrument that comes first in
    ``preferred`` is kept. By default, ``preferred`` has the instruments of the metric's definition.
    """
    order = {name: preferred or instruments_of(name) for name in rows.metric.unique()}
    places = [
        order[metric].index(by) if by in order[metric] else len(order[metric])
        for metric, by in zip(rows.metric, rows.instrument, strict=True)
    ]
    best_first = rows.iloc[np.argsort(places, kind="stable")]
    return best_first.drop_duplicates([*PLACE, "metric"]).sort_index()


def dram_bytes_of_step(rows: pd.DataFrame) -> float | None:
    """Return the measured DRAM bytes of a step, or None if no instrument measured DRAM bytes."""
    step = rows[(rows.phase == STEP) & (rows.metric == "dram_bytes")]
    values = of_one_instrument(step).value
    return None if values.empty else float(values.iloc[0])


def instruments_of(name: str) -> tuple[str, ...]:
    """Return the instruments that can measure a metric, the preferred instrument first."""
    metric = METRICS.find(name)
    return metric.by if metric else ()


def _with_ratios(rows: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Add columns that compare each row with the baseline of its case.

    ``ratio`` is the quotient of both values, and ``baseline`` the name of the baseline's trainer.
    ``ratio_steps`` is the number of steps of the case or, if this is smaller, of its baseline.
    """
    cell = rows.assign(case=each_case(rows.case, lambda case: case.cell))
    of_baseline = cell[each_case(rows.case, lambda case: case.trainer == baseline).astype(bool)]
    baseline_steps = lookup(cell, of_baseline.assign(value=of_baseline.steps), NUMBER)
    return rows.assign(
        ratio=divided(rows.value, lookup(cell, of_baseline, NUMBER)),
        baseline=baseline,
        ratio_steps=rows.steps.where(~(baseline_steps < rows.steps), baseline_steps),
    )


def divided(values: pd.Series[float], divisors: pd.Series[float]) -> pd.Series[float]:
    """Divide values. The result is NaN if the divisor is 0 or NaN."""
    return values / divisors.where(divisors != 0)


def with_logical(rows: pd.DataFrame) -> pd.DataFrame:
    """Add ``logical`` and ``over_logical`` to rows that hardware measured.

    Logical counting counts only the first rank. If a metric is summed over ranks, ``logical`` is
    therefore the counted number times the number of GPUs.
    """
    by_hardware = rows.device != NO_HARDWARE
    logical_of = {metric.name: metric.logical for metric in METRICS.values() if metric.logical}
    logical_metric = rows.metric.map(logical_of).where(by_hardware).astype(object)
    counted = of_one_instrument(rows[~by_hardware])
    on = [column for column in (*PLACE, "metric") if column != "device"]
    logical = lookup(rows.assign(metric=logical_metric), counted, on)
    summed = [name for name, metric in METRICS.items() if metric.over("rank") == "sum"]
    gpus = each_case(rows.case, lambda case: case.gpus)
    logical *= gpus.clip(lower=1).where(rows.metric.isin(summed), 1)  # 0 GPUs: a script
    return rows.assign(logical=logical, over_logical=divided(rows.value, logical))


def _over_one_gpu(rows: pd.DataFrame) -> pd.Series[float]:
    """Divide values on several GPUs by values on one GPU with the same trainer and batch."""
    gpus = each_case(rows.case, lambda case: case.gpus)
    several = rows[gpus > 1]
    if several.empty:
        return pd.Series(np.nan, rows.index)
    on_one = each_case(several.case, _on_one_gpu)
    values = lookup(several.assign(case=on_one), rows[gpus == 1], NUMBER).reindex(rows.index)
    return divided(rows.value, values)


def _on_one_gpu(case: Subject) -> Subject:
    return replace(case, parallel="none", gpus=1) if isinstance(case, Case) else case


def _derived(rows: pd.DataFrame, kind: Kind) -> pd.DataFrame:
    """Make rows of derived metrics from a column, e.g. ``dram_ratio`` from ``ratio``.

    A case without a baseline gets a ratio of NaN, but a script without a baseline gets no ratio.
    """
    known = rows[kind].notna()
    if kind == "ratio":
        known |= each_case(rows.case, lambda case: isinstance(case, Case)).astype(bool)
        rows = rows.assign(steps=rows.ratio_steps)
    if kind == "spread":
        known &= rows.metric.isin([metric.name for metric in METRICS.values() if metric.spread])
    if not known.any():
        return rows[:0]
    rows = rows[known]
    names = {metric: derived_name(metric, kind) for metric in rows.metric.unique()}
    unit = rows.unit if kind == "logical" else "1"
    value = rows[kind].astype(float)
    return rows.assign(
        of=rows.metric, metric=rows.metric.map(names), value=value, unit=unit, kind=kind
    )


def _throughputs(rows: pd.DataFrame) -> pd.DataFrame:
    """Make rows of throughputs: the bytes of a step divided by the time of an unprofiled step.

    The time comes from the instrument that counted the bytes if this instrument measured times,
    otherwise from another instrument.
    """
    step = rows[rows.phase == STEP]
    times = step[step.metric == "step_time_seconds"].assign(metric="")
    whole = [metric.name for metric in METRICS.values() if not metric.adds_up]
    counters, timers = instruments_of("dram_bytes"), instruments_of("step_time_seconds")
    counted = step[(step.unit == "B") & ~step.metric.isin(whole) & step.instrument.isin(counters)]
    if counted.empty or times.empty:
        return rows[:0]
    seconds = lookup(counted.assign(metric=""), times, NUMBER)
    by = counted.instrument.where(seconds.notna(), "")
    for timer in timers:
        if seconds.notna().all():
            break
        other = lookup(counted.assign(metric="", instrument=timer), times, NUMBER)
        by = by.mask(seconds.isna() & other.notna(), timer)
        seconds = seconds.fillna(other)
    names = counted.metric.map(lambda metric: derived_name(metric, "throughput"))
    rates = counted.assign(of=counted.metric, metric=names, value=counted.value / seconds)
    rates = rates.assign(unit="B/s", kind="throughput", timed_by=by, spread=np.nan)
    return rates[seconds.notna()]


def _largest(rows: pd.DataFrame) -> pd.DataFrame:
    """Make a row for each case, device and phase with the largest spread of any metric.

    Only metrics whose `Metric.spread` is true are considered.
    """
    spreads = _derived(rows[rows.preferred], "spread")
    largest = spreads.sort_values("value", ascending=False, kind="stable")
    return largest.assign(metric=LARGEST_SPREAD.name, of="").drop_duplicates(PLACE)
