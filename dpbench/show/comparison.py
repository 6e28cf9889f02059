"""What changed between two runs, as tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from dpbench.case import BASELINE_TRAINER, Case
from dpbench.registry import TRAINERS
from dpbench.results.compare import KEYS
from dpbench.results.frame import CONFIGURATION
from dpbench.results.rows import STEP
from dpbench.show.layout import ABSENT, Table, gigabytes

SHOWN = (
    *("dram_bytes", "dram_ratio", "l2_total_bytes", "l2_ratio"),
    *("logical_bytes", "logical_ratio", "peak_memory_bytes", "step_time_seconds"),
)
"""Metrics of the step that are shown without a threshold."""


def comparison_tables(changes: pd.DataFrame, verdict: pd.DataFrame, title: str = "") -> list[Table]:
    """The step's main metrics, and whatever a threshold is set for, cell by cell.

    Args:
        changes: of `dpbench.results.compare.compare`, or of `References.changes`: then each
            title says which run it was compared with.
        verdict: of `dpbench.results.compare.judge` for the same changes.
        title: what each table's title begins with.
    """
    shown = changes[changes.metric.isin(SHOWN) & (changes.phase == STEP)]
    judged = pd.MultiIndex.from_frame(verdict[KEYS])
    unjudged = shown[~pd.MultiIndex.from_frame(shown[KEYS]).isin(judged)]
    rows = pd.concat([unjudged, verdict]) if not verdict.empty else unjudged
    found = []
    together = [
        *CONFIGURATION,
        "instrument",
        "device",
        *changes.columns.intersection(["reference"]),
    ]
    for key, group in rows.groupby(together):
        cell = dict(zip(together, key, strict=True))
        case = Case.from_row({**cell, "trainer": BASELINE_TRAINER})
        what = f"{case.configuration}, batch {case.batch_size}, sequence {case.seq_len}"
        against = f", against {cell['reference']}" if "reference" in cell else ""
        name = f"{title}{what}, {cell['instrument']} on {cell['device']}{against}"
        cells = []
        for row in group.sort_values(["trainer", "metric"], kind="stable", key=_rank).to_dict(
            "records"
        ):
            metric, phase, *rest = change_cells(row)
            cells.append([row["trainer"], metric + (f"@{phase}" if phase != STEP else ""), *rest])
        found.append(Table(name, ["trainer", HEADERS[0], *HEADERS[2:]], cells))
    return found


def _rank(names: pd.Series[str]) -> pd.Series[int]:
    """Trainers as they are registered, the baseline first; metrics as in `SHOWN`; then others."""
    if names.name == "trainer":
        return names.map(TRAINERS.rank)
    return names.map(lambda name: [*SHOWN, name].index(name))


HEADERS = ["metric", "phase", "before", "after", "change", "limit"]


def change_cells(row: Mapping[Any, Any]) -> list[str]:
    """One line of a comparison or of a verdict, under `HEADERS`."""
    limit = row.get("threshold")
    text = ABSENT if limit is None or pd.isna(limit) else str(limit).rpartition(":")[2]
    return [
        str(row["metric"]),
        str(row["phase"]),
        amount(row["before"], row["unit"]),
        amount(row["after"], row["unit"]),
        ABSENT if pd.isna(row["relative"]) else f"{row['relative']:+.2%}",
        f"{text} exceeded" if row.get("regressed") is True else text,
    ]


def regression_text(regressions: Iterable[Mapping[str, Any]]) -> str:
    """What a test's report says about the changes that made it fail, case by case."""
    found: dict[str, list[list[str]]] = {}
    for row in regressions:
        title = f"{Case.from_row(row).id}, against {row['reference']}"
        found.setdefault(title, []).append(change_cells({**row, "regressed": False}))
    return "\n\n".join(Table(title, HEADERS, cells).as_text() for title, cells in found.items())


def amount(value: float, unit: str) -> str:
    """A value in a unit that is easy to read: GB (10⁹ B), ms, or as it is."""
    if pd.isna(value):
        return ABSENT
    if unit == "B":
        return f"{gigabytes(value)} GB"
    if unit == "s":
        return f"{value * 1e3:.1f} ms"
    return f"{value:.4g}" if unit == "1" else f"{value:.4g} {unit}"
