"""What each chart shows, as frames: selections, joins and pivots of one summary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import pandas as pd

from dpbench.case import ALL_PHASES, AXES, BASELINE_TRAINER
from dpbench.results.frame import IN_CACHE_BYTES, with_logical
from dpbench.results.rows import STEP
from dpbench.show.html.source import KEYS
from dpbench.show.tables import SHOWN_SHARE
from dpbench.show.view import Column, column, shown_by_default


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
    bases = (basis for basis in (DRAM, LOGICAL) if not bytes_of(summary, basis).empty)
    return next(bases, None)


def bytes_of(summary: pd.DataFrame, basis: Basis) -> pd.DataFrame:
    """The rows of a basis, for the step and for each phase."""
    return summary[(summary.metric == basis.metric) & (summary.measured == basis.measured)]


def step_bytes(summary: pd.DataFrame, basis: Basis) -> pd.DataFrame:
    """The rows of a basis for whole steps."""
    rows = bytes_of(summary, basis)
    return rows[rows.phase == STEP]


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
    rows = bytes_of(summary, basis)
    wide = _pivot(rows, "phase", "value")
    if STEP not in wide:
        wide[STEP] = float("nan")
    shown = [name for name in phases_of(wide) if (wide[name] > SHOWN_SHARE * wide[STEP]).any()]
    ratio = rows[rows.phase == STEP].set_index(KEYS).ratio
    return wide[[*KEYS, *shown, STEP]].join(ratio, on=KEYS)


def phases_of(wide: pd.DataFrame) -> list[str]:
    """The phases that a frame of `by_phase` has, in order."""
    return [name for name in ALL_PHASES if name in wide]


def ratios(summary: pd.DataFrame, basis: Basis) -> pd.DataFrame:
    """Whole-step rows of all trainers but the baseline, where there is a ratio."""
    rows = step_bytes(summary, basis)
    return rows[(rows.trainer != BASELINE_TRAINER) & rows.ratio.notna()]


def series(ratios: pd.DataFrame, along: str) -> Iterator[tuple[str, int, pd.DataFrame]]:
    """Ratios along one axis of the grid: title, the other axis's value, the rows.

    Only series in which some trainer has two points or more.
    """
    other = {"seq_len": "batch_size", "batch_size": "seq_len"}[along]
    for key, rows in ratios.groupby(["title", other], sort=False):
        title, value = cast("tuple[str, int]", key)
        if (rows.groupby("trainer")[along].nunique() > 1).any():
            yield title, value, rows.sort_values(along, kind="stable")


def memory_against_bytes(summary: pd.DataFrame, basis: Basis) -> pd.DataFrame:
    """Bytes of a step (``value``) and ``peak`` memory of the same case, device and premise."""
    step = summary[(summary.phase == STEP) & (summary.measured == basis.measured)]
    peaks = step[step.metric == "peak_memory_bytes"].drop_duplicates(KEYS).set_index(KEYS).value
    moved = step[step.metric == basis.metric]
    return moved.join(peaks.rename("peak"), on=KEYS).dropna(subset="peak")


def measured_against_logical(summary: pd.DataFrame) -> pd.DataFrame:
    """Measured DRAM bytes of each step with the ``logical`` ones of the same case.

    ``over_logical`` is measured ÷ logical, as everywhere else; NaN where nothing was counted. A
    case that was counted in several runs has the counts of the first: they depend on nothing but
    the case and the versions that counted it.
    """
    counted = step_bytes(summary, LOGICAL).drop_duplicates(list(AXES))
    both = with_logical(pd.concat([step_bytes(summary, DRAM), counted]))
    return both[both.measured].dropna(subset="logical")


def case_columns() -> list[Column]:
    """What the table of cases shows of whole steps, where it was measured or counted."""
    usual = [*shown_by_default(logical=False), *shown_by_default(logical=True)]
    return list(dict.fromkeys([*usual, column("samples_per_second")]))


def by_case(summary: pd.DataFrame) -> pd.DataFrame:
    """One row per case and premise, with those of `case_columns` for which there are rows."""
    step = summary[summary.phase == STEP]
    keys = [*KEYS, "measured"]
    parts = [
        step.loc[step.metric == shown.metrics[0], [*keys, shown.kind]]
        .rename(columns={shown.kind: "number"})
        .assign(column=shown.name)
        for shown in case_columns()
    ]
    wide = _pivot(pd.concat(parts).sort_index(kind="stable"), "column", "number", keys)
    return wide[[*keys, *(shown.name for shown in case_columns() if shown.name in wide)]]


def _pivot(
    rows: pd.DataFrame, columns: str, values: str, keys: list[str] | None = None
) -> pd.DataFrame:
    """One row per case, in the order in which cases first come; the first of equals counts."""
    index = keys or KEYS
    unique = rows.drop_duplicates([*index, columns])
    order = unique[index].drop_duplicates()
    wide = unique.pivot(index=index, columns=columns, values=values).rename_axis(columns=None)
    return order.join(wide, on=index).reset_index(drop=True)
