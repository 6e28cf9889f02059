"""The committed logical bytes against those measured on an NVIDIA H200 in the same cells."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pandas as pd

from dpbench.core.case import Case
from dpbench.core.grid import GRIDS
from dpbench.results.rows import STEP
from dpbench.results.run import Run
from dpbench.results.summary import own_values
from tests.logical.bounds import FILE, shallow
from tests.logical.layers import TWO_DEPTHS

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@cache
def measured() -> pd.Series:
    """DRAM bytes of a step of Grid 1 in GB, by trainer, batch size and sequence length."""
    summary = own_values(Run.load(RESULTS / "h200-ncu-grid1-1.json.xz").summary)
    step = summary[(summary.metric == "dram_bytes") & (summary.phase == STEP)]
    return step.set_index(["trainer", "batch_size", "seq_len"]).value / 1e9


@cache
def counted() -> dict[Case, float]:
    """Logical bytes of a step in GB, of the committed shallow models."""
    summary = own_values(Run.load(FILE).summary)
    step = summary[(summary.metric == "logical_bytes") & (summary.phase == STEP)]
    return {Case.from_row(row): row["value"] / 1e9 for row in step.to_dict("records")}


def of_all_layers(case: Case) -> float:
    """Logical bytes of a step of the ``1b`` model, in GB."""
    one, two = (counted()[shallow(case, layers)] for layers in TWO_DEPTHS)
    return one + (case.size.layers - TWO_DEPTHS[0]) * (two - one)  # see tests.logical.layers


def over_logical(case: Case) -> float:
    moved = measured()[case.trainer, case.batch_size, case.seq_len]
    return float(moved / of_all_layers(case))


def test_logical_bytes_are_a_floor_of_what_is_measured_at_fp32() -> None:
    for case in GRIDS["grid1"].cases():
        assert over_logical(case) > 0.99, case.id
