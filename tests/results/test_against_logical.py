"""What an NVIDIA H200 measured, beside what the same case counts to without hardware."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from dpbench.core.case import Case
from dpbench.instruments.logical.logical import Logical
from dpbench.results.rows import STEP
from dpbench.results.run import Run
from dpbench.results.summary import summary, to_frame
from dpbench.show.tables import tables

BY_BOTH = Path(__file__).parents[1] / "data/saved/cupti-and-ncu.json"
CASE = Case("standard", batch_size=8, seq_len=256)


@pytest.fixture(scope="module")
def both() -> pd.DataFrame:
    """The rows of one case from both instruments."""
    run = Run.load(BY_BOTH)
    measured = [row for outcome in run.outcomes for row in outcome.rows if row.case == CASE]
    return to_frame([*measured, *Logical().measure(CASE).rows])


def test_hardware_moves_what_an_unfused_step_moves_once_and_little_more(both: pd.DataFrame) -> None:
    found = summary(both).set_index(["instrument", "phase", "metric"])
    for metric in ("dram_read_bytes", "dram_write_bytes", "dram_bytes"):
        assert 1.0 < found.over_logical["ncu", STEP, metric] < 1.2
    step = found.loc["ncu", STEP, "dram_bytes"]
    assert step.over_logical == step.value / step.logical
    assert step.logical == found.value["logical", STEP, "logical_bytes"]
    assert found.over_logical["ncu", "optimizer", "dram_bytes"] == pytest.approx(1, abs=0.01)
    assert found.over_logical["cupti", STEP, "peak_memory_bytes"] == pytest.approx(1, abs=0.02)


def test_the_quotient_has_a_table_in_the_cell_that_was_measured(both: pd.DataFrame) -> None:
    [table] = [table for table in tables(summary(both)) if "÷ logical" in table.title]
    assert table.title == "1b fp32, batch 8, sequence 256, NVIDIA H200: DRAM measured ÷ logical"
    assert table.headers == [
        *("trainer", "DRAM\nGB", "logical\nGB", "forward", "backward", "optimizer", STEP)
    ]
    assert max(map(len, table.as_text().splitlines())) <= 80
