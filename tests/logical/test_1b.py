"""The 1b model with all its layers: against an H200, and against the count by two depths."""

from __future__ import annotations

import pytest

from dpbench.case import Case
from tests.logical.layers import count, count_by_layers

H200 = {  # DRAM GB of a step and peak GB: ncu, 1b, batch 8 × sequence 256, fp32 without TF32
    "standard": (91.3, 13.0),
    "dpsgd": (411.9, 59.6),
    "dpsgd_ghost": (229.6, 18.3),
    "dpsgd_fgc": (446.7, 21.8),
}


@pytest.mark.parametrize("trainer", H200)
def test_a_step_comes_close_to_an_h200_and_two_shallow_models_tell_its_bytes(trainer: str) -> None:
    counted = count(Case(trainer, batch_size=8, seq_len=256))  # with all 24 layers
    dram_gb, peak_gb = H200[trainer]
    # matrix products with 2048 rows read their operands again: the floor is below DRAM
    lowest = 0.91 if trainer == "standard" else 0.95
    assert lowest <= counted.logical_bytes / dram_gb / 1e9 <= 1.05
    assert counted.value("peak_memory_bytes") / 1e9 == pytest.approx(peak_gb, rel=0.05)

    extrapolated = count_by_layers(counted.case)
    assert set(extrapolated.operator_counts) == set(counted.operator_counts)
    assert extrapolated.logical_bytes == counted.logical_bytes
