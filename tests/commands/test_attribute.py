"""``dpbench attribute``, from files recorded on an NVIDIA H200."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from dpbench import Case
from dpbench.cli import main
from dpbench.instruments.ncu.range_report import KERNELS, report_path
from dpbench.instruments.torch_profiler.files import write_summary
from tests.recorded import RANGES, unpacked

CASE = Case("standard", 4, 64, "tiny")
DPSGD = Case("dpsgd", 4, 64, "tiny")
PROFILE = Path(__file__).parents[1] / "data" / "profile" / "standard"
OPTIONS = [*("--batch-size", "4", "--seq-len", "64"), "--model-size=tiny", "--trainer=standard"]


@pytest.fixture
def saved(tmp_path: Path) -> list[str]:
    """Options that name what an attribution left: ranges, kernels and a profile."""
    unpacked(f"kernels/{CASE.report_path.name}", tmp_path)
    shutil.copy(RANGES / CASE.report_path.name, tmp_path / CASE.report_path)
    runs = tmp_path / "runs"
    shutil.copytree(PROFILE, runs / CASE.id)
    record = json.loads((PROFILE / "record.json").read_text())
    write_summary(CASE, record, runs / CASE.id)
    return ["--saved", "--ncu-dir", str(tmp_path), "--profile-dir", str(runs)]


def test_saved_files_become_the_whole_account(
    saved: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["attribute", *OPTIONS, *saved, "--top", "3"]) == 0
    text = capsys.readouterr().out
    account, _, tables = text.partition("bytes by kernel")
    phases = [line.split()[0] for line in account.splitlines() if line.endswith("%")]
    assert phases == ["phase", "forward", "backward", "optimizer", "outside", "step"]
    assert "at this size copies stay in the L2 cache" in account
    operators, _, copies = tables.partition("Copies and memsets")
    assert "aten::addmm" in operators.partition("bytes by operator")[2]
    assert "forward: Memset" in copies


def test_the_account_is_written_in_bytes(
    saved: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "account.json"
    assert main(["attribute", *OPTIONS, *saved, "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    assert (written["case"], written["unit"]) == (CASE.id, "B")
    step = written["phases"].pop("step")
    for column, value in step.items():
        by_phase = [phase[column] for phase in written["phases"].values()]
        assert sum(by_phase) == pytest.approx(value, rel=1e-9, abs=1e-6), column
    assert step["range_read"] + step["range_written"] > 0


def test_kernels_of_one_phase_are_no_account(
    saved: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clip = unpacked(f"kernels/clip/{DPSGD.report_path.name}", tmp_path / "clip")
    shutil.copy(clip, tmp_path / report_path(DPSGD, KERNELS))
    shutil.copy(RANGES / DPSGD.report_path.name, tmp_path / DPSGD.report_path)
    assert main(["attribute", *OPTIONS, "--trainer=dpsgd", *saved]) == 2
    said = capsys.readouterr().err
    assert "lacks the kernels of forward, backward, noise, optimizer; an account needs" in said


def test_without_files_the_missing_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["attribute", *OPTIONS, "--saved", "--ncu-dir", str(tmp_path)]) == 1
    assert f"{CASE.report_path}: no such file" in capsys.readouterr().err


def test_without_a_gpu_nothing_can_be_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["attribute", *OPTIONS, "--ncu-path", sys.executable]) == 2
    assert "no CUDA GPU is visible here" in capsys.readouterr().err
