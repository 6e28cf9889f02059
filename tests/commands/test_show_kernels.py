"""``dpbench show`` of reports of kernels, and ``dpbench run --kernels`` by a replayed ``ncu``."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from dpbench.commands.cli import main
from dpbench.core.gpu import Gpu
from dpbench.results.schema import parsed
from tests.programs import program
from tests.recorded import RANGES, unpacked

CLIP = "kernels/clip/report_dpsgd_bs4_seq64.ncu-rep"
DPSGD = "kernels/report_dpsgd_bs4_seq64.ncu-rep"
REPLAY = Path(__file__).parents[1] / "replay_ncu.py"


def test_a_saved_report_becomes_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = unpacked(DPSGD, tmp_path)
    ranges = RANGES / "report_dpsgd_bs4_seq64.ncu-rep"
    (tmp_path / "tiny-fp32" / ranges.name).write_bytes(ranges.read_bytes())
    options = ["--phase", "clip", "--top", "1"]
    assert main(["show", str(report), *options]) == 0
    text = capsys.readouterr().out
    assert "dpsgd-bs4-seq64-tiny-fp32, NVIDIA H200: bytes by kernel (top 1 of 7)" in text
    assert "gemvx::kernel" in text
    assert "Share: of the step's 0.0" in text
    assert "4800 GB/s of NVIDIA H200" in text


def test_reports_become_a_page_and_rows_as_a_run_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("plotly")
    pytest.importorskip("jinja2")
    report = unpacked(DPSGD, tmp_path)
    ranges = RANGES / "report_dpsgd_bs4_seq64.ncu-rep"
    (tmp_path / "tiny-fp32" / ranges.name).write_bytes(ranges.read_bytes())
    both = [str(report), str(tmp_path / "tiny-fp32" / ranges.name)]
    outputs = [tmp_path / "kernels.html", tmp_path / "kernels.csv"]
    assert (
        main(["show", *both, *(word for path in outputs for word in ("--output", str(path)))]) == 0
    )
    page = outputs[0].read_text()
    assert "dpsgd-bs4-seq64-tiny-fp32, NVIDIA H200: bytes by kernel" in page
    assert "gemvx::kernel" in page
    assert "DRAM bytes by trainer and phase" in page
    rows = pd.read_csv(outputs[1])
    assert {*rows.instrument} == {"ncu", "ncu_kernels"}
    assert main(["show", "timeline.sqlite", "--html", str(outputs[0])]) == 2
    assert "timeline.sqlite: a timeline can only be shown as tables" in capsys.readouterr().err


def test_a_phase_without_kernels_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = unpacked(CLIP, tmp_path)
    assert main(["show", str(report), "--phase", "noise"]) == 2
    assert "no kernel in phase 'noise', only in clip" in capsys.readouterr().err


def test_a_report_of_another_program_goes_by_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    report = unpacked(CLIP, tmp_path)
    foreign = Path("other.ncu-rep")
    foreign.write_bytes(report.read_bytes().replace(b"dpbench", b"another"))
    assert main(["show", str(foreign)]) == 0
    text = capsys.readouterr().out
    assert "other.ncu-rep, NVIDIA H200: bytes by kernel" in text
    assert "outside" in text
    assert "the bytes of the step were not" in " ".join(text.split())


def test_run_profiles_each_kernel_after_the_ranges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    ncu = program(tmp_path / "ncu", REPLAY)
    gpus = [Gpu("GPU-0", "NVIDIA H200", 141 * 10**9, "580.159.03")]
    monkeypatch.setattr("dpbench.core.gpu.visible_gpus", lambda: gpus)
    cell = ["--trainer", "dpsgd", "--batch-size", "4", "--seq-len", "64", "--model-size", "tiny"]
    how = ["--instrument", "ncu", "--kernels", "--top", "4", "--ncu-path", str(ncu)]
    assert main(["run", *cell, *how, "--json", "run.json"]) == 0
    text = capsys.readouterr().out
    assert "dpsgd-bs4-seq64-tiny-fp32, NVIDIA H200: bytes by kernel (top 4 of" in text
    document = parsed(Path("run.json").read_bytes())
    assert document["cases"][0]["instruments"] == ["ncu", "ncu_kernels"]
    rows = {(r["phase"], r["metric"]): r["value"] for r in document["rows"]}
    assert rows["step", "kernel_launches"] == 468
    phases = ("forward", "backward", "clip", "noise", "optimizer")
    assert sum(rows[phase, "kernel_launches"] for phase in phases) == 468
