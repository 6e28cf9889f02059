"""CUPTI on a real GPU: in a process that counts itself, and in that of a case."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dpbench import Case, CaseReport
from dpbench.instruments.cupti.cupti import Cupti

pytestmark = pytest.mark.gpu


def test_a_process_counts_its_own_ranges() -> None:
    tests = Path(__file__).with_name("counting_in_process.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)],
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        cwd=tests.parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.mark.parametrize("micro_batches", [1, 16])
def test_the_instrument_measures_a_case_in_one_process(tmp_path: Path, micro_batches: int) -> None:
    case = Case("dpsgd", 4 * micro_batches, 64, "tiny", micro_batches=micro_batches)
    report = CaseReport.of(case, Cupti(tmp_path).measure(case).rows)
    for metric in ("l2_served_bytes", "l2_sm_read_bytes", "l2_crossing_bytes"):
        whole = report.value(metric)
        assert report.phases[metric].sum() == pytest.approx(whole, rel=0.1)
    assert {"forward", "backward", "clip", "noise", "optimizer"} <= {*report.phases.index}
    assert 0 < report.value("gpu_busy_share", "noise") <= 1
    assert 0 < report.value("gpu_busy_share") <= 1
    assert report.value("peak_memory_bytes") > 0
    seconds = report.value("range_time_seconds")
    assert report.value("step_time_seconds") == pytest.approx(seconds, rel=0.5)
