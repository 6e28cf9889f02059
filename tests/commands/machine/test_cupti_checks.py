"""Counting by CUPTI, as the doctor tries it: beside a process that prints what was counted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from dpbench import Case
from dpbench.commands.machine import calibration, checks
from dpbench.commands.machine.calibration import (
    EXAMPLE_BYTES,
    FAILED,
    IDLE_PHASE,
    LARGEST,
    OK,
    WARNING,
    WORK,
    Diagnosis,
)
from dpbench.core import gpu
from dpbench.core.errors import InstrumentError
from dpbench.core.gpu import Gpu
from dpbench.core.settings import Settings
from dpbench.instruments.counters import CountersForbidden
from dpbench.results.outcome import Outcome
from tests.programs import program, reports

H200 = Gpu("GPU-0", "NVIDIA H200", 150_754_820_096, "580.159.04", free_bytes=139 * 10**9)
COPIED = LARGEST * EXAMPLE_BYTES


def record(share: float = 1.0, resting: float = 0.0, **changed: Any) -> dict[str, Any]:
    """What the process of known work says, of which this share was counted."""

    def bytes_of(read: float, written: float) -> dict[str, float]:
        return {"dram_read_bytes": read * COPIED, "dram_write_bytes": written * COPIED}

    counted = {phase: bytes_of(share * r, share * w) for phase, (_, r, w) in WORK.items()}
    counted[IDLE_PHASE] = bytes_of(resting, resting)
    names = {"dram_read_bytes": ["dram__bytes_read.sum"], "l2_served_bytes": ["lts__t_sectors.sum"]}
    made = {"cupti": "13.0", "chip": "GH100", "passes": 1, "counters": names}
    return made | {"counted": [counted]} | changed


@pytest.fixture
def examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What is found where a case's process prints this record."""
    for module in (checks, calibration, gpu):
        monkeypatch.setattr(module, "visible_gpus", lambda: [H200])

    def run(printed: dict[str, Any] | InstrumentError) -> list[Diagnosis]:
        case = Case("standard", 1, 1)
        if isinstance(printed, InstrumentError):
            outcome = Outcome.failed(case, printed)
        else:
            outcome = Outcome(case, (), details=printed)
        text = (
            "import json, sys; "
            "assert json.load(open(sys.argv[-1]))['instrument'].endswith(':Cupti'); "
            + reports(outcome)
        )
        monkeypatch.setattr(sys, "executable", str(program(tmp_path / "step", text)))
        return list(checks.examine(Settings(ncu_dir=tmp_path), [checks.cupti]))

    return run


def test_it_says_what_the_chip_counts_and_that_it_is_right(examined: Any) -> None:
    counts, finding = examined(record(0.9999, 0.0001))
    assert (counts.status, finding.status) == (OK, OK)
    assert counts.detail == (
        "libcupti 13.0 counts everything on GH100 in 1 step by phase: "
        "dram__bytes_read.sum, lts__t_sectors.sum"
    )
    assert "a copy, a fill and a read of 8.59 GB: at most 0.01% off in dram" in finding.detail
    assert finding.detail.endswith("0.00172 GB while the GPU was idle")


@pytest.mark.parametrize(("share", "resting"), [(1.02, 0.0), (0.98, 0.0), (1.0, 0.02)])
def test_other_bytes_fail_the_calibration(share: float, resting: float, examined: Any) -> None:
    counts, finding = examined(record(share, resting))
    assert (counts.status, finding.status) == (OK, FAILED)
    assert "everything else that uses the GPU" in finding.remedy


def test_a_chip_without_counters_of_bytes_is_no_failure(examined: Any) -> None:
    found = examined(record(counted=[{"forward": {}, "outside": {}}]))
    assert [finding.status for finding in found] == [OK, WARNING]
    assert "this GPU counts none of the bytes" in found[1].detail


def test_what_cupti_complains_of_is_told_with_its_remedy(examined: Any) -> None:
    [found] = examined(CountersForbidden("this user may not read performance counters"))
    assert (found.check, found.status) == ("cupti", FAILED)
    assert "NVreg_RestrictProfilingToAdminUsers=0" in found.remedy


def test_without_a_gpu_nothing_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = list(checks.cupti(Settings(ncu_dir=tmp_path)))
    assert {(f.status, f.detail) for f in found} == {
        (WARNING, "not checked: this machine has no GPU")
    }
