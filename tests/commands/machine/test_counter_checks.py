"""Checks under Nsight Compute, whose part a script with recorded reports and output plays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dpbench import Case
from dpbench.child.build import build
from dpbench.child.case import run_case
from dpbench.commands.machine import calibration, checks
from dpbench.commands.machine.calibration import (
    DRAM_SIZED,
    EXAMPLE_BYTES,
    FAILED,
    LARGEST,
    OK,
    READ,
    SMALLEST,
    TRAINER,
    WARNING,
    WORK,
    WRITTEN,
    Diagnosis,
    judge,
    table,
    work_that_fits,
)
from dpbench.commands.machine.known_work import KnownWork
from dpbench.core import gpu
from dpbench.core.gpu import Gpu
from dpbench.core.settings import Settings
from dpbench.instruments.logical.logical import Logical
from dpbench.instruments.timing import TimingRecorder
from tests.programs import program

DATA = Path(__file__).parents[2] / "data"
H200 = Gpu("GPU-0", "NVIDIA H200", 150_754_820_096, "580.159.04")

STAND_IN = f"""
import shutil, sys, time
sys.path.append({str(DATA.parents[1])!r})
if sys.argv[1:] == ["--version"]:
    print("Version 2025.3.1.0 (build 36398880) (public-release)")
    sys.exit()
export = sys.argv[sys.argv.index("--export") + 1]
"""
SUCCEED = f"""
shutil.copy({str(DATA / "tiny-fp32" / "report_standard_bs4_seq64.ncu-rep")!r}, export)
from tests.replay_ncu import say
from dpbench import Case
say(open({str(DATA / "ncu_output" / "success.txt")!r}).read(), Case("standard", 1, 1))
"""


def say(name: str) -> str:
    """Print what was recorded, and fail."""
    return f"print(open({str(DATA / 'ncu_output' / name)!r}).read()); sys.exit(1)"


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (checks, calibration, gpu):
        monkeypatch.setattr(module, "visible_gpus", lambda: [H200])


def under(tmp_path: Path, text: str, timeout: float = 20.0) -> Settings:
    """A setup whose ``ncu`` does this."""
    path = program(tmp_path / "ncu", f"{STAND_IN}\n{text}")
    return Settings(ncu_dir=tmp_path / "reports", own={"ncu_path": str(path)}, timeout=timeout)


def found_by(setup: Settings) -> dict[str, Diagnosis]:
    return {finding.check: finding for finding in checks.counters(setup)}


@pytest.mark.usefixtures("one_gpu")
def test_what_can_be_counted_is_listed_and_held_to_known_work(tmp_path: Path) -> None:
    """The recorded step moved little; a copy, a fill and a read of 4.3 GB were asked for."""
    found = found_by(under(tmp_path, SUCCEED))
    assert found["counters"].status == OK
    assert "readable: dram_read_bytes, dram_write_bytes, l2_atomic" in found["counters"].detail
    assert found["ncu calibration"].status == FAILED
    assert "a copy, a fill and a read of 4.29 GB" in found["ncu calibration"].detail
    assert "dram_read_bytes of the copy" in found["ncu calibration"].detail
    assert "-99." in found["ncu calibration"].detail


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        (say("counters_forbidden.txt"), "NVreg_RestrictProfilingToAdminUsers=0"),
        (say("counters_busy.txt"), "dcgmi profile --pause"),
        (say("metric_unknown.txt"), "ncu --query-metrics"),
        (say("library_not_loaded.txt"), "that the driver supports the version"),
        (say("no_ranges.txt"), ""),
        ("pass", ""),
    ],
)
def test_what_ncu_complains_of_is_told_with_its_remedy(
    text: str, remedy: str, tmp_path: Path
) -> None:
    [found] = checks.examine(under(tmp_path, text), [checks.counters])
    assert (found.check, found.status) == ("counters", FAILED)
    assert remedy in found.remedy
    assert ".log" in found.detail


@pytest.mark.usefixtures("one_gpu")
def test_a_hung_ncu_is_ended(tmp_path: Path) -> None:
    [found] = checks.examine(under(tmp_path, "time.sleep(100)", timeout=0.5), [checks.counters])
    assert "did not finish within 0.5 s" in found.detail


def test_without_a_gpu_nothing_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = found_by(under(tmp_path, SUCCEED)).values()
    assert {(f.status, f.detail) for f in found} == {
        (WARNING, "not checked: this machine has no GPU")
    }
    assert not (tmp_path / "reports").exists()


@pytest.mark.usefixtures("one_gpu")
def test_without_ncu_nothing_is_tried() -> None:
    found = found_by(Settings(own={"ncu_path": "/nowhere/ncu"})).values()
    assert {(f.status, f.detail) for f in found} == {
        (WARNING, "not checked: this machine has no ncu")
    }


def exactly(examples: int, **changed: float) -> dict[str, dict[str, float]]:
    """What right counters count of the work; of the copy, ``changed`` times that."""
    size = float(examples * EXAMPLE_BYTES)
    counted = {
        phase: dict.fromkeys(READ, read * size) | dict.fromkeys(WRITTEN, written * size)
        for phase, (_, read, written) in WORK.items()
    }
    copied = counted["forward"]
    copied |= {metric: copied[metric] * times for metric, times in changed.items()}
    return counted


@pytest.mark.parametrize(
    ("examples", "metric", "share", "status"),
    [
        (LARGEST, "dram_read_bytes", 1.0, OK),
        (LARGEST, "dram_read_bytes", 1.0099, OK),
        (LARGEST, "l2_sm_read_bytes", 0.9901, OK),
        (LARGEST, "l2_sm_write_bytes", 1.0101, FAILED),
        (LARGEST, "global_load_bytes", 0.5, FAILED),
        (DRAM_SIZED, "dram_write_bytes", 0.9, FAILED),
        (DRAM_SIZED - 1, "dram_write_bytes", 0.9, WARNING),
        (SMALLEST, "dram_read_bytes", 0.0, WARNING),
        (SMALLEST, "l2_sm_read_bytes", 1.5, FAILED),
    ],
)
def test_counted_bytes_may_be_one_percent_off(
    examples: int, metric: str, share: float, status: str
) -> None:
    found = judge("ncu", examples, exactly(examples, **{metric: share}))
    assert (found.check, found.status) == ("ncu calibration", status)
    if status == OK:
        assert f"at most {abs(share - 1):.2%} off in dram_read_bytes, l2_sm_" in found.detail
    else:
        assert f"{metric} of the copy " in found.detail
        assert f"{share - 1:+.2%}" in found.detail
    assert bool(found.remedy) == (status != OK)


@pytest.mark.parametrize("phase", ["backward", "clip"])
def test_a_fill_reads_nothing_and_a_read_writes_nothing(phase: str) -> None:
    counted, size = exactly(LARGEST), LARGEST * EXAMPLE_BYTES
    metric = "dram_read_bytes" if phase == "backward" else "global_store_bytes"
    counted[phase][metric] = 0.02 * size
    found = judge("cupti", LARGEST, counted)
    assert found.status == FAILED
    assert f"{metric} of the {WORK[phase][0]} 0.1718 GB, +2.00%" in found.detail


def test_one_table_has_what_each_instrument_counted() -> None:
    twice = exactly(LARGEST, l2_sm_read_bytes=1.5)
    for phase, (_, read, written) in WORK.items():
        twice[phase]["l2_served_bytes"] = 1.02 * (read + written) * LARGEST * EXAMPLE_BYTES
    found = [judge("ncu", LARGEST, exactly(LARGEST)), judge("cupti", LARGEST, twice)]
    made = table(found)
    assert made is not None
    lines = {(work, metric): cells for work, metric, *cells in made.cells}
    assert lines["copy", "l2_sm_read_bytes"] == ["8.59", "12.9", "+50.00%", "8.59", "+0.00%"]
    assert lines["read", "dram_write_bytes"] == ["0", "0", "+0.00%", "0", "+0.00%"]
    assert lines["fill", "l2_served_bytes"] == ["8.59", "8.76", "+2.00%", "-", "-"]
    assert "served" not in found[1].detail
    assert len(lines) == 3 * 7
    assert max(map(len, made.as_text().splitlines())) <= 80
    assert table([Diagnosis("gpu", OK, "there")]) is None


def test_a_gpu_that_counts_none_of_the_bytes_is_calibrated_by_nothing() -> None:
    assert judge("ncu", LARGEST, {"forward": {"l2_served_bytes": 1.0}}).status == WARNING


@pytest.mark.parametrize(
    ("free", "examples"),
    [(None, DRAM_SIZED), (139 * 10**9, LARGEST), (12 * 2**30, 192), (10**6, SMALLEST)],
)
def test_the_work_fits_in_free_memory(
    free: int | None, examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "visible_gpus", lambda: [replace(H200, free_bytes=free)])
    assert work_that_fits().batch_size == examples


def test_the_calibrating_trainer_does_what_it_says() -> None:
    case, size = Case(TRAINER, SMALLEST, 1, "tiny"), SMALLEST * EXAMPLE_BYTES
    trainer, batches = build(case, torch.device("cpu"), 1)
    assert isinstance(trainer, KnownWork)
    trainer.train_step(batches[0])
    assert trainer.source.numel() * 4 == size
    rows = {(row.phase, row.metric): row.value for row in Logical().count(case).rows}
    for phase, (_, read, written) in WORK.items():
        assert rows[phase, "logical_read_bytes"] == read * size
        assert rows[phase, "logical_write_bytes"] == pytest.approx(written * size, abs=4)


def test_it_runs_as_any_case_does() -> None:
    outcome = run_case(
        Case(TRAINER, 1, 1, "tiny"), TimingRecorder(1), device="cpu", warmup=1, active=1
    )
    assert outcome.details["phase_seconds"][0]["forward"] > 0
