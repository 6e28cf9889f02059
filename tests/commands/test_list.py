"""``dpbench list`` reads of each run only what it shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dpbench.commands.cli import main
from dpbench.results.storage import Storage

GRID1 = Path(__file__).parents[1] / "data/saved/grid1.json"


def test_it_loads_no_pandas_and_no_torch(tmp_path: Path) -> None:
    Storage(tmp_path).allocate("before", "NVIDIA H200", GRID1.read_text())
    script = (
        "import sys; from dpbench.commands.cli import main; main(sys.argv[1:]); "
        "print({'pandas', 'torch', 'numpy'} & sys.modules.keys())"
    )
    command = [sys.executable, "-c", script, "list", "--storage", str(tmp_path)]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert shown.splitlines()[-1] == "set()"
    [line] = [line for line in shown.splitlines() if "before" in line]
    assert "NVIDIA H200" in line
    assert "16/16" in line


def test_what_a_terminal_would_obey_is_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    signs = [r"\u001b", r"\u202E", "\u2066", "\x9b"]
    text = GRID1.read_text().replace('"NVIDIA H200"', rf'"NVIDIA {"".join(signs)}[31mH200"')
    path = Storage(tmp_path).allocate("before", "NVIDIA H200", text)
    for command in (["list", "--storage", str(tmp_path)], ["show", str(path)]):
        assert main(command) == 0
        shown = capsys.readouterr().out
        assert "NVIDIA " + len(signs) * "\N{REPLACEMENT CHARACTER}" + "[31mH200" in shown


def test_a_run_that_was_cut_off_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Storage(tmp_path).allocate("cut", "NVIDIA H200", GRID1.read_text()[:-200])
    assert main(["list", "--storage", str(tmp_path)]) == 0
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"dpbench list: skipped: run file {path} cannot be read: ")
