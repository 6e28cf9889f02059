"""Checks under Nsight Compute, whose part a script with recorded reports and output plays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dpbench import Case
from dpbench.doctor import FAILED, OK, WARNING, Check, Finding, Setup, counters, examine
from dpbench.doctor.copying import CopyTrainer
from dpbench.doctor.counters import COPIES, ENOUGH, EXAMPLE_BYTES, FEW, MOST, judge
from dpbench.gpu import Gpu, Use
from dpbench.instruments.logical.instrument import Logical
from dpbench.instruments.ncu import ranges as ncu
from dpbench.metrics import METRICS, Metric
from dpbench.process.build import build
from dpbench.process.step import run_case
from tests.programs import program

DATA = Path(__file__).parents[1] / "data"
H200 = Gpu("GPU-0", "NVIDIA H200", 150_754_820_096, "580.159.04")
CHECKS = ("profiling", "permission", "other profiler", "metrics")

STAND_IN = """
import shutil, sys, time
if sys.argv[1:] == ["--version"]:
    print("Version 2025.3.1.0 (build 36398880) (public-release)")
    sys.exit()
export = sys.argv[sys.argv.index("--export") + 1]
"""
SUCCEED = f"""
shutil.copy({str(DATA / "tiny-fp32" / "report_standard_bs4_seq64.ncu-rep")!r}, export)
print(open({str(DATA / "ncu_output" / "success.txt")!r}).read())
"""


def say(name: str) -> str:
    """Print what was recorded, and fail."""
    return f"print(open({str(DATA / 'ncu_output' / name)!r}).read()); sys.exit(1)"


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (counters, ncu):
        monkeypatch.setattr(module, "visible_gpus", lambda: [H200])


def under(tmp_path: Path, text: str, timeout: float = 20.0) -> Setup:
    """A setup whose ``ncu`` does this."""
    path = program(tmp_path / "ncu", f"{STAND_IN}\n{text}")
    return Setup(tmp_path / "reports", str(path), timeout)


def found_by(setup: Setup) -> dict[str, Finding]:
    return {finding.check: finding for finding in counters.counters(setup)}


@pytest.mark.usefixtures("one_gpu")
def test_a_report_that_can_be_read_answers_every_question(tmp_path: Path) -> None:
    found = found_by(under(tmp_path, SUCCEED))
    assert {check: finding.status for check, finding in found.items()} == dict.fromkeys(CHECKS, OK)


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(
    ("text", "blamed", "remedy"),
    [
        (say("counters_forbidden.txt"), "permission", "NVreg_RestrictProfilingToAdminUsers=0"),
        (say("counters_busy.txt"), "other profiler", "dcgmi profile --pause"),
        (say("metric_unknown.txt"), "metrics", "ncu --query-metrics"),
        (say("library_not_loaded.txt"), "profiling", "driver fit each other"),
        (say("no_ranges.txt"), "profiling", ""),
        ("pass", "profiling", ""),
    ],
)
def test_what_ncu_complains_of_fails_one_check_and_leaves_the_others_open(
    text: str, blamed: str, remedy: str, tmp_path: Path
) -> None:
    found = found_by(under(tmp_path, text))
    assert {check for check, finding in found.items() if finding.status == FAILED} == {blamed}
    assert remedy in found[blamed].remedy
    assert ".log" in found[blamed].detail
    others = [finding for check, finding in found.items() if check != blamed]
    assert {finding.status for finding in others} == {WARNING}
    assert tuple(found) == CHECKS


@pytest.mark.usefixtures("one_gpu")
def test_counters_that_a_chip_lacks_are_all_named(
    tmp_path: Path,
) -> None:
    for name in ("l2_flown_bytes", "l2_swum_bytes"):
        METRICS.register(Metric(name, counters=(f"lts__t_{name}.sum",)))
    found = found_by(under(tmp_path, SUCCEED))
    assert found["metrics"].status == FAILED
    assert "lacks the counters of l2_flown_bytes, l2_swum_bytes" in found["metrics"].detail
    assert found["permission"].status == OK


@pytest.mark.usefixtures("one_gpu")
def test_a_hung_ncu_is_ended(tmp_path: Path) -> None:
    found = found_by(under(tmp_path, "time.sleep(100)", timeout=0.5))
    assert "did not finish within 0.5 s" in found["profiling"].detail


@pytest.mark.usefixtures("one_gpu")
def test_bytes_of_something_else_fail_the_calibration(tmp_path: Path) -> None:
    """The recorded step moved little through DRAM; a copy of 4.3 GB was asked for."""
    [found] = counters.calibration(under(tmp_path, SUCCEED))
    assert found.status == FAILED
    assert "a copy of 4.29 GB" in found.detail
    assert "-99." in found.detail


@pytest.mark.usefixtures("one_gpu")
def test_a_calibration_that_cannot_run_is_a_failure(tmp_path: Path) -> None:
    setup = under(tmp_path, say("counters_forbidden.txt"))
    [found] = examine(setup, [counters.calibration])
    assert (found.check, found.status) == ("calibration", FAILED)
    assert "NVreg" in found.remedy


@pytest.mark.parametrize("check", [counters.counters, counters.calibration])
def test_without_a_gpu_nothing_is_tried(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = list(check(under(tmp_path, SUCCEED)))
    assert {(f.status, f.detail) for f in found} == {(WARNING, "not tried: there is no GPU")}
    assert not (tmp_path / "reports").exists()


@pytest.mark.usefixtures("one_gpu")
def test_without_ncu_nothing_is_tried() -> None:
    [found] = counters.calibration(Setup(ncu_path="/nowhere/ncu"))
    assert (found.status, found.detail) == (WARNING, "not tried: there is no ncu")


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
    found = judge(examples, {"dram_read_bytes": moved, "dram_write_bytes": moved})
    assert found.status == status
    assert f"{share - 1:+.2%}" in found.detail
    assert bool(found.remedy) == (status != OK)


@pytest.mark.parametrize(
    ("free", "examples"),
    [(None, ENOUGH), (139 * 10**9, MOST), (12 * 2**30, 192), (10**6, FEW)],
)
def test_the_copy_fits_in_free_memory(free: int | None, examples: int) -> None:
    assert counters.examples_that_fit(Use(free, ())) == examples


def test_the_calibrating_trainer_copies_what_it_says() -> None:
    case = Case(COPIES, FEW, 1, "tiny")
    trainer, batches = build(case, torch.device("cpu"), 1)
    assert isinstance(trainer, CopyTrainer)
    trainer.train_step(batches[0])
    assert torch.equal(trainer.copy, trainer.source)
    assert trainer.source.numel() == FEW * EXAMPLE_BYTES
    rows = {(row.phase, row.metric): row.value for row in Logical().measure(case)}
    assert rows["forward", "logical_read_bytes"] == FEW * EXAMPLE_BYTES
    assert rows["forward", "logical_write_bytes"] == FEW * EXAMPLE_BYTES


def test_it_runs_as_any_case_does() -> None:
    record = run_case(Case(COPIES, 1, 1, "tiny"), device="cpu", warmup=1, active=1)
    assert record["phase_seconds"][0]["forward"] > 0
