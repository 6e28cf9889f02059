"""What pytest-benchmark times does its work; a plain call stands for its fixture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import speed


def called(function: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    function(*arguments, **named)


def test_a_session_saves_its_run_and_writes_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    speed.test_session_of_16_cases(called, tmp_path)
    written = {path.suffix for path in tmp_path.rglob("run.*")}
    assert written == {".json", ".markdown", ".csv"}
    assert [*tmp_path.rglob("*_it.json")]


def test_two_runs_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    speed.test_comparing_two_runs(called)
    assert "dram_bytes" in capsys.readouterr().out


def test_a_report_of_kernels_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    speed.test_reading_a_report_of_kernels(called, tmp_path)
    assert "bytes by kernel" in capsys.readouterr().out
