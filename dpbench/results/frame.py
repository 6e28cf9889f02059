"""The long table as a pandas DataFrame: summaries over steps, derived metrics, ratios."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pandas as pd

from dpbench.case import ALL_PHASES, AXES, BASELINE_TRAINER
from dpbench.metrics import METRICS, ratio_name
from dpbench.results.rows import COLUMNS, STEP, Measurement, as_rows

CONFIGURATION = [axis for axis in AXES if axis != "trainer"]
"""The columns that a case shares with its baseline."""

PREFERRED = ("ncu", "timing", "cupti")
"""Whose numbers are shown where several instruments have the same."""

IN_CACHE_BYTES = 1e9
"""Below this, a step's data stays in the L2 cache (60 MB on an H200) between kernels, and
ratios of DRAM bytes say nothing."""


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
        if metric.name == "gpu_busy_share":
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
    times = timed.groupby(case).value.median()
    spans = frame[frame.metric == "range_time_seconds"]
    keys = [*case, "phase", "repeat", "again"]
    spans = spans.assign(again=spans.groupby(keys[:-1]).cumcount()).set_index(keys)
    ranges = busy[keys].join(spans.value.rename("span"), on=keys)
    ranges = ranges.join(times.rename("timed"), on=case)
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


def with_ratios(summary: pd.DataFrame, baseline: str = BASELINE_TRAINER) -> pd.DataFrame:
    """A summary with the column ``ratio``: value over that of the same cell's ``baseline``.

    Each metric has a ratio, by phase and for the step; NaN where no baseline was measured or
    it moved nothing.
    """
    keys = [*CONFIGURATION, "instrument", "phase", "metric", "device"]
    divisors = summary[summary.trainer == baseline][[*keys, "value"]]
    divisors = divisors.rename(columns={"value": "divisor"})
    merged = summary.merge(divisors, on=keys, how="left", validate="m:1")
    merged["ratio"] = merged.value / merged.divisor.where(merged.divisor != 0)
    return merged.drop(columns="divisor").assign(baseline=baseline)


def numbers(frame: pd.DataFrame, baseline: str = BASELINE_TRAINER) -> pd.DataFrame:
    """A number per case, instrument, device, metric and phase; ratios as metrics of their own.

    A number of which a repeat is none is left out: its sum or mean would be wrong.
    """
    keys = [*AXES, "instrument", "metric", "phase", "device"]
    wrong = ~np.isfinite(frame.value.astype(float))
    if wrong.any():
        named = pd.MultiIndex.from_frame(frame[wrong][keys])
        frame = frame[~pd.MultiIndex.from_frame(frame[keys]).isin(named)]
    summary = with_ratios(summarise(frame), baseline)
    ratios = summary[(summary.trainer != baseline) & summary.ratio.notna()]
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
    if by_hardware.all() or not by_hardware.any():
        return summary.assign(logical=np.nan, over_logical=np.nan)
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
    of_case, step = [*AXES, "device"], summary[summary.phase == STEP]
    times = step[(step.metric == "step_time_seconds") & step.instrument.isin(["timing", "cupti"])]
    counted = step[(step.unit == "B") & (step.metric != "peak_memory_bytes")]
    counted = counted[counted.instrument.isin(["ncu", "cupti"])]
    if times.empty or counted.empty:
        return step[:0]
    times = times.sort_values("instrument", ascending=False, kind="stable")  # timing's first
    times = times.set_index(of_case)[["value", "instrument"]].add_prefix("time_")
    by = [counted[counted.instrument == name].join(times, on=of_case) for name in ("ncu", "cupti")]
    by[1] = by[1][by[1].time_instrument == "cupti"]
    rates = pd.concat([each.dropna(subset="time_value") for each in by], ignore_index=True)
    rates = rates.drop_duplicates([*of_case, "instrument", "metric"])
    return rates.assign(
        value=rates.value / rates.time_value,
        metric=rates.metric.str.replace("_bytes", "_throughput"),
        unit="B/s",
        instrument=rates.instrument + " bytes / " + rates.time_instrument + " seconds",
        spread=float("nan"),
    ).drop(columns=["time_value", "time_instrument"])


# --- the account of a step ----------------------------------------------------------------------
#
# Kernel replay counts the bytes of each kernel and misses copies and memsets; the PyTorch profiler
# knows how many bytes those moved; range counters see everything. If the first two add up to the
# third, nothing is missing from a table of kernels and copies.

TOLERANCE = 0.01
"""The share of the step's bytes up to which the remainder of an account is in order."""

OTHER_COPIES = "memcpy_other_bytes"
"""Copies of which a trace says no direction that it knows; there are rows only if there are any."""

BOTH_WAYS = ("memcpy_device_to_device_bytes", OTHER_COPIES)
"""Copies that read and write device memory; one to the host reads, one from it writes."""

ACCOUNT_COLUMNS = {
    "kernels_read": ("ncu_kernels", ("kernel_dram_read_bytes",)),
    "kernels_written": ("ncu_kernels", ("kernel_dram_write_bytes",)),
    "copies_read": ("torch_profiler", (*BOTH_WAYS, "memcpy_device_to_host_bytes")),
    "copies_written": (
        "torch_profiler",
        (*BOTH_WAYS, "memcpy_host_to_device_bytes", "memset_bytes"),
    ),
    "range_read": ("ncu", ("dram_read_bytes",)),
    "range_written": ("ncu", ("dram_write_bytes",)),
}
"""The columns of an account: the instrument and the metrics whose sum each is."""


def account(frame: pd.DataFrame) -> pd.DataFrame | None:
    """The account of one case on one device, in bytes of one step: a row for each phase and STEP.

    Columns are `ACCOUNT_COLUMNS`, then ``remainder`` (range less kernels less copies) and
    ``share`` (the remainder over the step's range). None if one of the numbers is not there.
    """
    instruments = {instrument for instrument, _ in ACCOUNT_COLUMNS.values()}
    summary = summarise(frame[frame.instrument.isin(instruments)])
    parts = {name: _by_phase(summary, *source) for name, source in ACCOUNT_COLUMNS.items()}
    if summary.device.nunique() != 1 or any(part is None for part in parts.values()):
        return None
    # A phase that an instrument does not name is one in which it saw nothing: clip of ghost
    # clipping has copies and no kernel. That the instrument saw the step is checked.
    table = pd.DataFrame(parts).fillna(0.0)
    table = table.reindex([phase for phase in (*ALL_PHASES, STEP) if phase in table.index])
    ranges = table.range_read + table.range_written
    counted = table.drop(columns=["range_read", "range_written"]).sum(axis="columns")
    return table.assign(remainder=ranges - counted, share=(ranges - counted) / ranges[STEP])


def _by_phase(
    summary: pd.DataFrame, instrument: str, metrics: tuple[str, ...]
) -> pd.Series[float] | None:
    """The sum of an instrument's metrics by phase; None if one of its phases lacks one."""
    known = {
        metric for by, names in ACCOUNT_COLUMNS.values() if by == instrument for metric in names
    }
    rows = summary[(summary.instrument == instrument) & summary.metric.isin(known)]
    wide = rows.pivot(index="phase", columns="metric", values="value").reindex(columns=[*metrics])
    needed = wide.drop(columns=OTHER_COPIES, errors="ignore")
    if STEP not in wide.index or needed.isna().any(axis=None):
        return None
    return wide.sum(axis="columns")


def in_cache(account: pd.DataFrame) -> bool:
    """Whether the step is so small that copies stay in the L2 cache, and nothing adds up."""
    return bool(account.range_read[STEP] + account.range_written[STEP] < IN_CACHE_BYTES)


def unaccounted(account: pd.DataFrame) -> bool:
    """Whether more of the step is left over than `TOLERANCE`, of steps that reach DRAM."""
    return not in_cache(account) and bool(abs(account.share[STEP]) > TOLERANCE)
