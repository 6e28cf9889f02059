"""Every number that a table of cases can show, as rows."""

from __future__ import annotations

import pandas as pd

from dpbench.core.case import BASELINE_TRAINER
from dpbench.core.metric import DERIVED
from dpbench.core.metrics import LARGEST_SPREAD, METRICS
from dpbench.results.frame import (
    IN_CACHE_BYTES,
    beside,
    derived,
    of_one_instrument,
    summarise,
    throughputs,
    with_logical,
    with_ratios,
)
from dpbench.results.rows import STEP, summed


def complete(frame: pd.DataFrame, baseline: str = BASELINE_TRAINER) -> pd.DataFrame:
    """The summary of a long table with a row for every number that a table can show.

    Ratios, spreads, throughputs and numbers over logical ones have rows of their own.
    ``has_baseline`` says whether the baseline was measured in the cell, ``in_cache`` whether the
    case moves so little that DRAM ratios mean nothing.
    """
    summary = of_one_instrument(summarise(frame))
    rates = throughputs(summary)
    summary = with_one_gpu(with_logical(with_ratios(summary, baseline)))
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


def with_one_gpu(summary: pd.DataFrame) -> pd.DataFrame:
    """A summary with the column ``over_one_gpu`` for what several ranks did.

    It is value over that of the same trainer with the same batch on one GPU; NaN where that was not
    measured or is 0.
    """
    alone = beside(summary, summary[summary.gpus == 1], summed("parallel", "gpus"))
    over = summary.value / alone.where(alone != 0)
    return summary.assign(over_one_gpu=over.where(summary.gpus > 1))
