"""The timing instrument; `tests/commands/test_cli_run.py` runs its processes, on the CPU."""

from __future__ import annotations

import pytest

from dpbench import Case, CaseReport
from dpbench.core.gpu import limited_by
from dpbench.instruments.timing import timing_rows

CASE = Case("dpsgd", 4, 16, "tiny")
RECORD = {
    "torch": "2.11.0",
    "device": "NVIDIA H200",
    "phase_seconds": [{"forward": 0.1, "backward": 0.3}, {"forward": 0.2, "backward": 0.3}],
    "peak_memory_bytes": 59_630_511_104,
}


def test_a_step_takes_as_long_as_its_phases_together() -> None:
    report = CaseReport.of(CASE, timing_rows(CASE, RECORD))
    assert report.value("step_time_seconds") == pytest.approx(0.45)
    assert report.value("step_time_seconds", "forward") == pytest.approx(0.15)
    assert report.value("peak_memory_bytes") == 59_630_511_104


def test_samples_per_second_are_the_batch_over_the_step_time() -> None:
    rates = [r.value for r in timing_rows(CASE, RECORD) if r.metric == "samples_per_second"]
    assert rates == pytest.approx([4 / 0.4, 4 / 0.5])


def test_each_step_has_its_clocks() -> None:
    clocks = [{"sm_clock_hz": 1.98e9, **limited_by(0)}, {"sm_clock_hz": 1.2e9, **limited_by(0x20)}]
    report = CaseReport.of(CASE, timing_rows(CASE, {**RECORD, "clocks": clocks}))
    assert report.value("sm_clock_hz") == pytest.approx(1.59e9)
    assert report.value("thermal_slowdown") == 0.5
    assert report.value("power_cap") == 0


def test_peak_memory_is_left_out_where_it_is_not_known() -> None:
    rows = timing_rows(CASE, {**RECORD, "peak_memory_bytes": None})
    assert not [row for row in rows if row.metric == "peak_memory_bytes"]
