"""``dpbench doctor`` on a machine without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpbench.commands.cli import main
from dpbench.commands.machine.calibration import OK, Diagnosis


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)


def test_without_a_gpu_it_fails_and_says_what_works(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["doctor", "--json", "--ncu-path", "/nowhere/ncu"]) == 1
    said = json.loads(capsys.readouterr().out)
    status = {finding["check"]: finding["status"] for finding in said["findings"]}
    assert said["ok"] is False
    assert {check for check, found in status.items() if found == "failed"} == {"gpu", "ncu"}
    assert status["logical counting"] == "ok"
    assert status["ncu calibration"] == "warning"
    assert all(f["remedy"] for f in said["findings"] if f["status"] == "failed")
    assert not list(tmp_path.iterdir())


def test_no_failure_is_exit_code_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fine = Diagnosis("gpu", OK, "there"), Diagnosis("ncu", "warning", "new", "upgrade")
    monkeypatch.setattr("dpbench.commands.machine.checks.examine", lambda _: iter(fine))
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ok      gpu                  there",
        "warning ncu                  new",
        "                           > upgrade",
    ]


def test_an_interruption_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dpbench.commands.machine.checks.examine", interrupted)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "dpbench doctor: interrupted\n"


def test_a_time_out_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--timeout", "0"]) == 2
    assert "time-out must be positive" in capsys.readouterr().err
