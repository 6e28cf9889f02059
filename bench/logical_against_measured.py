"""Logical bytes and peak memory beside measured ones: ``python bench/logical_against_measured.py``.

Reads the committed results under ``docs/results`` and counts the same cases again.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pandas as pd

from dpbench.case import AXES, Case
from dpbench.instruments.logical import Logical
from dpbench.results.report import CaseReport
from dpbench.results.rows import Measurement

RESULTS = Path(__file__).parents[1] / "docs" / "results"


def main() -> None:
    """Count and print."""
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    print(f"{'case':40} {'logical':>8} {'measured':>9} {'quotient':>9} {'peak':>7}")
    for name in ("h200-grid1.json", "h200-precisions.json"):
        rows = pd.DataFrame(json.loads((RESULTS / name).read_text())["rows"])
        for values, group in rows.groupby(list(AXES)):
            case = Case(**dict(zip(AXES, values, strict=True)))
            found = (Measurement.from_row(row) for row in group.to_dict("records"))
            measured = CaseReport.of(case, found)
            counted = CaseReport.of(case, Logical().measure(case))
            logical = counted.value("logical_bytes")
            peak = counted.value("peak_memory_bytes") / measured.value("peak_memory_bytes")
            print(
                f"{case.id:40} {logical / 1e9:8.1f} {measured.dram_bytes / 1e9:9.1f} "
                f"{logical / measured.dram_bytes:9.3f} {peak:7.3f}"
            )


if __name__ == "__main__":
    main()
