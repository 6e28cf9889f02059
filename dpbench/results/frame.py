"""The long table as a pandas DataFrame: summaries over steps, derived metrics, ratios."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pandas as pd

from dpbench.case import AXES, BASELINE_TRAINER
from dpbench.metrics import METRICS, ratio_name
from dpbench.results.rows import COLUMNS, STEP, Measurement, as_rows

CONFIGURATION = [axis for axis in AXES if axis != "trainer"]
"""The columns that a case shares with its baseline."""

PREFERRED = ("ncu", "timing", "cupti")
"""Whose numbers are shown where several instruments have the same."""

IN_CACHE_BYTES = 1e9
"""Below this, a step's data stays in the L2 cache (60 MB on an H200) between kernels, and
ratios of DRAM bytes say nothing."""

BUSY = "gpu_busy_share"

RATES = "{} bytes / {} seconds"
"""The instrument of a throughput, from those of its factors."""


def to_frame(measurements: Iterable[Measurement]) -> pd.DataFrame:
    """One row per measurement, with the columns of `Measurement.as_row`."""
    return pd.DataFrame(as_rows(measurements), columns=COLUMNS)


def with_totals(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with rows of metrics that are sums or shares added, step by step.

    A step that is in the frame twice, because its case was measured twice, has two totals.
    """
    frame = pd.concat([frame, *_shares(frame)], ignore_index=True)
    sums = {metric.name: metric.sum_of for metric in METRICS.values() if metric.sum_of}
    pairs = [(part, total) for total, parts in sums.items() for part in parts]
    parts = frame.merge(pd.DataFrame(pairs, columns=["metric", "total"]), on="metric")
    keys = [c for c in frame.columns if c not in ("metric", "value")]
    # Grouping by so many columns is what takes time here, so it happens once: by number after.
    parts["step"] = parts.groupby(["total", *keys]).ngroup()
    parts["again"] = parts.groupby(["step", "metric"]).cumcount()
    parts = parts.sort_values(["step", "again"], kind="stable")
    summands = parts.groupby(["step", "again"]).value
    totals = parts.assign(metric=parts.total, value=summands.transform("sum"))
    complete = summands.transform("size") == parts.total.map({t: len(m) for t, m in sums.items()})
    totals = totals[complete & ~parts.duplicated(["step", "again"])]
    return pd.concat([frame, totals[frame.columns]], ignore_index=True)


def _shares(frame: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """The rows of each metric that is the ratio of two."""
    keys = [column for column in frame.columns if column not in ("metric", "value")]
    present = set(frame.metric)
    for metric in METRICS.values():
        if not (metric.share_of and present.issuperset(metric.share_of)):
            continue
        rows = frame[frame.metric.isin(metric.share_of)]
        rows = rows.assign(again=rows.groupby([*keys, "metric"]).cumcount())
        part, whole = (rows[rows.metric == name] for name in metric.share_of)
        both = part.merge(whole, on=[*keys, "again"], suffixes=("", "_of_whole"))
        both = both[both.value_of_whole > 0]
        both = both.assign(metric=metric.name, value=both.value / both.value_of_whole)
        if metric.name == BUSY:
            both["value"] = _of_timed_steps(frame, both)
        yield both[frame.columns]


def _of_timed_steps(frame: pd.DataFrame, busy: pd.DataFrame) -> pd.Series[float]:
    """Busy shares of whole steps as parts of the time of the steps that were timed, if any were.

    A step that is counted starts with an idle GPU and is waited for; while steps are timed the CPU
    launches the next one's work during the last. Where launches take long, that is a large part of
    a counted step's time, and none of its busy time.
    """
    case = [*AXES, "instrument", "device"]
    timed = frame[(frame.metric == "step_time_seconds") & (frame.phase == STEP)]
    times = timed.groupby(case).value.median().rename("timed")
    spans = frame[frame.metric == "range_time_seconds"]
    keys = [*case, "phase", "repeat", "again"]
    spans = spans.assign(again=spans.groupby(keys[:-1]).cumcount()).set_index(keys).value
    ranges = busy[keys].join(spans.rename("span"), on=keys).join(times, on=case)
    # Two different steps: what is all busy may come out as a little more.
    of_timed = (busy.value * ranges.span / ranges.timed).clip(upper=1.0)
    return of_timed.where((busy.phase == STEP) & of_timed.notna(), busy.value)


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per case, instrument, phase and metric, over the active steps.

    ``value`` is the mean over the steps, for times and rates the median; ``spread`` is
    (largest - smallest) / value, over ``repeats`` steps. Metrics of `with_totals` included.

    A phase that only some steps have, such as the optimizer's under gradient accumulation, did
    nothing in the others: its value is the mean over all steps, and phases add up to the step.
    """
    frame = with_totals(frame)
    keys = [*AXES, "instrument", "phase", "metric", "unit", "device"]
    grouped = frame.groupby(keys, sort=False).value
    summary = grouped.agg(["mean", "median", "min", "max", "count"]).reset_index()
    middle = [metric.name for metric in METRICS.values() if metric.middle]
    whole = [metric.name for metric in METRICS.values() if not metric.adds_up]
    summary["value"] = summary["mean"].where(~summary.metric.isin(middle), summary["median"])
    steps = _steps(summary)
    partial = (summary["count"] < steps) & ~summary.metric.isin(whole)
    summary.loc[partial, "min"] = 0.0
    summary.loc[partial, "value"] = summary["mean"] * summary["count"] / steps
    summary["spread"] = ((summary["max"] - summary["min"]) / summary.value).fillna(0.0)
    summary["repeats"] = steps.where(partial, summary["count"])
    return summary.drop(columns=["mean", "median", "min", "max", "count"])


def of_one_instrument(summary: pd.DataFrame) -> pd.DataFrame:
    """The summary with one number a case, device, phase and metric: of `PREFERRED`, the first's."""
    places = summary.instrument.map({name: place for place, name in enumerate(PREFERRED)})
    first = summary.assign(place=places).sort_values("place", kind="stable")
    keys = [*AXES, "device", "phase", "metric"]
    return summary.loc[first.drop_duplicates(keys).index.sort_values()]


def _steps(summary: pd.DataFrame) -> pd.Series[int]:
    """For each row, over how many steps its like was counted; 0 where no whole step was.

    Whole steps can be counted more often than phases.
    """
    like = summary.groupby([*AXES, "instrument", "metric", "unit", "device"]).ngroup()
    is_step, counts = summary.phase == STEP, summary["count"].astype(float)
    whole = counts.where(is_step).groupby(like).transform("max")
    parts = counts.mask(is_step).groupby(like).transform("max")
    return whole.where(is_step | (whole < parts), parts.where(whole.notna())).fillna(0).astype(int)


def with_ratios(summary: pd.DataFrame) -> pd.DataFrame:
    """A summary with the column ``ratio``: value over that of the same cell's baseline.

    Each metric has a ratio, by phase and for the step; NaN where no baseline was measured or
    it moved nothing.
    """
    keys = [*CONFIGURATION, "instrument", "phase", "metric", "device"]
    baseline = summary[summary.trainer == BASELINE_TRAINER][[*keys, "value"]]
    merged = summary.merge(
        baseline.rename(columns={"value": "baseline"}), on=keys, how="left", validate="m:1"
    )
    merged["ratio"] = merged.value / merged.baseline.where(merged.baseline != 0)
    return merged.drop(columns="baseline")


def numbers(frame: pd.DataFrame) -> pd.DataFrame:
    """A number per case, instrument, device, metric and phase; ratios as metrics of their own.

    A number of which a repeat is none is left out: its sum or mean would be wrong.
    """
    keys = [*AXES, "instrument", "metric", "phase", "device"]
    wrong = ~np.isfinite(frame.value.astype(float))
    if wrong.any():
        named = pd.MultiIndex.from_frame(frame[wrong][keys])
        frame = frame[~pd.MultiIndex.from_frame(frame[keys]).isin(named)]
    summary = with_ratios(summarise(frame))
    ratios = summary[(summary.trainer != BASELINE_TRAINER) & summary.ratio.notna()]
    names = {metric: ratio_name(metric) for metric in ratios.metric.unique()}
    ratios = ratios.assign(metric=ratios.metric.map(names), value=ratios.ratio, unit="1")
    return pd.concat([summary, ratios], ignore_index=True)[[*keys, "unit", "value"]]


def with_logical(summary: pd.DataFrame) -> pd.DataFrame:
    """A summary with the columns ``logical`` and ``over_logical`` beside what hardware measured.

    ``logical`` is what an unfused step must move at least (for peak memory: must hold) in the
    same case and phase, counted without hardware; ``over_logical`` is value ÷ logical, how often
    the hardware moves what such a step moves once. NaN where nothing was counted, where that is
    0, and in the rows of logical counting itself.
    """
    by_hardware = summary.instrument != "logical"
    said = {metric.name: metric.logical for metric in METRICS.values() if metric.logical}
    measured = summary.assign(counterpart=summary.metric.map(said).where(by_hardware))
    counted = summary[~by_hardware][[*AXES, "phase", "metric", "value"]]
    merged = measured.merge(
        counted.rename(columns={"metric": "counterpart", "value": "logical"}),
        on=[*AXES, "phase", "counterpart"],
        how="left",
        validate="m:1",
    )
    merged["over_logical"] = merged.value / merged.logical.where(merged.logical != 0)
    return merged.drop(columns="counterpart")


def throughputs(summary: pd.DataFrame) -> pd.DataFrame:
    """Counted bytes per second of unprofiled step time, for each byte metric of the step.

    By ncu the two factors come from two processes, one profiled and one not, which may be CUPTI's;
    the instrument column says so.
    """
    step = summary[summary.phase == STEP]
    cases = step.set_index([*AXES, "device"]).index
    untimed = ~cases.isin(cases[step.instrument == "timing"])
    parts = [
        _throughputs(step, "ncu", "timing"),
        _throughputs(step[untimed], "ncu", "cupti"),
        _throughputs(step, "cupti", "cupti"),
    ]
    return pd.concat([part for part in parts if not part.empty] or parts[:1], ignore_index=True)


def _throughputs(step: pd.DataFrame, counted_by: str, timed_by: str) -> pd.DataFrame:
    times = step[(step.metric == "step_time_seconds") & (step.instrument == timed_by)]
    times = times[[*AXES, "device", "value"]].rename(columns={"value": "seconds"})
    of_traffic = (step.unit == "B") & (step.metric != "peak_memory_bytes")
    counted = step[of_traffic & (step.instrument == counted_by)]
    merged = counted.merge(times, on=[*AXES, "device"], validate="m:1")
    return merged.assign(
        value=merged.value / merged.seconds,
        metric=merged.metric.str.replace("_bytes", "_throughput"),
        unit="B/s",
        instrument=RATES.format(counted_by, timed_by),
        spread=float("nan"),
    ).drop(columns="seconds")
