"""The torch_profiler instrument: its command, its rows, and what can be missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpbench import Case
from dpbench.child.messages import Schedule, Steps
from dpbench.child.task import Task
from dpbench.core.settings import Settings
from dpbench.instruments import choose
from dpbench.instruments.torch_profiler import profiler as torch_profiler
from dpbench.instruments.torch_profiler.profile_folder import own_folder
from dpbench.instruments.torch_profiler.profiler import TorchProfiler

CASE = Case("dpsgd", 4, 64, "tiny")


def test_its_process_is_told_all_of_it(tmp_path: Path) -> None:
    instrument = TorchProfiler(Path("runs"), schedule=Schedule(active=3), threshold=2.5)
    Task(CASE, instrument).write(tmp_path / "task.json")
    assert Task.read(tmp_path / "task.json") == Task(CASE, instrument)


def test_options_reach_the_instrument() -> None:
    settings = Settings(
        device="cpu",
        timeout=7.0,
        own={
            "profile_dir": Path("x"),
            "profile_schedule": "wait=2",
            "profile_threshold": 1.0,
        },
    )
    assert choose(["torch_profiler"], settings) == [
        TorchProfiler(Path("x"), "cpu", Steps(4, 1), 7.0, Schedule(wait=2), 1.0)
    ]


def test_what_other_programs_say_of_ranks_does_not_move_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.setenv(name, "2")
    assert own_folder(tmp_path) == tmp_path
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "error.json")
    assert own_folder(tmp_path) == tmp_path / "rank2"


def test_without_tensorboard_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    TorchProfiler(tmp_path, "cpu").check()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(torch_profiler, "find_spec", lambda _: None)
    TorchProfiler(tmp_path, "cpu").check()
    assert capsys.readouterr().err == ("dpbench: no TensorBoard log: pip install tensorboard\n")
