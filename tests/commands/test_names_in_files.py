"""A file that a command reads names no code that Python imports or calls."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dpbench.commands.cli import main
from dpbench.core import registry
from dpbench.core.registry import NAMED
from dpbench.results.schema import parsed
from tests.commands.seeded import run_of

COMMANDS = (
    ["advise", "run.json"],
    ["show", "run.json", "--output=run.html"],
    ["compare", "run.json", "run.json", "--fail=peak_memory_bytes:1%"],
    ["merge", "run.json", "--output=run.md"],
    ["history", "peak_memory_bytes", "--storage=saved"],
    ["list", "--storage=saved"],
)
SHELL = "subprocess:Popen"


@pytest.fixture(autouse=True)
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that code makes which a run names. The code lies in the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for known in (*NAMED.values(), registry.INSTRUMENTS):
        monkeypatch.setattr(known, "_targets", dict(known._targets))
    made = tmp_path / "ran"
    Path("named_by_a_file.py").write_text(f"open({str(made)!r}, 'w')\nclass X: pass\n")
    return made


@pytest.mark.parametrize(
    ("axis", "named"),
    [
        pytest.param("model", "named_by_a_file:X", marks=pytest.mark.slow),
        ("workload", f"{SHELL}:args=touch ran,shell=true"),
        pytest.param("workload", "short=named_by_a_file:X", marks=pytest.mark.slow),
        ("trainer", "named_by_a_file:X"),
        pytest.param("optimizer", "named_by_a_file:X", marks=pytest.mark.slow),
        ("optimizer", "torch.hub:load:repo_or_dir=.,source=local"),
        ("set", f"workload={SHELL}"),
    ],
)
def test_a_name_in_a_saved_run_is_neither_imported_nor_called(
    axis: str, named: str, marker: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = parsed(run_of([1e6, 1e6], trainers=["standard", "dpsgd"]).encode())
    for row in document["rows"] + document["cases"]:
        if axis == "workload":
            row |= {"seq_len": 0, "model_size": "", "model": "", "attention": ""}
        if axis != "trainer" or row["trainer"] == "dpsgd":
            row[axis] = named
    document["session"]["grid"] = {axis: [named], "baseline": "standard"}
    saved = Path("saved/cpu-logical/0001_run.json")
    saved.parent.mkdir(parents=True)
    for file in (Path("run.json"), saved):
        file.write_text(json.dumps(document))
    registered = {kind: dict(known._targets) for kind, known in NAMED.items()}
    for words in COMMANDS if axis != "trainer" else COMMANDS[1:]:
        main(words)
        assert "Traceback" not in capsys.readouterr().err, words
    assert not marker.exists()
    assert "named_by_a_file" not in sys.modules
    assert {kind: dict(known._targets) for kind, known in NAMED.items()} == registered


@pytest.mark.slow
@pytest.mark.usefixtures("counted_here")
def test_advice_leaves_out_a_trainer_that_only_the_run_knows(
    marker: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = parsed(run_of([1e6], trainers=["dpsgd", "named_by_a_file:X"]).encode())
    Path("run.json").write_text(json.dumps(document))
    assert main(["advise", "run.json", "--gpu=h100"]) == 0
    captured = capsys.readouterr()
    assert "unknown trainer 'named_by_a_file:X'" in captured.err
    assert "\ndpsgd " in captured.out
    assert not marker.exists()
