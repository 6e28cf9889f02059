"""The long table as a pandas DataFrame: summaries over steps, derived metrics, ratios."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from dpbench.case import ALL_PHASES, AXES, BASELINE_TRAINER, SCRIPT, Case
from dpbench.errors import ConfigurationError
from dpbench.metric import DERIVED, Kind, Share, derived_name
from dpbench.metrics import LARGEST_SPREAD, METRICS, OTHER_COPIES
from dpbench.results.rows import COLUMNS, STEP, Measurement, as_rows, identity, summed

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


def as_tuples(frame: pd.DataFrame, columns: Iterable[str]) -> list[tuple[Any, ...]]:
    """The values of these columns, a tuple a row.

    To group or join by so many columns with these takes a tenth of the time of pandas' own ways.
    """
    return list(zip(*(frame[column].tolist() for column in columns), strict=True))


def with_totals(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with rows of metrics that are sums or shares of others added, step by step."""
    made = [metric for metric in METRICS.behind({*frame.metric}) if metric.parts]
    if not made:
        return frame
    needed = [*{part for metric in made for part in metric.parts}, "range_time_seconds"]
    keys = [column for column in frame.columns if column not in ("metric", "value", "unit")]
    counted: dict[tuple[Any, ...], dict[str, float]] = defaultdict(dict)
    rows = as_tuples(frame[frame.metric.isin(needed)], [*keys, "metric", "value"])
    for *step, metric, value in rows:
        counted[tuple(step)][metric] = value
    steps = pd.DataFrame([*counted], columns=keys)
    wide = pd.DataFrame([*counted.values()], columns=needed)
    added = []
    for metric in made:
        values = wide[[*metric.parts]].sum(axis="columns", skipna=False)
        if isinstance(metric.how, Share):
            part, whole = (wide[name] for name in metric.parts)
            values = part / whole.where(whole > 0)
        if metric.name == "gpu_busy_share":
            values = _of_timed_steps(values, wide.range_time_seconds, steps, frame)
        if not (values := values.dropna()).empty:
            own = steps.loc[values.index]
            added.append(own.assign(metric=metric.name, value=values, unit=metric.unit))
    return pd.concat([frame, *added], ignore_index=True)[frame.columns]


def _of_timed_steps(
    shares: pd.Series[float], spans: pd.Series[float], steps: pd.DataFrame, frame: pd.DataFrame
) -> pd.Series[float]:
    """The shares of ranges, as parts of the time that a step or phase takes when it is not counted.

    What is counted starts with an idle GPU and is waited for; while steps are timed the CPU
    launches the next work during the last. Where launches take long, that is a large part of a
    range's time, and none of its busy time. Where nothing was timed, a step's share is unknown, and
    a phase's that of its range.
    """
    case = identity("metric", "repeat")
    timed = frame[frame.metric == "step_time_seconds"]
    number = _numbered(timed, case)
    timed = timed.assign(value=timed.value.groupby(number).transform("median"))
    times = _beside(steps, timed[~number.duplicated()], case)
    # Two different steps: what is all busy may come out as a little more.
    of_timed = (shares * spans / times.where(times > 0)).clip(upper=1.0)
    return of_timed.fillna(shares.where(steps.phase != STEP))


def _numbered(frame: pd.DataFrame, keys: Iterable[str]) -> pd.Series[int]:
    """A number for each row, from 0 on, the same where the keys are."""
    numbers: dict[tuple[Any, ...], int] = {}
    each = [numbers.setdefault(key, len(numbers)) for key in as_tuples(frame, keys)]
    return pd.Series(each, frame.index, dtype=int)


def over_ranks(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with one row for all ranks of a step, which it says are ``ranks``.

    Each metric says how: bytes are their sum, times the longest, shares the mean.

    Raises:
        ConfigurationError: some ranks lack a number of the whole step, or nobody says how the
            metric is to be had of several.
    """
    if not frame["rank"].any():
        return frame.assign(ranks=1)
    number = _numbered(frame, [*identity("rank"), "unit"])
    values = frame.value.groupby(number)
    reduced = frame[~number.duplicated()].reset_index(drop=True).assign(ranks=values.count())
    every = reduced.ranks.groupby(_numbered(reduced, summed("metric", "phase"))).transform("max")
    for row in reduced[(reduced.ranks < every) & (reduced.phase == STEP)].to_dict("records"):
        raise ConfigurationError(
            f"{Case.from_row(row).id}: some ranks have no {row['metric']} of step {row['repeat']}"
        )
    return reduced.assign(value=_aggregate(values, reduced.metric, "rank"), rank=0)


def _aggregate(values: Any, metrics: pd.Series[str], column: str) -> pd.Series[float]:
    """A number for each group of values that differ along a column, as its metric says."""
    known = {name: METRICS.find(name) for name in metrics.unique()}
    if column == "rank" and (unknown := [name for name, metric in known.items() if not metric]):
        raise ConfigurationError(f"nobody says what {unknown[0]} is of several ranks: register it")
    how = metrics.map({name: m.over(column) if m else "mean" for name, m in known.items()})
    reduced: pd.Series[float] = values.mean()
    for other in {*how} - {"mean"}:
        reduced = reduced.mask(how == other, values.agg(other))
    return reduced


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per case, instrument, phase and metric, over ranks and active steps.

    ``value`` is the mean over the steps, for times and rates the median; ``spread`` is
    (largest - smallest) / value, over ``repeats`` steps. Metrics of `with_totals` included. Of
    several ``ranks`` each step is what `over_ranks` says.

    A phase that only some of a script's steps have, such as the optimizer's under gradient
    accumulation, did nothing in the others: its value is the mean over all steps, and phases add
    up to the step. ``came`` is how many of the ``steps`` have it.
    """
    frame = over_ranks(with_totals(frame))
    keys = [*summed(), "unit"]
    _check_unique(frame, [*keys, "repeat"])
    number = _numbered(frame, keys)
    summary = frame.loc[~number.duplicated(), [*keys, "ranks"]].reset_index(drop=True)
    values = frame.value.groupby(number)
    mean, count, smallest = values.mean(), values.count(), values.min()
    value = _aggregate(values, summary.metric, "repeat")
    # Apart, for whole steps can be counted more often.
    like = summary.assign(phase=summary.phase == STEP)
    steps = count.groupby(_numbered(like, keys)).transform("max")
    partial = _is_partial(summary.assign(steps=steps, came=count))
    value = value.mask(partial, mean * count / steps)
    spread = (values.max() - smallest.mask(partial, 0.0)) / value
    return summary.assign(
        value=value,
        spread=spread.fillna(0.0),
        repeats=steps.where(partial, count),
        steps=steps,
        came=count,
    )


def _is_partial(summary: pd.DataFrame) -> pd.Series[bool]:
    """Whether only some steps have a phase, of metrics whose phases add up to the step."""
    whole = [metric.name for metric in METRICS.values() if not metric.adds_up]
    return (summary.came < summary.steps) & ~summary.metric.isin(whole)


def of_one_instrument(summary: pd.DataFrame, preferred: Sequence[str] = PREFERRED) -> pd.DataFrame:
    """The summary with one number a case, device, phase and metric: the first ``preferred``."""
    places = summary.instrument.map({name: place for place, name in enumerate(preferred)})
    best_first = summary.loc[places.sort_values(kind="stable").index]
    return best_first.drop_duplicates(summed("instrument")).sort_index()


def with_ratios(summary: pd.DataFrame, baseline: str = BASELINE_TRAINER) -> pd.DataFrame:
    """A summary with the column ``ratio``: value over that of the same cell's ``baseline``.

    Each metric has a ratio, by phase and for the step; NaN where no baseline was measured or
    it moved nothing.
    """
    divisor = _beside(summary, summary[summary.trainer == baseline], summed("trainer"))
    return summary.assign(ratio=summary.value / divisor.where(divisor != 0), baseline=baseline)


def _beside(rows: pd.DataFrame, others: pd.DataFrame, keys: list[str]) -> pd.Series[float]:
    """For each row the value of the other with the same keys; NaN where there is none."""
    _check_unique(others, keys)
    values = dict(zip(as_tuples(others, keys), others.value, strict=True))
    return pd.Series([values.get(key) for key in as_tuples(rows, keys)], rows.index, dtype=float)


def _check_unique(rows: pd.DataFrame, keys: list[str]) -> None:
    """Refuse rows that differ in something besides these, naming the column in which they do."""
    number = _numbered(rows, keys)
    if number.is_unique:
        return
    alike = rows[number == number[number.duplicated()].iloc[0]]
    differ = [str(name) for name in alike if name != "value" and alike[name].nunique() > 1]
    row = alike.to_dict("records")[0]
    what = f"{row['metric']}@{row['phase']} of {Case.from_row(row).id} by {row['instrument']}"
    columns = ", ".join(differ) or "nothing but their value"
    raise ValueError(f"{len(alike)} rows of {what} differ in {columns}")


def numbers(frame: pd.DataFrame, baseline: str = BASELINE_TRAINER) -> pd.DataFrame:
    """A number per case, instrument, device, metric and phase; ratios as metrics of their own.

    A number of which a repeat is none is left out: its sum or mean would be wrong. It is NaN if
    some steps of a case lack it, and so is a ratio without a baseline, but of scripts, which need
    none. ``steps`` is how many it is of, ``came`` how many of these have it; a ratio is ``of`` a
    metric.
    """
    keys = summed()
    finite = frame.value.astype(float).abs() < float("inf")  # nor is NaN
    wrong = {*as_tuples(frame[~finite], keys)}
    known = [key not in wrong for key in as_tuples(frame, keys)]
    summary = summarise(frame.loc[known])
    is_script = summary.workload == SCRIPT
    partial = _is_partial(summary)
    summary["steps"] = summary.steps.where(is_script | partial, summary.came)
    summary["value"] = summary.value.mask(partial & ~is_script)
    summary = with_ratios(summary, baseline)
    standards = summary[summary.trainer == baseline]
    ratios = summary[summary.trainer != baseline]
    fewer = _beside(ratios, standards.assign(value=standards.steps), summed("trainer"))
    ratios = ratios.assign(steps=ratios.steps.where(~(fewer < ratios.steps), fewer))
    if baseline == BASELINE_TRAINER:
        ratios = ratios[ratios.ratio.notna() | (ratios.workload != SCRIPT)]
    ratios = as_metrics(ratios.assign(of=ratios.metric), "ratio")
    both = pd.concat([summary.assign(of=""), ratios], ignore_index=True)
    both = both[[*keys, "of", "unit", "value", "steps", "came"]]
    order = as_tuples(both, keys)
    return both.iloc[sorted(both.index, key=order.__getitem__)].reset_index(drop=True)


def derived(summary: pd.DataFrame, kind: Kind) -> pd.DataFrame:
    """A column of a summary as rows of metrics, e.g. ``ratio`` of DRAM bytes as ``dram_ratio``."""
    return as_metrics(summary[summary[kind].notna()], kind)


def as_metrics(rows: pd.DataFrame, kind: Kind) -> pd.DataFrame:
    """The same, NaN included."""
    names = {metric: derived_name(metric, kind) for metric in rows.metric.unique()}
    unit = rows.unit if kind == "logical" else "1"
    return rows.assign(metric=rows.metric.map(names), value=rows[kind], unit=unit)


def with_logical(summary: pd.DataFrame) -> pd.DataFrame:
    """A summary with the columns ``logical`` and ``over_logical`` beside what hardware measured.

    ``logical`` is what an unfused step must move at least (for peak memory: must hold) in the
    same case and phase, counted without hardware; ``over_logical`` is value ÷ logical, how often
    the hardware moves what such a step moves once. NaN where nothing was counted, where that is
    0, and in the rows of logical counting itself.
    """
    by_hardware = summary.instrument != "logical"
    said = {metric.name: metric.logical for metric in METRICS.values() if metric.logical}
    wanted = summary.metric.map(said).where(by_hardware).astype(object)
    counted = summary[~by_hardware]
    logical = _beside(summary.assign(metric=wanted), counted, summed("instrument", "device"))
    over = summary.value / logical.where(logical != 0)
    return summary.assign(logical=logical, over_logical=over)


def throughputs(summary: pd.DataFrame) -> pd.DataFrame:
    """Counted bytes per second of unprofiled step time, for each byte metric of the step.

    By ncu the two factors come from two processes, one profiled and one not, which may be CUPTI's;
    the instrument column says so.
    """
    of_case, step = summed("instrument", "phase", "metric"), summary[summary.phase == STEP]
    times = step[step.metric == "step_time_seconds"]
    whole = [metric.name for metric in METRICS.values() if not metric.adds_up]
    counted = step[(step.unit == "B") & ~step.metric.isin(whole)]
    rates = []
    for counts, measures in (("ncu", "timing"), ("ncu", "cupti"), ("cupti", "cupti")):
        rows = counted[counted.instrument == counts]
        seconds = _beside(rows, times[times.instrument == measures], of_case)
        by = f"{counts} bytes / {measures} seconds"
        rates.append(rows.assign(value=rows.value / seconds, by=by)[seconds.notna()])
    table = pd.concat(rates, ignore_index=True)
    table = table.drop_duplicates(summed())
    names = table.metric.map(lambda metric: derived_name(metric, "throughput"))
    table = table.assign(metric=names, unit="B/s", instrument=table.by, spread=float("nan"))
    return table.drop(columns="by")


def complete(frame: pd.DataFrame, baseline: str = BASELINE_TRAINER) -> pd.DataFrame:
    """The summary of a long table with a row for everything that a table can show.

    What follows from a number has rows of its own.
    ``has_baseline`` says whether the baseline was measured in the cell, ``in_cache`` whether the
    case moves so little that DRAM ratios mean nothing.
    """
    summary = of_one_instrument(summarise(frame))
    rates = throughputs(summary)
    summary = with_logical(with_ratios(summary, baseline))
    summary["spread"] = summary.spread.where(summary.repeats > 1)  # of one step there is none
    trusted = [metric.name for metric in METRICS.values() if metric.spread]
    spreads = derived(summary[summary.metric.isin(trusted)], "spread")
    largest = spreads.sort_values("value", ascending=False, kind="stable")
    largest = largest.assign(metric=LARGEST_SPREAD.name)
    largest = largest.drop_duplicates(summed("instrument", "metric"))
    parts = [summary, *(derived(summary, kind) for kind in DERIVED), rates, largest]
    rows = pd.concat([part for part in parts if not part.empty], ignore_index=True)
    dram_step = (rows.metric == "dram_bytes") & (rows.phase == STEP)
    return rows.assign(
        has_baseline=_in_any(rows.trainer == baseline, rows, "trainer"),
        in_cache=_in_any(dram_step & (rows.value < IN_CACHE_BYTES), rows),
    )


def _in_any(holds: pd.Series[bool], rows: pd.DataFrame, *but: str) -> pd.Series[bool]:
    """Whether something holds for any row of the same case, or of those that differ in these."""
    by = summed("instrument", "phase", "metric", *but)
    return holds.groupby([rows[name] for name in by]).transform("any")


# --- the account of a step ----------------------------------------------------------------------
#
# Kernel replay counts the bytes of each kernel and misses copies and memsets; the PyTorch profiler
# knows how many bytes those moved; range counters see everything. If the first two add up to the
# third, nothing is missing from a table of kernels and copies.

TOLERANCE = 0.01
"""The share of the step's bytes up to which the remainder of an account is in order."""

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
    known = {metric for _, metrics in ACCOUNT_COLUMNS.values() for metric in metrics}
    summary = summarise(frame[frame.instrument.isin({by for by, _ in ACCOUNT_COLUMNS.values()})])
    summary = summary[summary.metric.isin(known)]
    if summary.device.nunique() != 1:
        return None
    parts = {}
    for name, (instrument, metrics) in ACCOUNT_COLUMNS.items():
        rows = summary[summary.instrument == instrument]
        wide = rows.pivot(index="phase", columns="metric", values="value")
        wide = wide.reindex(columns=[*metrics]).fillna({OTHER_COPIES: 0.0})
        parts[name] = wide.sum(axis="columns", skipna=False)
        if STEP not in wide.index or parts[name].isna().any():
            return None
    # A phase that an instrument does not name is one in which it saw nothing: clip of ghost
    # clipping has copies and no kernel. That the instrument saw the step is checked.
    table = pd.DataFrame(parts).fillna(0.0)
    table = table.reindex([phase for phase in (*ALL_PHASES, STEP) if phase in table.index])
    ranges = table.range_read + table.range_written
    counted = table.drop(columns=["range_read", "range_written"]).sum(axis="columns")
    return table.assign(remainder=ranges - counted, share=(ranges - counted) / ranges[STEP])
