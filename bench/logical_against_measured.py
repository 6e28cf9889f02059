"""Logical bytes and peak memory beside measured ones: ``python bench/logical_against_measured.py``.

Counts every case of the built-in trainers, models and workloads that a document under
``docs/results`` has measured, and prints one table a document.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from dpbench.case import Case
from dpbench.instruments.logical.logical import Logical
from dpbench.metrics import derived_name
from dpbench.registry import MODELS, TRAINERS, WORKLOADS
from dpbench.results.complete import complete
from dpbench.results.frame import to_frame
from dpbench.results.rows import STEP, Measurement
from dpbench.show.layout import ABSENT, Table
from dpbench.show.tables import Group, against_logical, groups
from dpbench.show.view import View

RESULTS = Path(__file__).parents[1] / "docs" / "results"
WIDTH = 120
"""Columns of the file: every phase of a case on one line."""


@cache
def counted(case: Case) -> tuple[Measurement, ...]:
    """A case counted without hardware; several documents may hold it."""
    print(case.id, file=sys.stderr)
    return tuple(Logical().measure(case))


def is_builtin(case: Case) -> bool:
    """Whether a case can be built from its name alone."""
    return case.trainer in TRAINERS and (
        case.model in MODELS or (not case.model and case.workload in WORKLOADS)
    )


def measured(path: Path) -> list[Measurement]:
    """What a document has of hardware counters, and of times beside them."""
    rows = json.loads(path.read_text(encoding="utf-8")).get("rows", [])
    listed = [Measurement.from_row(row) for row in rows if row["instrument"] != "logical"]
    cases = {row.case for row in listed if row.metric.startswith("dram_") and is_builtin(row.case)}
    return [row for row in listed if row.case in cases]


def with_peak(table: Table, group: Group) -> Table:
    """The table with measured peak memory over the predicted in a last column."""
    rows = group.frame[group.frame.metric == derived_name("peak_memory_bytes", "over_logical")]
    rows = rows[rows.phase == STEP]
    peaks = {label: f"{value:.3f}" for label, value in zip(rows.label, rows.value, strict=True)}
    cells = [[*line, peaks.get(line[0], ABSENT)] for line in table.cells]
    return replace(table, headers=[*table.headers, "peak\nmem."], cells=cells)


def side_by_side(path: Path) -> Iterator[Table]:
    """The tables of one document, one a device."""
    rows = measured(path)
    cases = dict.fromkeys(row.case for row in rows)
    if not cases:
        return
    both = to_frame([*rows, *(row for case in cases for row in counted(case))])
    for group in groups(complete(both), View(group_by=("device",))):
        for table in against_logical(group):
            yield with_peak(replace(table, title=f"{path.name}: {table.title}"), group)


def main(arguments: Sequence[str] | None = None) -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.parse_args(arguments)
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    for path in sorted(RESULTS.glob("*.json")):
        for table in side_by_side(path):
            print(table.as_text(WIDTH), end="\n\n")


if __name__ == "__main__":
    main()
