"""The summary of a run: every number that is shown, compared or judged, each computed here once.

Ratios, spreads, throughputs and numbers over logical ones are metrics of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from dpbench.core.case import AXES, BASELINE_TRAINER, Case
from dpbench.core.errors import ConfigurationError
from dpbench.core.metric import DERIVED, Kind, Peak, Share, derived_name
from dpbench.core.metrics import LARGEST_SPREAD, METRICS
from dpbench.core.subject import Script, Subject, samples_poisson, subject_from
from dpbench.results.rows import (
    COLUMNS,
    NO_HARDWARE,
    NUMBER,
    OF_CASE,
    OWN_COLUMNS,
    PLACE,
    STEP,
    Measurement,
    as_rows,
)

IN_CACHE_BYTES = 1e9
"""Below this, a step's data stays in the L2 cache (60 MB on an H200) between kernels, and
ratios of DRAM bytes say nothing."""

_OF_STEP = [*PLACE, "instrument", "rank", "repeat", "tool"]


def to_frame(measurements: Iterable[Measurement]) -> pd.DataFrame:
    """One row per measurement, with the columns of `Measurement.as_row`."""
    return pd.DataFrame(as_rows(measurements), columns=COLUMNS)


def summary(frame: pd.DataFrame, baseline: str = BASELINE_TRAINER) -> pd.DataFrame:
    """The summary of a long table.

    Returns:
        One row per number, with the case and its fields, and

        - ``value``: the mean over the steps, for times and rates the median; of Poisson batches
          always the mean, for peaks the largest; over ranks as the metric defines. A phase that
          only some of a script's steps have, such as the optimizer's under gradient accumulation,
          counts as 0 in the others, so that phases add up to the step. NaN where steps of a case
          lack it, and for ratios without a baseline.
        - ``of`` and ``kind``: for a derived number, the base metric and how it is derived.
        - ``least`` and ``most``: the smallest and the largest of a step.
        - ``steps``: how many steps there were; ``steps_present``: how many have it; ``ranks``: how
          many processes ran the case; ``imbalance``: the largest rank's ÷ their mean.
        - ``ratio`` to the trainer ``baseline``; ``spread``, (largest - smallest) / value;
          ``logical``, the count for an unfused step; ``over_logical``; ``over_one_gpu``, with the
          same batch. NaN where not measured or 0.
        - ``preferred``: whether tables use it, or its base number.
        - ``has_baseline``: whether the baseline was measured in the cell; ``in_cache``: whether
          the case moves so little that DRAM ratios mean nothing; ``timed_by``: the instrument that
          timed a throughput.
    """
    rows = _over_steps(_over_ranks(_with_totals(_by_case(frame))))
    rows = with_logical(_with_ratios(rows, baseline))
    rows["over_one_gpu"] = _over_one_gpu(rows)
    preferred = rows.index.isin(of_one_instrument(rows).index)
    rows = rows.assign(of="", kind="value", timed_by="", preferred=preferred)
    parts = [rows, *(_derived(rows, kind) for kind in DERIVED), _throughputs(rows), _largest(rows)]
    whole = pd.concat([part for part in parts if not part.empty] or [rows], ignore_index=True)
    small = (whole.metric == "dram_bytes") & (whole.phase == STEP) & (whole.value < IN_CACHE_BYTES)
    standard = each_case(whole.case, lambda case: case.trainer == baseline)
    cell = [each_case(whole.case, lambda case: case.cell), *(whole[c] for c in OF_CASE[1:])]
    whole["has_baseline"] = standard.astype(bool).groupby(cell, sort=False).transform("any")
    whole["in_cache"] = small.groupby([whole[c] for c in OF_CASE], sort=False).transform("any")
    return with_axes(whole)


def with_axes(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with a column for each field of their cases."""
    axes = pd.DataFrame([case.columns for case in rows.case], columns=AXES, index=rows.index)
    return pd.concat([axes, rows], axis="columns")


def own_values(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of a summary that are not derived from other metrics."""
    return rows[rows.kind == "value"]


def of_one_instrument(rows: pd.DataFrame, preferred: Sequence[str] = ()) -> pd.DataFrame:
    """The summary with one number a case, device, phase and metric.

    It comes from the first of the ``preferred`` instruments, by default those in the metric's
    definition.
    """
    order = {name: preferred or instruments_of(name) for name in rows.metric.unique()}
    places = [
        order[metric].index(by) if by in order[metric] else len(order[metric])
        for metric, by in zip(rows.metric, rows.instrument, strict=True)
    ]
    best_first = rows.iloc[np.argsort(places, kind="stable")]
    return best_first.drop_duplicates([*PLACE, "metric"]).sort_index()


def dram_bytes_of_step(rows: pd.DataFrame) -> float | None:
    """DRAM bytes of a step, by ranges of hardware counters; None if they were not counted."""
    step = rows[(rows.phase == STEP) & (rows.metric == "dram_bytes")]
    values = of_one_instrument(step).value
    return None if values.empty else float(values.iloc[0])


def instruments_of(name: str) -> tuple[str, ...]:
    """The instruments that have a metric, the preferred one first."""
    metric = METRICS.find(name)
    return metric.by if metric else ()


def each_case(cases: pd.Series[Any], made: Callable[[Subject], Any]) -> pd.Series[Any]:
    """A function of each case, computed once however many rows it has."""
    every = {id(case): case for case in cases}  # by identity: hashing a case is slow
    known = {number: made(case) for number, case in every.items()}
    return pd.Series([known[id(case)] for case in cases], cases.index)


def is_poisson(cases: pd.Series[Any]) -> pd.Series[bool]:
    """Whether the batches of each case differ in size: a step's cost is the mean of all then."""
    return each_case(cases, samples_poisson).astype(bool)


def _by_case(frame: pd.DataFrame) -> pd.DataFrame:
    """The long table with the case in place of its fields, without numbers that are not finite."""
    frame = frame[np.isfinite(frame.value.astype(float))]
    axes = [*zip(*(frame[axis] for axis in AXES), strict=True)]
    cases = {each: subject_from(dict(zip(AXES, each, strict=True))) for each in dict.fromkeys(axes)}
    case = pd.Series([cases[each] for each in axes], frame.index, dtype=object)
    rows = frame[OWN_COLUMNS].assign(case=case)
    _check_unique(rows, [*NUMBER, "rank", "repeat"])
    return rows


def _with_totals(rows: pd.DataFrame) -> pd.DataFrame:
    """Add the rows of metrics that are sums or shares of others, step by step."""
    made = [metric for metric in METRICS.behind({*rows.metric}) if metric.parts]
    if not made:
        return rows
    needed = [*{part for metric in made for part in metric.parts}, "range_time_seconds"]
    parts = rows[rows.metric.isin(needed)]
    number = parts.groupby(_OF_STEP, sort=False, dropna=False).ngroup()
    steps = parts.loc[~number.duplicated(), _OF_STEP].reset_index(drop=True)
    wide = parts.assign(step=number).pivot(index="step", columns="metric", values="value")
    wide = wide.reindex(columns=needed).reset_index(drop=True)
    added = []
    for metric in made:
        parts = wide[[*metric.parts]]
        values = parts.sum(axis="columns", skipna=False)
        if isinstance(metric.how, Share):
            values = parts.iloc[:, 0] / parts.iloc[:, 1].where(parts.iloc[:, 1] > 0)
        if metric.name == "gpu_busy_share":
            values = _of_timed_steps(values, wide.range_time_seconds, steps, rows)
        values = values.dropna()
        own = steps.loc[values.index]
        added.append(own.assign(metric=metric.name, value=values, unit=metric.unit))
    return pd.concat([rows, *(each for each in added if len(each))], ignore_index=True)


def _of_timed_steps(
    shares: pd.Series[float], spans: pd.Series[float], steps: pd.DataFrame, rows: pd.DataFrame
) -> pd.Series[float]:
    """Busy shares of ranges, converted to shares of the time that steps and phases take uncounted.

    A counted range starts with an idle GPU; waiting for launches makes it longer, but not its busy
    time. Where nothing was timed, a step's share is unknown, and a phase has its range's share.
    """
    timed, on = rows[rows.metric == "step_time_seconds"], [*PLACE, "instrument", "rank"]
    medians = timed.groupby(on, sort=False).value.median()
    times = _lookup(steps, medians.reset_index(), on)
    times = times.mask(is_poisson(steps.case), _lookup(steps, timed, [*on, "repeat"]))
    # Counted and timed steps differ, so a GPU that is always busy can come out slightly above 1.
    of_timed = (shares * spans / times.where(times > 0)).clip(upper=1.0)
    return of_timed.fillna(shares.where(steps.phase != STEP))


def _over_ranks(rows: pd.DataFrame) -> pd.DataFrame:
    """One row for all ranks of a step: ``ranks`` is how many, ``imbalance`` largest ÷ mean.

    Raises:
        ConfigurationError: a rank is missing, or lacks a number of the whole step, or an
            unregistered metric does not say how ranks become one number.
    """
    if rows["rank"].any():
        rows = _reduced(rows, [*NUMBER, "unit", "repeat"], "rank").rename(
            columns={"count": "ranks"}
        )
        rows["imbalance"] = (rows["max"] / rows["mean"]).fillna(1.0)
        every = rows.groupby([*OF_CASE, "instrument"], sort=False).ranks.transform("max")
        for row in rows[(rows.ranks < every) & (rows.phase == STEP)].to_dict("records"):
            raise ConfigurationError(
                f"{row['case'].id}: some ranks have no {row['metric']} of step {row['repeat']}"
            )
    else:
        rows = rows.assign(ranks=1, imbalance=1.0)
    steps = rows[(rows.phase == STEP) & (rows.device != NO_HARDWARE)]
    gpus = each_case(steps.case, lambda case: case.gpus)
    for row in steps[steps.ranks < gpus].to_dict("records"):
        raise ConfigurationError(
            f"{row['case'].id}: step {row['repeat']} has {row['metric']} of only {row['ranks']} "
            f"of {row['case'].gpus} ranks"
        )
    return rows


def _reduced(rows: pd.DataFrame, keys: list[str], column: str) -> pd.DataFrame:
    """Aggregate numbers that differ only in a column: their ``mean``, ``max``, ….

    ``value`` is one of these, as the metric defines.
    """
    reduced = rows.groupby(keys, sort=False, as_index=False).agg(
        **{how: ("value", how) for how in ("count", "mean", "median", "sum", "min", "max")},
        **{name: (name, "mean") for name in ("imbalance",) if name in rows},
        **{name: (name, "max") for name in ("ranks",) if name in rows},
    )
    known = {name: METRICS.find(name) for name in reduced.metric.unique()}
    varied = (is_poisson(reduced.case) if column == "repeat" else False) & (reduced["count"] > 1)
    if column == "rank" and (unknown := [name for name, metric in known.items() if not metric]):
        raise ConfigurationError(f"{unknown[0]} of several ranks has no sum or mean: register it")
    how = reduced.metric.map({n: m.over(column) if m else "mean" for n, m in known.items()})
    peaks = [name for name, metric in known.items() if metric and isinstance(metric.how, Peak)]
    how = how.mask(varied & (how == "median"), "mean").mask(
        varied & reduced.metric.isin(peaks), "max"
    )
    reduced["value"] = reduced["mean"]
    for other in {*how} - {"mean"}:
        reduced["value"] = reduced.value.mask(how == other, reduced[other])
    return reduced


def _over_steps(rows: pd.DataFrame) -> pd.DataFrame:
    """One row for all steps: value, spread, number of steps, and how many of these have it."""
    _check_unique(rows, [*NUMBER, "repeat"])
    reduced = _reduced(rows, [*NUMBER, "unit"], "repeat").rename(columns={"count": "steps_present"})
    # Steps and phases apart: whole steps can be counted more often.
    like = [*(reduced[c] for c in (*OF_CASE, "instrument", "metric")), reduced.phase == STEP]
    steps = reduced.steps_present.groupby(like, sort=False).transform("max")
    whole = [metric.name for metric in METRICS.values() if not metric.adds_up]
    partial = (reduced.steps_present < steps) & ~reduced.metric.isin(whole)
    of_script = each_case(reduced.case, lambda case: isinstance(case, Script)).astype(bool)
    scaled = reduced["mean"] * reduced.steps_present / steps
    value = reduced.value.mask(partial, scaled)
    spread = (reduced["max"] - reduced["min"].mask(partial, 0.0)) / value
    steps = steps.where(of_script | partial, reduced.steps_present)
    every = reduced.groupby([*OF_CASE, "instrument"], sort=False).ranks.transform("max")
    return reduced[[*NUMBER, "unit", "steps_present", "imbalance"]].assign(
        ranks=every,
        value=value.mask(partial & ~of_script),
        spread=spread.fillna(0.0).where(steps > 1),  # one step has no spread
        least=reduced["min"].mask(partial, 0.0),
        most=reduced["max"],
        steps=steps,
    )


def _with_ratios(rows: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Add ``ratio``: the value over that of the same cell's ``baseline``."""
    cell = rows.assign(case=each_case(rows.case, lambda case: case.cell))
    of_baseline = cell[each_case(rows.case, lambda case: case.trainer == baseline).astype(bool)]
    its_steps = _lookup(cell, of_baseline.assign(value=of_baseline.steps), NUMBER)
    return rows.assign(
        ratio=divided(rows.value, _lookup(cell, of_baseline, NUMBER)),
        baseline=baseline,
        ratio_steps=rows.steps.where(~(its_steps < rows.steps), its_steps),
    )


def divided(values: pd.Series[float], divisors: pd.Series[float]) -> pd.Series[float]:
    """Values divided by others; NaN where these are 0 or missing."""
    return values / divisors.where(divisors != 0)


def with_logical(rows: pd.DataFrame) -> pd.DataFrame:
    """Add ``logical`` and ``over_logical`` to rows that hardware measured.

    ``logical`` is what an unfused step of the same case and phase must move at least (for peak
    memory: hold), counted without hardware. Only the first rank is counted, so sums over ranks are
    compared with a multiple of it.
    """
    by_hardware = rows.device != NO_HARDWARE
    said = {metric.name: metric.logical for metric in METRICS.values() if metric.logical}
    wanted = rows.metric.map(said).where(by_hardware).astype(object)
    counted = of_one_instrument(rows[~by_hardware])
    on = [column for column in (*PLACE, "metric") if column != "device"]
    logical = _lookup(rows.assign(metric=wanted), counted, on)
    together = [name for name, metric in METRICS.items() if metric.over("rank") == "sum"]
    gpus = each_case(rows.case, lambda case: case.gpus)
    logical *= gpus.where(rows.metric.isin(together), 1)
    return rows.assign(logical=logical, over_logical=divided(rows.value, logical))


def _over_one_gpu(rows: pd.DataFrame) -> pd.Series[float]:
    """Divide values of several ranks by those of one GPU with the same trainer and batch."""
    gpus = each_case(rows.case, lambda case: case.gpus)
    several = rows[gpus > 1]
    if several.empty:
        return pd.Series(np.nan, rows.index)
    alone = each_case(several.case, _on_one_gpu)
    by_one = _lookup(several.assign(case=alone), rows[gpus == 1], NUMBER).reindex(rows.index)
    return divided(rows.value, by_one)


def _on_one_gpu(case: Subject) -> Subject:
    return replace(case, parallel="none", gpus=1) if isinstance(case, Case) else case


def _derived(rows: pd.DataFrame, kind: Kind) -> pd.DataFrame:
    """A column as rows of metrics, e.g. ``ratio`` of DRAM bytes as ``dram_ratio``.

    A case without a baseline has the ratio NaN; a script need not have one.
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
    """Counted bytes per second of unprofiled step time, for each byte metric of the step.

    The time is that of the instrument that counted, or else of another one.
    """
    step = rows[rows.phase == STEP]
    times = step[step.metric == "step_time_seconds"].assign(metric="")
    whole = [metric.name for metric in METRICS.values() if not metric.adds_up]
    counters, timers = instruments_of("dram_bytes"), instruments_of("step_time_seconds")
    counted = step[(step.unit == "B") & ~step.metric.isin(whole) & step.instrument.isin(counters)]
    if counted.empty or times.empty:
        return rows[:0]
    seconds = _lookup(counted.assign(metric=""), times, NUMBER)
    by = counted.instrument.where(seconds.notna(), "")
    for timer in timers:
        if seconds.notna().all():
            break
        other = _lookup(counted.assign(metric="", instrument=timer), times, NUMBER)
        by = by.mask(seconds.isna() & other.notna(), timer)
        seconds = seconds.fillna(other)
    names = counted.metric.map(lambda metric: derived_name(metric, "throughput"))
    rates = counted.assign(of=counted.metric, metric=names, value=counted.value / seconds)
    rates = rates.assign(unit="B/s", kind="throughput", timed_by=by, spread=np.nan)
    return rates[seconds.notna()]


def _largest(rows: pd.DataFrame) -> pd.DataFrame:
    """The largest spread of a case's metrics, among those that count for it."""
    spreads = _derived(rows[rows.preferred], "spread")
    largest = spreads.sort_values("value", ascending=False, kind="stable")
    return largest.assign(metric=LARGEST_SPREAD.name, of="").drop_duplicates(PLACE)


def _lookup(rows: pd.DataFrame, others: pd.DataFrame, on: list[str]) -> pd.Series[float]:
    """For each row the value of the other with the same keys; NaN where there is none."""
    _check_unique(others, on)
    if rows.empty or others.empty:
        return pd.Series(np.nan, rows.index, dtype=float)
    # A dictionary, because `merge` takes milliseconds for a few rows.
    values = dict(zip(_keys(others, on), others.value, strict=True))
    found = [values.get(key, np.nan) for key in _keys(rows, on)]
    return pd.Series(found, rows.index, dtype=float)


def _keys(rows: pd.DataFrame, on: list[str]) -> Iterator[tuple[Any, ...]]:
    """The key of each row."""
    return zip(*(rows[column] for column in on), strict=True)


def _check_unique(rows: pd.DataFrame, keys: list[str]) -> None:
    """Refuse rows that differ in something besides these, naming the column in which they do."""
    repeated = rows.duplicated(keys, keep=False)
    if not repeated.any():
        return
    again = rows[repeated]
    row = again.iloc[0]
    alike = again[(again[keys] == row[keys]).all(axis="columns")]
    differ = [str(name) for name in alike if name != "value" and alike[name].nunique() > 1]
    what = f"{row.metric}@{row.phase} of {row.case.id} by {row.instrument}"
    columns = ", ".join(differ) or "nothing but their value"
    raise ValueError(f"{len(alike)} rows of {what} differ in {columns}")
