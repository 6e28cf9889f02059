"""What a resumed run keeps was measured by the code that is there now, whatever git knows of it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from dpbench.commands.cli import main
from dpbench.core.registry import TRAINERS

TRAINER = """
import json, os, subprocess
import copies
from dpbench import StandardTrainer

class Mine(StandardTrainer):
    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        with open("config.json") as file:
            self.number = json.load(file)["number"] + copies.NUMBER
        self.number += len(os.environ.get("RESUMED_WIDTH", "")) + len(os.getenv("PYTEST_OF", ""))
        with open("made", "w") as file:
            file.write(str(os.getpid()))
        open("made").close()
        subprocess.run(["touch", "temporary"])  # as a compiler that a library calls
        open("temporary").close()
        os.remove("temporary")

    def train_step(self, batch):
        for _ in range(self.number):
            next(self.model.parameters()).detach().clone()
        return super().train_step(batch)
"""
RUN = [
    *("run", "--instrument=logical", "--batch-size=2", "--seq-len=8", "--model-size=99x16x1x2"),
    "--trainer=resumed_mine:Mine",
]
RESUME = [*RUN, "--save=cur", "--resume", "--compare=1", "--compare-fail=logical_bytes:1%"]
AGAIN = "measured again, because their code, files or variables have changed"


@pytest.mark.slow
def test_a_part_of_other_code_files_or_variables_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(TRAINERS, "_targets", dict(TRAINERS._targets))
    monkeypatch.setenv("RESUMED_WIDTH", "secret-of-the-test")
    Path("resumed_mine.py").write_text(TRAINER)
    Path("copies.py").write_text("NUMBER = 1\n")
    Path("config.json").write_text('{"number": 1}')
    assert main([*RUN, "--save=ref"]) == 0
    [reference] = Path(".dpbench").rglob("0001_ref.json")
    read = json.loads(reference.read_text())["cases"][0]["imported"]
    own = {name for name in read if str(tmp_path) in name or "$" in name}
    paths = {str(tmp_path / name) for name in ("resumed_mine.py", "copies.py", "config.json")}
    assert own == {*paths, "$RESUMED_WIDTH"}
    assert "secret" not in reference.read_text()
    current = reference.with_name("0002_cur.json")
    shutil.copy(reference, current)

    def resume() -> tuple[int, bool]:
        """Resume as after a session that ended before its time."""
        document = json.loads(current.read_text())
        document["session"] |= {"status": "interrupted", "seconds": 7000.0}
        current.write_text(json.dumps(document))
        code = main(RESUME)
        return code, f"{AGAIN}: Mine-bs2-seq8-99x16x1x2-fp32\n" in capsys.readouterr().err

    monkeypatch.setenv("PYTEST_OF", "another worker")  # what test runners set does not count
    assert resume() == (0, False)
    Path("config.json").write_text('{"number": 2}')
    Path("copies.py").write_text("NUMBER = 0\n")  # which the trainer's module imports
    assert resume() == (0, True)
    Path("copies.py").write_text("NUMBER = 30\n")
    assert resume() == (1, True)
    monkeypatch.setenv("RESUMED_WIDTH", "other")
    assert resume() == (1, True)
    assert resume() == (1, False)
