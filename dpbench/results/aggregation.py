"""Aggregation of the long table, which combines the numbers of all ranks and steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from dpbench.core.case import AXES
from dpbench.core.errors import ConfigurationError
from dpbench.core.metrics import METRICS, Share
from dpbench.core.subject import Script, Subject, samples_poisson, subject_from
from dpbench.results.rows import NO_HARDWARE, NUMBER, OF_CASE, OWN_COLUMNS, PLACE, STEP

_OF_STEP = [*PLACE, "instrument", "rank", "repeat", "tool"]
"""The columns that identify one step, or one phase of a step, for one instrument and one rank."""


def aggregate(frame: pd.DataFrame) -> pd.DataFrame:
    """Combine the rows of all ranks and steps of a long table.

    One row remains for each case, device, instrument, phase and metric. Before rows are combined,
    rows are added for metrics that are sums or shares of other metrics. For the columns, see
    `dpbench.results.summary.summary`.
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
