"""What a resumed run keeps was measured by the code that is there now, whatever git knows of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dpbench.commands.cli import main
from dpbench.core.registry import TRAINERS

TRAINER = """
import copies
from dpbench import DPSGDTrainer, phase

class Mine(DPSGDTrainer):
    def train_step(self, batch):
        with phase("clip"):
            for parameter in self.model.parameters():
                for _ in range(copies.NUMBER):
                    parameter.detach().clone()
        return super().train_step(batch)
"""
RUN = [
    *("run", "--instrument=logical", "--batch-size=2", "--seq-len=8", "--model-size=99x16x1x2"),
    *("--trainer=standard", "--trainer=resumed_mine:Mine"),
]
RESUME = [*RUN, "--save=cur", "--resume", "--compare=1", "--compare-fail=logical_bytes:1%"]
AGAIN = "measured again, because their code, files or variables have changed"
READS = """
import json, os, subprocess
from dpbench import StandardTrainer

class Reads(StandardTrainer):
    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        with open("config.json") as file:
            self.number = json.load(file)["number"]
        self.number += len(os.environ.get("RESUMED_WIDTH", "")) + len(os.getenv("PYTEST_OF", ""))
        with open("made", "w") as file:
            file.write(str(os.getpid()))
        open("made").close()
        subprocess.run(["touch", "temporary"])  # as a compiler that a library calls
        open("temporary").close()
        os.remove("temporary")

    def train_step(self, batch):
        for _ in range(self.number):
            self.model.parameters().__next__().detach().clone()
        return super().train_step(batch)
"""


def interrupt(path: Path) -> None:
    """Leave a run as a session does that ended before its time."""
    document = json.loads(path.read_text())
    document["session"] |= {"status": "interrupted", "seconds": 7000.0}
    path.write_text(json.dumps(document))


def test_a_part_of_other_code_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(TRAINERS, "_targets", dict(TRAINERS._targets))
    Path("resumed_mine.py").write_text(TRAINER)
    Path("copies.py").write_text("NUMBER = 1\n")
    assert main([*RUN, "--save=ref"]) == 0
    assert main([*RUN, "--save=cur"]) == 0
    cur = Path(".dpbench/cpu-logical/0002_cur.json")
    interrupt(cur)
    assert main(RESUME) == 0
    assert "measured again" not in capsys.readouterr().err
    interrupt(cur)
    Path("copies.py").write_text("NUMBER = 30\n")  # which the trainer's module imports
    assert main(RESUME) == 1
    err = capsys.readouterr().err
    assert f"{AGAIN}: Mine-bs2-seq8-99x16x1x2-fp32\n" in err
    assert "logical_bytes@step of Mine-bs2-seq8-99x16x1x2-fp32: " in err
    assert len(json.loads(cur.read_text())["cases"]) == 2


def test_a_part_that_read_other_files_or_variables_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(TRAINERS, "_targets", dict(TRAINERS._targets))
    Path("resumed_reads.py").write_text(READS)
    Path("config.json").write_text('{"number": 1}')
    monkeypatch.setenv("RESUMED_WIDTH", "secret-of-the-test")
    words = [*RUN[:-2], "--trainer=resumed_reads:Reads", "--save=cur"]
    assert main(words) == 0
    [saved] = Path(".dpbench").rglob("0001_cur.json")
    read = json.loads(saved.read_text())["cases"][0]["imported"]
    own = {name for name in read if str(tmp_path) in name or "$" in name}
    paths = {str(tmp_path / name) for name in ("resumed_reads.py", "config.json")}
    assert own == {*paths, "$RESUMED_WIDTH"}
    assert "secret" not in saved.read_text()

    def is_measured_again() -> bool:
        interrupt(saved)
        assert main([*words, "--resume"]) == 0
        return AGAIN in capsys.readouterr().err

    monkeypatch.setenv("PYTEST_OF", "another worker")  # what test runners set does not count
    assert not is_measured_again()
    monkeypatch.setenv("RESUMED_WIDTH", "other")
    assert is_measured_again()
    Path("config.json").write_text('{"number": 2}')
    assert is_measured_again()
    assert not is_measured_again()
