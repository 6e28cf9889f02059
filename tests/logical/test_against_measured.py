"""The committed logical bytes beside what an NVIDIA H200 measured of the same cells."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pandas as pd
import pytest

from dpbench.case import GRIDS, Case
from dpbench.results.frame import summarise
from dpbench.results.rows import STEP
from dpbench.results.run import Run
from tests.logical.bounds import Bounds

RESULTS = Path(__file__).parents[2] / "docs" / "results"
BOUNDS = Bounds.read()


@cache
def measured(grid: str) -> pd.Series:
    """DRAM bytes of a step in GB, by trainer, batch size and sequence length."""
    summary = summarise(Run.load(RESULTS / f"h200-{grid}.json").frame)
    step = summary[(summary.metric == "dram_bytes") & (summary.phase == STEP)]
    return step.set_index(["trainer", "batch_size", "seq_len"]).value / 1e9


def over_logical(grid: str, case: Case) -> float:
    found = measured(grid)[case.trainer, case.batch_size, case.seq_len]
    return float(found / BOUNDS.expected(case)[STEP])


@pytest.mark.parametrize("grid", GRIDS)
def test_logical_bytes_are_a_floor_of_what_is_measured_at_fp32(grid: str) -> None:
    for case in GRIDS[grid].cases():
        assert over_logical(grid, case) > 0.99, case.id
