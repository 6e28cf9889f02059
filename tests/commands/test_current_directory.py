"""What lies in the current directory is imported only where it is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dpbench.core.registry import TRAINERS
from tests.commands.seeded import run_of

TAKEN = ("wcwidth", "numexpr", "bottleneck", "pyarrow", "openpyxl", "xlsxwriter")
"""What pandas and tabulate import if they can."""

SIZE = ["--batch-size=2", "--seq-len=8", "--model-size=99x16x1x2"]


def dpbench(
    directory: Path, *words: str, interpreter: str = "-B"
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, interpreter, "-m", "dpbench", *words],
        cwd=directory,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_no_module_there_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.json", "b.json"):
        Path(name).write_text(run_of([1e6]))
    for module in TAKEN:
        Path(f"{module}.py").write_text(f"print('executed {module}')")
    for words in (["list"], ["show", "a.json"], ["compare", "a.json", "b.json"]):
        done = dpbench(tmp_path, *words)
        assert done.returncode == 0, done.stderr
        assert "executed" not in done.stdout + done.stderr


@pytest.mark.slow
def test_a_module_there_does_not_shadow_one_of_a_cases_process(tmp_path: Path) -> None:
    for module in ("typing", "ast", "json", "socket", "numpy", "tabulate"):
        (tmp_path / f"{module}.py").write_text("raise SystemExit('executed')")
    run = ["run", "--device=cpu", *SIZE, "--trainer=standard", "--active=1"]
    done = dpbench(tmp_path, *run, "--instrument=logical", "--instrument=timing", interpreter="-P")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
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
