"""The summary of a run, from which tables, charts, comparisons and limits take their numbers.

The rows of ranks and steps are combined. Then derived metrics are added: ratios, spreads,
throughputs, and quotients of measured and logical numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from dpbench.core.case import AXES, BASELINE_TRAINER, Case
from dpbench.core.errors import ConfigurationError
from dpbench.core.metrics import (
    CLOCK_REASONS,
    DERIVED,
    LARGEST_SPREAD,
    METRICS,
    POWER_CAP,
    SM_CLOCK,
    Kind,
    Share,
    Timed,
    derived_name,
)
from dpbench.core.subject import Script, Subject, samples_poisson, subject_from
from dpbench.results.kernels import ADDED_UP, KernelCount
from dpbench.results.rows import (
    COLUMNS,
    IDENTITY,
    NO_HARDWARE,
    NUMBER,
    OF_CASE,
    OWN_COLUMNS,
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
        - ``sm_clock`` and ``lowered``: for times, the SM clock in Hz of the timed steps, and what
          lowered it, such as ``thermal slowdown in 3 of 8 steps``; NaN and "" if unknown.
    """
    rows = _with_logical(_with_ratios(aggregate(frame), baseline))
    rows["over_one_gpu"] = _over_one_gpu(rows)
    rows = _with_clocks(rows)
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


def _with_clocks(rows: pd.DataFrame) -> pd.DataFrame:
    """Add ``sm_clock`` and ``lowered`` to rows of times by the instrument that read the clocks."""
    on = [*OF_CASE, "instrument"]
    timed = rows.metric.isin([m.name for m in METRICS.values() if isinstance(m.how, Timed)])
    why = rows[rows.metric.isin({*CLOCK_REASONS} - {POWER_CAP}) & (rows.value > 0)]
    steps = (why.value * why.steps).round().astype(int).astype(str) + " of " + why.steps.astype(str)
    texts = why.assign(value=why.metric.str.replace("_", " ") + " in " + steps + " steps")
    by_case = texts.groupby(on, sort=False, as_index=False).agg({"value": ", ".join})
    lowered = rows[on].merge(by_case, "left", on).value.fillna("").to_numpy()
    clocks = lookup(rows, rows[rows.metric == SM_CLOCK], on)
    return rows.assign(sm_clock=clocks.where(timed), lowered=np.where(timed, lowered, ""))


def divided(values: pd.Series[float], divisors: pd.Series[float]) -> pd.Series[float]:
    """Divide values. The result is NaN if the divisor is 0 or NaN."""
    return values / divisors.where(divisors != 0)


def _with_logical(rows: pd.DataFrame) -> pd.DataFrame:
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


# --- ranks and steps -------------------------------------------------------------------------

_OF_STEP = [*PLACE, "instrument", "rank", "repeat", "tool"]
"""The columns that identify one step, or one phase of a step, for one instrument and one rank."""


def aggregate(frame: pd.DataFrame) -> pd.DataFrame:
    """Combine the rows of all ranks and steps of a long table.

    One row remains for each case, device, instrument, phase and metric. Before rows are combined,
    rows are added for metrics that are sums or shares of other metrics. For the columns, see
    `summary`.
    """
    return _over_steps(_over_ranks(_with_totals(_by_case(frame))))


def _by_case(frame: pd.DataFrame) -> pd.DataFrame:
    """Put the fields of cases into a column ``case``, and drop rows without a finite value."""
    frame = frame[np.isfinite(frame.value.astype(float))]
    axes = [*zip(*(frame[axis] for axis in AXES), strict=True)]
    cases = {each: subject_from(dict(zip(AXES, each, strict=True))) for each in dict.fromkeys(axes)}
    case = pd.Series([cases[each] for each in axes], frame.index, dtype=object)
    rows = frame[OWN_COLUMNS].assign(case=case)
    _check_unique(rows, [*NUMBER, "rank", "repeat"])
    return rows


def _with_totals(rows: pd.DataFrame) -> pd.DataFrame:
    """Add rows for metrics that are sums or shares of other metrics.

    A step or phase that lacks one of the other metrics gets no row.
    """
    totals = [metric for metric in METRICS.behind({*rows.metric}) if metric.parts]
    if not totals:
        return rows
    needed = [*{part for metric in totals for part in metric.parts}, "range_time_seconds"]
    parts = rows[rows.metric.isin(needed)]
    number = parts.groupby(_OF_STEP, sort=False, dropna=False).ngroup()
    steps = parts.loc[~number.duplicated(), _OF_STEP].reset_index(drop=True)
    wide = parts.assign(step=number).pivot(index="step", columns="metric", values="value")
    wide = wide.reindex(columns=needed).reset_index(drop=True)
    added = []
    for metric in totals:
        parts = wide[[*metric.parts]]
        values = parts.sum(axis="columns", skipna=False)
        if isinstance(metric.how, Share):
            values = parts.iloc[:, 0] / parts.iloc[:, 1].where(parts.iloc[:, 1] > 0)
        if metric.name == "gpu_busy_share":
            values = _as_shares_of_timed_steps(values, wide.range_time_seconds, steps, rows)
        values = values.dropna()
        own = steps.loc[values.index]
        added.append(own.assign(metric=metric.name, value=values, unit=metric.unit))
    return pd.concat([rows, *(each for each in added if len(each))], ignore_index=True)


def _as_shares_of_timed_steps(
    shares: pd.Series[float], spans: pd.Series[float], steps: pd.DataFrame, rows: pd.DataFrame
) -> pd.Series[float]:
    """Convert shares of busy time from profiled steps to steps that run without a profiler.

    A share is the time in which the GPU is busy, divided by ``spans``, the time of a profiled step
    or phase. The GPU is idle when a profiled step or phase starts, and therefore waits longer for
    launches than without a profiler. The GPU is assumed to be busy for the same time with and
    without a profiler. If the time without a profiler was not measured, the share of a phase is
    kept, and the share of a step becomes NaN.
    """
    timed, on = rows[rows.metric == "step_time_seconds"], [*PLACE, "instrument", "rank"]
    medians = timed.groupby(on, sort=False).value.median()
    times = lookup(steps, medians.reset_index(), on)
    times = times.mask(is_poisson(steps.case), lookup(steps, timed, [*on, "repeat"]))
    # Busy time and step time come from different steps, so their quotient can be slightly above 1.
    converted = (shares * spans / times.where(times > 0)).clip(upper=1.0)
    return converted.fillna(shares.where(steps.phase != STEP))


def _over_ranks(rows: pd.DataFrame) -> pd.DataFrame:
    """Combine the ranks of each step, and add ``ranks`` and ``imbalance``.

    Raises:
        ConfigurationError: a measured case lacks a rank, a rank lacks a number of the whole step
            that another rank has, or several ranks have a metric that is not registered. The
            definition of a metric says how to combine ranks.
    """
    if rows["rank"].any():
        rows = _reduced(rows, [*NUMBER, "unit", "repeat"], "rank").rename(
            columns={"count": "ranks"}
        )
        rows["imbalance"] = (rows["max"] / rows["mean"]).fillna(1.0)
        all_ranks = rows.groupby([*OF_CASE, "instrument"], sort=False).ranks.transform("max")
        for row in rows[(rows.ranks < all_ranks) & (rows.phase == STEP)].to_dict("records"):
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
    """Combine all rows that have equal values in the columns ``keys``.

    ``column``, which is ``"rank"`` or ``"repeat"``, is the column in which these rows differ. The
    new columns are ``count``, ``mean``, ``median``, ``sum``, ``min`` and ``max``. The definition of
    the metric chooses which of these columns becomes ``value``. For steps with Poisson batches, the
    mean is used instead of the median.
    """
    reduced = rows.groupby(keys, sort=False, as_index=False).agg(
        **{how: ("value", how) for how in ("count", "mean", "median", "sum", "min", "max")},
        **{name: (name, "mean") for name in ("imbalance",) if name in rows},
        **{name: (name, "max") for name in ("ranks",) if name in rows},
    )
    known = {name: METRICS.find(name) for name in reduced.metric.unique()}
    varied = (is_poisson(reduced.case) if column == "repeat" else False) & (reduced["count"] > 1)
    if column == "rank" and (unknown := [name for name, metric in known.items() if not metric]):
        raise ConfigurationError(
            f"{unknown[0]} was measured in several ranks, but does not define how ranks are "
            f"combined: register the metric"
        )
    how = reduced.metric.map({n: m.over(column) if m else "mean" for n, m in known.items()})
    how = how.mask(varied & (how == "median"), "mean")
    reduced["value"] = reduced["mean"]
    for other in {*how} - {"mean"}:
        reduced["value"] = reduced.value.mask(how == other, reduced[other])
    return reduced


def _over_steps(rows: pd.DataFrame) -> pd.DataFrame:
    """Combine the rows of all steps, and add columns such as ``spread`` and ``steps``."""
    reduced = _reduced(rows, [*NUMBER, "unit"], "repeat").rename(columns={"count": "steps_present"})
    # The number of steps is found separately for whole steps and for phases, because some
    # instruments measure whole steps more often than phases.
    like = [*(reduced[c] for c in (*OF_CASE, "instrument", "metric")), reduced.phase == STEP]
    steps = reduced.steps_present.groupby(like, sort=False).transform("max")
    not_summed = [metric.name for metric in METRICS.values() if not metric.adds_up]
    partial = (reduced.steps_present < steps) & ~reduced.metric.isin(not_summed)
    of_script = each_case(reduced.case, lambda case: isinstance(case, Script)).astype(bool)
    scaled = reduced["mean"] * reduced.steps_present / steps
    value = reduced.value.mask(partial, scaled)
    spread = (reduced["max"] - reduced["min"].mask(partial, 0.0)) / value
    steps = steps.where(of_script | partial, reduced.steps_present)
    all_ranks = reduced.groupby([*OF_CASE, "instrument"], sort=False).ranks.transform("max")
    return reduced[[*NUMBER, "unit", "steps_present", "imbalance"]].assign(
        ranks=all_ranks,
        value=value.mask(partial & ~of_script),
        spread=spread.fillna(0.0).where(steps > 1),
        least=reduced["min"].mask(partial, 0.0),
        most=reduced["max"],
        steps=steps,
    )


def each_case(cases: pd.Series[Any], function: Callable[[Subject], Any]) -> pd.Series[Any]:
    """Apply a function to each case of a column, with one call for each different object."""
    # Cases are compared by identity, because hashing a case is slow.
    by_identity = {id(case): case for case in cases}
    results = {identity: function(case) for identity, case in by_identity.items()}
    return pd.Series([results[id(case)] for case in cases], cases.index)


def is_poisson(cases: pd.Series[Any]) -> pd.Series[bool]:
    """Return, for each case, True if batches are Poisson samples, so that their sizes differ."""
    return each_case(cases, samples_poisson).astype(bool)


def lookup(rows: pd.DataFrame, others: pd.DataFrame, on: list[str]) -> pd.Series[float]:
    """Look up, for each row, the value of the row in ``others`` that has equal columns ``on``.

    The value is NaN for a row without an equal row in ``others``.
    """
    if rows.empty or others.empty:
        return pd.Series(np.nan, rows.index, dtype=float)
    both = rows[on].merge(others[[*on, "value"]], "left", on)
    return pd.Series(both.value.to_numpy(float), rows.index)  # raises if ``others`` has two values


def _check_unique(rows: pd.DataFrame, keys: list[str]) -> None:
    """Raise ValueError if several rows have the same keys. The message names other columns."""
    duplicates = rows[rows.duplicated(keys, keep=False)]
    if duplicates.empty:
        return
    row = duplicates.iloc[0]
    same = duplicates[(duplicates[keys] == row[keys]).all(axis="columns")]
    differ = [str(name) for name in same if name != "value" and same[name].nunique() > 1]
    what = f"{row.metric}@{row.phase} of {row.case.id} by {row.instrument}"
    columns = ", ".join(differ) or "nothing but their value"
    raise ValueError(f"{len(same)} rows of {what} differ in {columns}")


def steps_by_rank(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of whole steps of a long table, with the time that each rank ``waited``.

    A rank waits in collectives: it is the time of its collectives minus the smallest time of any
    rank, summed over phases, which is a lower bound.
    """
    spent = frame[(frame.metric == "communication_seconds") & (frame.phase != STEP)]
    without_rank, without_phase = ([c for c in IDENTITY if c != lost] for lost in ("rank", "phase"))
    least = spent.groupby(without_rank, sort=False).value.transform("min")
    waited = spent.assign(metric="waited", value=spent.value - least)
    whole = waited.groupby(without_phase, sort=False, as_index=False).agg({"value": "sum"})
    return pd.concat([frame[frame.phase == STEP], whole])


# --- kernels ---------------------------------------------------------------------------------


def kernel_table(
    counts: Iterable[KernelCount],
    by: Sequence[str] = ("phase", "kernel"),
    *,
    step_bytes: float | None = None,
    bandwidth: float | None = None,
) -> pd.DataFrame:
    """Add up the counts of kernels by group, and divide the sums by the number of steps.

    Args:
        counts: the counts; at least one.
        by: the columns whose values are equal in a group, e.g. ``["category"]``.
        step_bytes: the DRAM bytes of a step, for ``share``. If None, uses the sum over all kernels.
        bandwidth: the bandwidth of the card's memory in B/s, for ``ceiling``.

    Returns:
        A row for each group, indexed by ``by``, most DRAM bytes first. The columns are the fields
        `ADDED_UP` per step; ``dram_bytes``; ``share``, which is ``dram_bytes`` divided by
        ``step_bytes``; and ``ceiling``, which is ``dram_bytes / seconds`` divided by ``bandwidth``.
        Without a ``bandwidth``, ``ceiling`` is NaN.
    """
    frame = pd.DataFrame([count.as_row() for count in counts])
    table = frame.groupby(list(by))[[*ADDED_UP]].sum() / frame.repeat.nunique()
    table["dram_bytes"] = table.read_bytes + table.write_bytes
    whole = step_bytes if step_bytes is not None else table.dram_bytes.sum()
    table["share"] = table.dram_bytes / whole if whole else float("nan")
    table["ceiling"] = table.dram_bytes / table.seconds / (bandwidth or float("nan"))
    return table.sort_values("dram_bytes", ascending=False, kind="stable")
