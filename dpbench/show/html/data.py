"""What each chart shows, as frames: selections, joins and pivots of one summary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import pandas as pd

from dpbench.case import AXES, BASELINE_TRAINER, OUTSIDE, PHASES
from dpbench.results.frame import IN_CACHE_BYTES
from dpbench.results.rows import STEP
from dpbench.show.html.source import KEYS
from dpbench.show.tables import SHOWN_SHARE


@dataclass(frozen=True)
class Basis:
    """Which bytes a chart is about; measured and counted ones never share one.

    Args:
        metric: in the summary.
        measured: whether hardware counted them.
        name: e.g. ``DRAM bytes``.
        short: the same for an axis, e.g. ``DRAM GB per step``.
        premise: where such a number comes from.
    """

    metric: str
    measured: bool
    name: str
    short: str
    premise: str

    @property
    def verb(self) -> str:
        """How such a number came about, in a word."""
        return "measured" if self.measured else "counted"


DRAM = Basis(
    "dram_bytes",
    True,
    "DRAM bytes",
    "DRAM GB per step (measured)",
    "measured by hardware counters",
)
LOGICAL = Basis(
    "logical_bytes",
    False,
    "Logical bytes",
    "logical GB per step (counted)",
    "counted operator by operator without hardware, not measured",
)


def basis_of(summary: pd.DataFrame) -> Basis | None:
    """Measured bytes where there are any, else counted ones, else None."""
    for basis in (DRAM, LOGICAL):
        if not bytes_of(summary, basis).empty:
            return basis
    return None


def bytes_of(summary: pd.DataFrame, basis: Basis) -> pd.DataFrame:
    """The rows of a basis, for the step and for each phase."""
    return summary[(summary.metric == basis.metric) & (summary.measured == basis.measured)]


def step_bytes(summary: pd.DataFrame, basis: Basis) -> pd.DataFrame:
    """The rows of a basis for whole steps."""
    found = bytes_of(summary, basis)
    return found[found.phase == STEP]


def cautions(summary: pd.DataFrame, basis: Basis) -> list[str]:
    """What must be said beside ratios of these bytes."""
    small = basis.measured and (step_bytes(summary, basis).value < IN_CACHE_BYTES).any()
    return [IN_CACHE] if small else []


IN_CACHE = (
    "Warning: some steps move less than 1 GB. At that size the data stays in the L2 cache, and "
    "ratios of DRAM bytes mean nothing."
)


def by_phase(summary: pd.DataFrame, basis: Basis) -> pd.DataFrame:
    """Bytes by case and phase, in the columns that `phases_of` lists, and for the ``step``.

    A phase is left out if no case moves `SHOWN_SHARE` of its step there; a case that was
    measured for the whole step only has NaN in its phases.
    """
    found = bytes_of(summary, basis)
    wide = _pivot(found, "phase", "value")
    if STEP not in wide:
        wide[STEP] = float("nan")
    known = [name for name in ALL_PHASES if name in wide]
    shown = [name for name in known if (wide[name] > SHOWN_SHARE * wide[STEP]).any()]
    ratio = found[found.phase == STEP].set_index(KEYS).ratio
    return wide[[*KEYS, *shown, STEP]].join(ratio, on=KEYS)


def phases_of(wide: pd.DataFrame) -> list[str]:
    """The phases that a frame of `by_phase` has, in order."""
    return [name for name in ALL_PHASES if name in wide]


def ratios(summary: pd.DataFrame, basis: Basis) -> pd.DataFrame:
    """Whole-step rows of all trainers but the baseline, where there is a ratio."""
    found = step_bytes(summary, basis)
    return found[(found.trainer != BASELINE_TRAINER) & found.ratio.notna()]


def series(found: pd.DataFrame, along: str) -> Iterator[tuple[str, int, pd.DataFrame]]:
    """Ratios along one axis of the grid: title, the other axis's value, the rows.

    Only series in which some trainer has two points or more.
    """
    other = {"seq_len": "batch_size", "batch_size": "seq_len"}[along]
    for key, rows in found.groupby(["title", other], sort=False):
        title, value = cast("tuple[str, int]", key)
        if (rows.groupby("trainer")[along].nunique() > 1).any():
            yield title, value, rows.sort_values(along, kind="stable")


def memory_against_bytes(summary: pd.DataFrame, basis: Basis) -> pd.DataFrame:
    """Bytes of a step (``value``) and ``peak`` memory of the same case, device and premise."""
    step = summary[(summary.phase == STEP) & (summary.measured == basis.measured)]
    peaks = step[step.metric == "peak_memory_bytes"].drop_duplicates(KEYS).set_index(KEYS).value
    moved = step[step.metric == basis.metric]
    return moved.join(peaks.rename("peak"), on=KEYS).dropna(subset="peak")


def by_batch(found: pd.DataFrame) -> Iterator[tuple[str, int, pd.DataFrame]]:
    """Rows by configuration and batch size, those of a trainer by sequence length."""
    ordered = found.sort_values("seq_len", kind="stable")
    for key, rows in ordered.groupby(["title", "batch_size"]):
        title, batch = cast("tuple[str, int]", key)
        yield title, batch, rows


def with_logical(summary: pd.DataFrame, metrics: dict[str, str]) -> pd.DataFrame:
    """Logical counts of the cases that have them, by phase: one column per metric.

    A case that was counted in several runs has the counts of the first: they depend on nothing
    but the case and the versions that counted it.

    Args:
        summary: of `summary_of`.
        metrics: the metric behind each new column.
    """
    counted = summary[~summary.measured & summary.metric.isin(metrics.values())]
    keys = [*AXES, "phase"]
    wide = counted.drop_duplicates([*keys, "metric"]).pivot(
        index=keys, columns="metric", values="value"
    )
    return wide.reindex(columns=list(metrics.values())).set_axis(list(metrics), axis=1)


def measured_against_logical(summary: pd.DataFrame) -> pd.DataFrame:
    """Measured DRAM bytes of each step (``value``) with the ``logical`` ones of the same case.

    ``over_logical`` is measured ÷ logical, as everywhere else; NaN where nothing was counted.
    """
    logical = with_logical(summary, {"logical": "logical_bytes"})
    found = step_bytes(summary, DRAM).join(logical, on=[*AXES, "phase"]).dropna(subset="logical")
    return found.assign(over_logical=found.value / found.logical.where(found.logical != 0))


STEP_METRICS = (
    "dram_read_bytes",
    "dram_write_bytes",
    "dram_bytes",
    "logical_bytes",
    "l2_total_bytes",
    "peak_memory_bytes",
    "step_time_seconds",
    "samples_per_second",
)
"""What the table of cases shows of whole steps, where it was measured or counted."""


def by_case(summary: pd.DataFrame) -> pd.DataFrame:
    """One row per case and premise: values of `STEP_METRICS`, and ``METRIC/ratio`` of bytes."""
    step = summary[(summary.phase == STEP) & summary.metric.isin(STEP_METRICS)]
    keys = [*KEYS, "measured"]
    values = _pivot(step, "metric", "value", keys)
    of_bytes = step[step.metric.isin(["dram_bytes", "logical_bytes", "l2_total_bytes"])]
    quotients = _pivot(of_bytes, "metric", "ratio", keys).set_index(keys).add_suffix("/ratio")
    wide = values.join(quotients, on=keys)
    columns = [name for metric in STEP_METRICS for name in (metric, f"{metric}/ratio")]
    return wide[[*keys, *(name for name in columns if name in wide)]]


def _pivot(
    rows: pd.DataFrame, columns: str, values: str, keys: list[str] | None = None
) -> pd.DataFrame:
    """One row per case, in the order in which cases first come; the first of equals counts."""
    index = keys or KEYS
    unique = rows.drop_duplicates([*index, columns])
    order = unique[index].drop_duplicates()
    wide = unique.pivot(index=index, columns=columns, values=values).rename_axis(columns=None)
    return order.join(wide, on=index).reset_index(drop=True)
