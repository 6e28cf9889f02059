"""What lies in the current directory is imported only where it is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dpbench.commands.cli import main
from dpbench.core.registry import TRAINERS

TAKEN = ("wcwidth", "numexpr", "bottleneck", "pyarrow", "openpyxl", "xlsxwriter")
"""What pandas and tabulate import if they can."""

SIZE = ["--batch-size=2", "--seq-len=8", "--model-size=99x16x1x2"]
COUNT = ["run", "--instrument=logical", *SIZE, "--trainer=standard"]


def dpbench(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dpbench", *words],
        cwd=directory,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def strange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with two runs, and modules that say so if they are executed."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.json", "b.json"):
        assert main([*COUNT, f"--json={name}"]) == 0
    for module in TAKEN:
        Path(f"{module}.py").write_text(f"print('executed {module}')")
    return tmp_path


@pytest.mark.repeats
@pytest.mark.parametrize(
    "words",
    [
        ["list"],
        ["show", "a.json"],
        ["show", "a.json", "--roofline=h200"],
        ["compare", "a.json", "b.json"],
        ["merge", "a.json"],
        COUNT,
    ],
    ids=" ".join,
)
def test_no_module_there_is_executed(strange: Path, words: list[str]) -> None:
    done = dpbench(strange, *words)
    assert done.returncode == 0, done.stderr
    assert "executed" not in done.stdout + done.stderr


@pytest.mark.repeats
@pytest.mark.parametrize("instrument", ["logical", "timing"])
def test_a_module_there_does_not_shadow_one_of_a_cases_process(
    tmp_path: Path, instrument: str
) -> None:
    for module in ("typing", "ast", "json", "socket", "numpy", "tabulate"):
        (tmp_path / f"{module}.py").write_text("raise SystemExit('executed')")
    run = ["run", f"--instrument={instrument}", "--device=cpu", *SIZE, "--trainer=standard"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "dpbench", *run, "--active=1"],
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_users_trainer_is_found_there_once_it_is_named_beside_a_folder_named_dpbench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("of_mine.py").write_text(
        "from dpbench.training.standard import StandardTrainer\n"
        "class Mine(StandardTrainer):\n    pass\n"
    )
    Path("dpbench").mkdir()  # as in the folder that a checkout is in
    timed = ["run", "--instrument=timing", "--device=cpu", *SIZE, "--active=1"]
    done = dpbench(tmp_path, *timed, "--trainer=of_mine:Mine")
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(tmp_path) not in sys.path
    assert TRAINERS["standard"].__name__ == "StandardTrainer"
    assert str(tmp_path) not in sys.path
    assert TRAINERS["of_mine:Mine"].__name__ == "Mine"
    assert sys.path[-1] == str(tmp_path)
    del sys.modules["of_mine"]
