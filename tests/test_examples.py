"""Tests that the examples train in each way, and that `dpbench exec --verify` passes them."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dpbench.commands.cli import main
from tests.commands.test_exec import ProcessHere

EXAMPLES = Path(__file__).parents[1] / "examples"
NEEDED = {"cifar": (), "lora": ("peft", "transformers")}
"""The packages that an example needs, beside those of dpbench."""

pytestmark = pytest.mark.filterwarnings("ignore")


def example(name: str) -> str:
    """Return the path of an example, or skip the test if a package is not installed."""
    for package in NEEDED[name]:
        pytest.importorskip(package)
    return str(EXAMPLES / f"{name}.py")


@pytest.mark.parametrize("name", NEEDED)
@pytest.mark.parametrize("way", ["privately", "--opacus", "--plain"])
def test_each_example_trains_in_each_way(
    name: str,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = example(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [path, "--steps=2", *[way][way == "privately" :]])
    runpy.run_path(path, run_name="__main__")
    *_, last = capsys.readouterr().out.splitlines()
    assert ("inf at" in last or "not private" in last) == (way == "--plain")


@pytest.mark.parametrize("name", NEEDED)
def test_verify_passes_each_example(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = example(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dpbench.instruments.script.subprocess", SimpleNamespace(Popen=ProcessHere))
    assert main(["exec", "--verify", "--steps=2", "--skip=1", path]) == 0, capfd.readouterr().out


def test_exec_finds_the_phases_of_private_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = example("cifar")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dpbench.instruments.script.subprocess", SimpleNamespace(Popen=ProcessHere))
    counting = ["--instrument=logical", "--steps=2", "--skip=1", "--name=cifar"]
    assert main(["exec", *counting, path]) == 0
    shown = capfd.readouterr().out.splitlines()
    heads = [line.split() for line in shown if "backward" in line]
    assert ["trainer", "forward", "backward", "clip", "optimizer"] in [each[:5] for each in heads]
    assert "Only cifar: noise in the update." in shown


def test_examples_stay_short() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == NEEDED.keys()
    for path in EXAMPLES.glob("*.py"):
        assert path.read_text(encoding="utf-8").count("\n") < 80
