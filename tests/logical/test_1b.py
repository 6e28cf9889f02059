"""The 1b model with all layers, against the guide, an H200, and the extrapolation.

Counting 24 layers takes seconds, so one session does it, with the examples of the guide.
"""

from __future__ import annotations

import pytest

from dpbench.core.errors import ConfigurationError
from dpbench.results.report import CaseReport
from dpbench.results.run import Run
from tests.logical.layers import count_by_layers, totals
from tests.plugin import conftest as sessions
from tests.test_docs import assert_printed, block_with

imports = sessions.imports  # a fixture: what a session imported stays

H200 = {  # DRAM GB of a step and peak GB: ncu, 1b, batch 8 × sequence 256, fp32 without TF32
    "standard": (91.3, 13.0),
    "dpsgd": (411.9, 59.6),
    "dpsgd_ghost": (229.6, 18.3),
    "dpsgd_fgc": (446.7, 21.8),
}

BOUND = """
import pytest

CELL = {"batch_size": 8, "seq_len": 256, "model_size": "1b"}

@pytest.mark.parametrize(
    ("trainer", "bound"), [("dpsgd", 4.95), ("dpsgd_ghost", 2.75), ("dpsgd_fgc", 5.30)]
)
def test_bytes_of_a_private_step(logical_io, trainer, bound):
    standard, private = logical_io("standard", **CELL), logical_io(trainer, **CELL)
    assert 1 < private.ratio_to(standard) < bound
"""


@pytest.mark.slow
def test_the_examples_print_what_comes_close_to_an_h200_and_two_shallow_models_tell(
    pytester: pytest.Pytester, imports: sessions.Imports
) -> None:
    pytester.makepyfile(
        test_bound=BOUND,
        test_guide=block_with("docs/guide.md", "def test_flat_clipping_copies_every_gradient"),
    )
    asked = [*sessions.WITHOUT, "-p", "no:xdist", "--dpbench-json=run.json"]
    result = sessions.in_this_process(pytester, asked, imports)
    result.assert_outcomes(passed=4)
    assert_printed(block_with("docs/guide.md", "dpsgd_fgc         5.25"), result.stdout.str())

    outcomes = Run.load(pytester.path / "run.json").outcomes
    assert {outcome.case.trainer for outcome in outcomes} == set(H200)
    for outcome in outcomes:
        counted = CaseReport.of(outcome.case, outcome.rows)
        dram_gb, peak_gb = H200[outcome.case.trainer]
        # matrix products with 2048 rows read their operands again: the floor is below DRAM
        lowest = 0.91 if outcome.case.trainer == "standard" else 0.95
        assert lowest <= counted.logical_bytes / dram_gb / 1e9 <= 1.05
        assert counted.value("peak_memory_bytes") / 1e9 == pytest.approx(peak_gb, rel=0.05)

        extrapolated = count_by_layers(outcome.case)
        assert totals(extrapolated.operator_counts) == totals(outcome.operators)
        for metric in ("logical_read_bytes", "logical_write_bytes"):
            assert extrapolated.value(metric) == counted.value(metric)
            by_phase = counted.phases[metric]
            assert dict(extrapolated.phases[metric]) == dict(by_phase[by_phase > 0])
        with pytest.raises(ConfigurationError, match="'peak_memory_bytes' was not measured"):
            extrapolated.value("peak_memory_bytes")
