"""Every trainer runs on the GPU, at every precision, without a profiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpbench import TRAINERS, Case
from dpbench.child.messages import Steps
from dpbench.core.case import PRECISIONS
from dpbench.instruments.timing import Timing
from dpbench.results.report import CaseReport

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("trainer", "precision"),
    [
        *((name, "fp32") for name in TRAINERS),
        *(("dpsgd", precision) for precision in PRECISIONS if precision != "fp32"),
    ],
)
def test_trainer_runs_on_the_gpu(trainer: str, precision: str, tmp_path: Path) -> None:
    case = Case(trainer, batch_size=4, seq_len=64, model_size="tiny", precision=precision)
    rows = Timing(tmp_path, steps=Steps(warmup=1, active=2)).measure(case).rows
    report = CaseReport.of(case, rows)
    assert report.value("step_time_seconds") > 0
    weights = 12 * case.size.layers * case.size.hidden**2
    assert report.value("peak_memory_bytes") > weights * (2 if precision == "bf16" else 4)
