"""Checks under Nsight Compute, whose part a script with recorded reports and output plays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dpbench import Case, gpu
from dpbench.doctor import checks
from dpbench.doctor.checks import (
    COPY_TRAINER,
    ENOUGH,
    EXAMPLE_BYTES,
    FAILED,
    FEW,
    MOST,
    OK,
    WARNING,
    Finding,
    judge,
)
from dpbench.doctor.copying import CopyTrainer
from dpbench.gpu import Gpu
from dpbench.instruments.logical.instrument import Logical
from dpbench.process.build import build
from dpbench.process.step import run_case
from dpbench.settings import Settings
from tests.programs import program

DATA = Path(__file__).parents[1] / "data"
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
from tests.replay_ncu import marked
print(marked(open({str(DATA / "ncu_output" / "success.txt")!r}).read()))
"""


def say(name: str) -> str:
    """Print what was recorded, and fail."""
    return f"print(open({str(DATA / 'ncu_output' / name)!r}).read()); sys.exit(1)"


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (checks, gpu):
        monkeypatch.setattr(module, "visible_gpus", lambda: [H200])


def under(tmp_path: Path, text: str, timeout: float = 20.0) -> Settings:
    """A setup whose ``ncu`` does this."""
    path = program(tmp_path / "ncu", f"{STAND_IN}\n{text}")
    return Settings(ncu_dir=tmp_path / "reports", ncu_path=str(path), timeout=timeout)


def found_by(setup: Settings) -> dict[str, Finding]:
    return {finding.check: finding for finding in checks.counters(setup)}


@pytest.mark.usefixtures("one_gpu")
def test_what_can_be_counted_is_listed_and_held_to_the_copy(tmp_path: Path) -> None:
    """The recorded step moved little through DRAM; a copy of 4.3 GB was asked for."""
    found = found_by(under(tmp_path, SUCCEED))
    assert found["counters"].status == OK
    assert "may be read: dram_read_bytes, dram_write_bytes, l2_read" in found["counters"].detail
    assert found["calibration"].status == FAILED
    assert "a copy of 4.29 GB" in found["calibration"].detail
    assert "-99." in found["calibration"].detail


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        (say("counters_forbidden.txt"), "NVreg_RestrictProfilingToAdminUsers=0"),
        (say("counters_busy.txt"), "dcgmi profile --pause"),
        (say("metric_unknown.txt"), "ncu --query-metrics"),
        (say("library_not_loaded.txt"), "driver fit each other"),
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
    assert {(f.status, f.detail) for f in found} == {(WARNING, "not tried: there is no GPU")}
    assert not (tmp_path / "reports").exists()


@pytest.mark.usefixtures("one_gpu")
def test_without_ncu_nothing_is_tried() -> None:
    found = found_by(Settings(ncu_path="/nowhere/ncu")).values()
    assert {(f.status, f.detail) for f in found} == {(WARNING, "not tried: there is no ncu")}


@pytest.mark.parametrize(
    ("examples", "share", "status"),
    [
        (MOST, 1.0, OK),
        (MOST, 1.0099, OK),
        (MOST, 0.9901, OK),
        (MOST, 1.0101, FAILED),
        (MOST, 0.5, FAILED),
        (ENOUGH, 0.9, FAILED),
        (ENOUGH - 1, 0.9, WARNING),
        (FEW, 0.0, WARNING),
    ],
)
def test_counted_bytes_may_be_one_percent_off(examples: int, share: float, status: str) -> None:
    moved = examples * EXAMPLE_BYTES * share
    found = judge("calibration", examples, {"dram_read_bytes": moved, "dram_write_bytes": moved})
    assert found.status == status
    assert f"{share - 1:+.2%}" in found.detail
    assert bool(found.remedy) == (status != OK)


@pytest.mark.parametrize(
    ("free", "examples"),
    [(None, ENOUGH), (139 * 10**9, MOST), (12 * 2**30, 192), (10**6, FEW)],
)
def test_the_copy_fits_in_free_memory(
    free: int | None, examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "visible_gpus", lambda: [replace(H200, free_bytes=free)])
    assert checks.largest_copy().batch_size == examples


def test_the_calibrating_trainer_copies_what_it_says() -> None:
    case = Case(COPY_TRAINER, FEW, 1, "tiny")
    trainer, batches = build(case, torch.device("cpu"), 1)
    assert isinstance(trainer, CopyTrainer)
    trainer.train_step(batches[0])
    assert torch.equal(trainer.copy, trainer.source)
    assert trainer.source.numel() == FEW * EXAMPLE_BYTES
    rows = {(row.phase, row.metric): row.value for row in Logical().count(case).rows}
    assert rows["forward", "logical_read_bytes"] == FEW * EXAMPLE_BYTES
    assert rows["forward", "logical_write_bytes"] == FEW * EXAMPLE_BYTES


def test_it_runs_as_any_case_does() -> None:
    record = run_case(Case(COPY_TRAINER, 1, 1, "tiny"), device="cpu", warmup=1, active=1)
    assert record["phase_seconds"][0]["forward"] > 0
