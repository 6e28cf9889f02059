"""The long table as a pandas DataFrame: summaries over steps, derived metrics, ratios."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from dpbench.core.case import AXES, BASELINE_TRAINER, SCRIPT, Case
from dpbench.core.errors import ConfigurationError
from dpbench.core.metric import Kind, Share, derived_name
from dpbench.core.metrics import METRICS
from dpbench.results.rows import COLUMNS, NO_HARDWARE, STEP, Measurement, as_rows, identity, summed

CONFIGURATION = [axis for axis in AXES if axis != "trainer"]
"""The columns that a case shares with its baseline."""

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
    """Busy shares of ranges, converted to shares of the time that steps and phases take uncounted.

    A counted range starts with an idle GPU and ends when the GPU is done; in timed steps the CPU
    launches work while earlier work runs. Waiting for launches makes a range longer, but not its
    busy time. Where nothing was timed, a step's share is unknown, and a phase's that of its range.
    """
    case = identity("metric", "repeat")
    timed = frame[frame.metric == "step_time_seconds"]
    number = _numbered(timed, case)
    timed = timed.assign(value=timed.value.groupby(number).transform("median"))
    times = beside(steps, timed[~number.duplicated()], case)
    # Counted and timed steps differ, so a GPU that is always busy can come out slightly above 1.
    of_timed = (shares * spans / times.where(times > 0)).clip(upper=1.0)
    return of_timed.fillna(shares.where(steps.phase != STEP))


def _numbered(frame: pd.DataFrame, keys: Iterable[str]) -> pd.Series[int]:
    """A number for each row, from 0 on, the same where the keys are."""
    numbers: dict[tuple[Any, ...], int] = {}
    each = [numbers.setdefault(key, len(numbers)) for key in as_tuples(frame, keys)]
    return pd.Series(each, frame.index, dtype=int)


def over_ranks(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with one row for all ranks of a step; ``ranks`` is how many there are.

    The metric says how: bytes are summed, of times the longest counts, of shares the mean.
    ``imbalance`` is the largest divided by the mean.

    Raises:
        ConfigurationError: a rank is missing, or lacks a number of the whole step, or an
            unregistered metric does not say how ranks become one number.
    """
    if not frame["rank"].any():
        return _with_all_ranks(frame.assign(ranks=1, imbalance=1.0))
    number = _numbered(frame, [*identity("rank"), "unit"])
    values = frame.value.groupby(number)
    reduced = frame[~number.duplicated()].reset_index(drop=True).assign(ranks=values.count())
    every = reduced.ranks.groupby(_numbered(reduced, summed("metric", "phase"))).transform("max")
    for row in reduced[(reduced.ranks < every) & (reduced.phase == STEP)].to_dict("records"):
        raise ConfigurationError(
            f"{Case.from_row(row).id}: some ranks have no {row['metric']} of step {row['repeat']}"
        )
    imbalance = (values.max() / values.mean()).fillna(1.0)
    value = _aggregate(values, reduced.metric, "rank")
    reduced = _with_all_ranks(reduced)
    return reduced.assign(value=value, rank=0, imbalance=imbalance)


def _with_all_ranks(reduced: pd.DataFrame) -> pd.DataFrame:
    """The frame, refused if a case was measured in fewer ranks than it has; one is counted."""
    steps = reduced[(reduced.phase == STEP) & (reduced.device != NO_HARDWARE)]
    for row in steps[steps.ranks < steps.gpus].to_dict("records"):
        raise ConfigurationError(
            f"{Case.from_row(row).id}: it has {row['gpus']} ranks, and {row['metric']} of step "
            f"{row['repeat']} is of {row['ranks']}"
        )
    return reduced


def _aggregate(values: Any, metrics: pd.Series[str], column: str) -> pd.Series[float]:
    """One number for each group of values that differ in a column, by their metric's rule."""
    known = {name: METRICS.find(name) for name in metrics.unique()}
    if column == "rank" and (unknown := [name for name, metric in known.items() if not metric]):
        raise ConfigurationError(f"{unknown[0]} of several ranks has no sum or mean: register it")
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
    accumulation, counts as 0 in the others: its value is the mean over all steps, so that phases
    add up to the step. ``came`` is how many of the ``steps`` have it.
    """
    frame = over_ranks(with_totals(frame))
    keys = [*summed(), "unit"]
    _check_unique(frame, [*keys, "repeat"])
    number = _numbered(frame, keys)
    summary = frame.loc[~number.duplicated(), [*keys, "ranks"]].reset_index(drop=True)
    summary["imbalance"] = frame.imbalance.groupby(number).mean()
    values = frame.value.groupby(number)
    mean, count, smallest = values.mean(), values.count(), values.min()
    value = _aggregate(values, summary.metric, "repeat")
    # Steps and phases apart: whole steps can be counted more often.
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


def of_one_instrument(summary: pd.DataFrame, preferred: Sequence[str] = ()) -> pd.DataFrame:
    """The summary with one number a case, device, phase and metric.

    It is that of the first of the ``preferred`` instruments, or by default of those that the
    definition of the metric names.
    """
    order = {name: preferred or instruments_of(name) for name in summary.metric.unique()}
    places = [
        order[metric].index(by) if by in order[metric] else len(order[metric])
        for metric, by in as_tuples(summary, ["metric", "instrument"])
    ]
    best_first = summary.iloc[np.argsort(places, kind="stable")]
    return best_first.drop_duplicates(summed("instrument")).sort_index()


def instruments_of(name: str) -> tuple[str, ...]:
    """The instruments that have a metric, the preferred one first."""
    metric = METRICS.find(name)
    return metric.by if metric else ()


def with_ratios(summary: pd.DataFrame, baseline: str = BASELINE_TRAINER) -> pd.DataFrame:
    """A summary with the column ``ratio``: value over that of the same cell's ``baseline``.

    Each metric has a ratio, by phase and for the step; NaN where the baseline was not measured or
    is 0.
    """
    divisor = beside(summary, summary[summary.trainer == baseline], summed("trainer"))
    return summary.assign(ratio=summary.value / divisor.where(divisor != 0), baseline=baseline)


def beside(rows: pd.DataFrame, others: pd.DataFrame, keys: list[str]) -> pd.Series[float]:
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

    A number with a repeat that is not finite is left out. It is NaN if some steps of a case lack
    it. A ratio without a baseline is NaN, or left out for scripts, which need no baseline.
    ``steps`` is the number of steps, ``came`` how many of these have it, ``ranks`` in how many
    processes the case was measured; a ratio is ``of`` another metric.
    """
    keys = summed()
    finite = frame.value.astype(float).abs() < float("inf")  # nor is NaN
    wrong = {*as_tuples(frame[~finite], keys)}
    known = [key not in wrong for key in as_tuples(frame, keys)]
    summary = summarise(frame.loc[known])
    by_case = summary.ranks.groupby(_numbered(summary, summed("metric", "phase")))
    summary["ranks"] = by_case.transform("max")
    is_script = summary.workload == SCRIPT
    partial = _is_partial(summary)
    summary["steps"] = summary.steps.where(is_script | partial, summary.came)
    summary["value"] = summary.value.mask(partial & ~is_script)
    summary = with_ratios(summary, baseline)
    standards = summary[summary.trainer == baseline]
    ratios = summary[summary.trainer != baseline]
    fewer = beside(ratios, standards.assign(value=standards.steps), summed("trainer"))
    ratios = ratios.assign(steps=ratios.steps.where(~(fewer < ratios.steps), fewer))
    if baseline == BASELINE_TRAINER:
        ratios = ratios[ratios.ratio.notna() | (ratios.workload != SCRIPT)]
    ratios = as_metrics(ratios.assign(of=ratios.metric), "ratio")
    both = pd.concat([summary.assign(of=""), ratios], ignore_index=True)
    both = both[[*keys, "of", "unit", "value", "steps", "came", "ranks"]]
    order = as_tuples(both, keys)
    return both.iloc[sorted(both.index, key=order.__getitem__)].reset_index(drop=True)


def derived(summary: pd.DataFrame, kind: Kind) -> pd.DataFrame:
    """A column of a summary as rows of metrics, e.g. ``ratio`` of DRAM bytes as ``dram_ratio``."""
    return as_metrics(summary[summary[kind].notna()], kind)


def as_metrics(rows: pd.DataFrame, kind: Kind) -> pd.DataFrame:
    """The same, with rows for NaN."""
    names = {metric: derived_name(metric, kind) for metric in rows.metric.unique()}
    unit = rows.unit if kind == "logical" else "1"
    return rows.assign(metric=rows.metric.map(names), value=rows[kind], unit=unit)


def with_logical(summary: pd.DataFrame) -> pd.DataFrame:
    """A summary with the columns ``logical`` and ``over_logical`` for what hardware measured.

    ``logical`` is what an unfused step of the same case and phase must move at least (for peak
    memory: hold), counted without hardware; ``over_logical`` is value ÷ logical. NaN where nothing
    was counted, where that is 0, and in the rows that were counted. One of several ranks is
    counted, the first: what all moved together is compared with as many of it.
    """
    by_hardware = summary.device != NO_HARDWARE
    said = {metric.name: metric.logical for metric in METRICS.values() if metric.logical}
    wanted = summary.metric.map(said).where(by_hardware).astype(object)
    counted = summary[~by_hardware]
    logical = beside(summary.assign(metric=wanted), counted, summed("instrument", "device"))
    together = [name for name, metric in METRICS.items() if metric.over("rank") == "sum"]
    logical *= summary.gpus.where(summary.metric.isin(together), 1)
    over = summary.value / logical.where(logical != 0)
    return summary.assign(logical=logical, over_logical=over)


def throughputs(summary: pd.DataFrame) -> pd.DataFrame:
    """Counted bytes per second of unprofiled step time, for each byte metric of the step.

    The time is that of the instrument that counted, or else of another one, in another process;
    the instrument column says which.
    """
    of_case, step = summed("instrument", "phase", "metric"), summary[summary.phase == STEP]
    times = step[step.metric == "step_time_seconds"]
    whole = [metric.name for metric in METRICS.values() if not metric.adds_up]
    counted = step[(step.unit == "B") & ~step.metric.isin(whole)]
    rates = [counted.iloc[:0].assign(by="")]
    both = product(instruments_of("dram_bytes"), instruments_of("step_time_seconds"))
    there = [pair for pair in both if {*pair} <= {*step.instrument}]
    for counts, measures in sorted(there, key=lambda pair: pair[0] != pair[1]):
        rows = counted[counted.instrument == counts]
        seconds = beside(rows, times[times.instrument == measures], of_case)
        by = f"{counts} bytes / {measures} seconds"
        rates.append(rows.assign(value=rows.value / seconds, by=by)[seconds.notna()])
    table = pd.concat(rates, ignore_index=True).drop_duplicates(summed())
    names = table.metric.map(lambda metric: derived_name(metric, "throughput"))
    table = table.assign(metric=names, unit="B/s", instrument=table.by, spread=float("nan"))
    return table.drop(columns="by")
