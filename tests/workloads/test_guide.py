"""The guide's recipes for a workload of one's own and for one that is built in."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dpbench import TRAINERS, CaseReport
from dpbench.commands.cli import main

GUIDE = (Path(__file__).parents[2] / "docs/guide.md").read_text(encoding="utf-8")
CHAPTER = re.split(
    r"^## ", GUIDE.partition("\n## Measure your own model\n")[2], flags=re.MULTILINE
)[0]
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", CHAPTER, re.DOTALL)
(WORKLOAD,) = [text for kind, text in BLOCKS if kind == "python"]
COMMANDS = [
    shlex.split(line) for kind, text in BLOCKS if kind == "bash" for line in text.splitlines()
]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the guide's module is."""
    (tmp_path / "mine.py").write_text(WORKLOAD)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("mine", None)


def test_a_workload_has_at_most_25_lines() -> None:
    assert len([line for line in WORKLOAD.splitlines() if line.strip()]) <= 25


def test_it_trains_as_the_guide_says(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    smoke = ["dpbench", "smoke", "--workload", "mine:Digits"]
    assert smoke in COMMANDS
    assert main(smoke[1:]) == 0
    assert capsys.readouterr().out.count("[TEST OK]") == len(TRAINERS)


@pytest.mark.usefixtures("counted_here")
def test_a_test_names_its_class(mine: Path, logical_io: Callable[..., CaseReport]) -> None:
    [call] = re.findall(r"`(logical_io\(.*workload=.*\))`", CHAPTER)
    report = eval(call, {"logical_io": logical_io})
    assert report.value("logical_bytes", "clip") > 0


def test_a_hugging_face_model_trains_as_the_guide_says(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    [smoke] = [command for command in COMMANDS if "smoke" in command and "hf-causal-lm" in command]
    assert main([*smoke[1:], "--set=n_embd=48", "--trainer=dpsgd_ghost"]) == 0
    assert "[TEST OK]" in capsys.readouterr().out
