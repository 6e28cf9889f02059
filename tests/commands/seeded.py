"""Repositories with a history of their own, and commands that write a run of what a commit holds.

Each commit has a file ``moved`` with a number. A command puts it into a run that dpbench has made.
"""

from __future__ import annotations

import random
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from dpbench.core.case import Case
from dpbench.results.outcome import COMPLETE, Outcome
from dpbench.results.rows import NO_HARDWARE, STEP, Measurement
from dpbench.results.run import Run

CASE = Case("dpsgd", batch_size=4, seq_len=64, model_size="tiny")
HOLE = 123456789.0
"""The number of a template that the commit's own replaces."""

LIMIT = "peak_memory_bytes:2%"
VARYING = """
import random, sys
from pathlib import Path
template, counter, noise, file = sys.argv[1:]
with open(counter, "a+") as runs:
    runs.write(".")
    runs.seek(0)
    count = len(runs.read())
value = float(Path("moved").read_text()) * random.Random(count).gauss(1, float(noise))
Path(file).write_text(Path(template).read_text().replace("123456789.0", repr(value)))
"""
"""A program that writes what a commit holds with noise that depends on how often it has run."""


def run_of(
    values: Sequence[float],
    *,
    metric: str = "peak_memory_bytes",
    trainers: Sequence[str] = ("dpsgd",),
    versions: dict[str, str] | None = None,
    **session: object,
) -> str:
    """The document of a run with these values, one for each step, of each trainer."""
    timed = metric.endswith("_seconds")
    instrument, device = ("timing", "cpu") if timed else ("logical", NO_HARDWARE)
    outcomes = []
    for trainer in trainers:
        case = CASE.with_trainer(trainer)
        rows = tuple(
            Measurement(case, instrument, STEP, metric, value, "s" if timed else "B", n, device, "")
            for n, value in enumerate(values)
        )
        outcomes.append(Outcome(case, rows, instruments=(instrument,)))
    environment = {"versions": versions or {}}
    return Run.of("made", outcomes, environment, {"status": COMPLETE, **session}).text


class Repository:
    """A repository in a folder, whose commits hold numbers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "project"
        self.folder.mkdir(parents=True)
        self.git("init", "--quiet", "--initial-branch=main")
        self.template = folder / "template.json"
        self.template.write_text(run_of([HOLE]))
        self._marks = 0

    def git(self, *words: str, data: str | None = None) -> str:
        name = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org")
        done = subprocess.run(
            ["git", *name, *words],
            cwd=self.folder,
            input=data,
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout.strip()

    def commit(self, **files: str | None) -> str:
        """Commit files with these texts, or without them, and return the commit."""
        for name, text in files.items():
            path = self.folder / name.replace("__", ".")
            path.unlink() if text is None else path.write_text(text)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message=change it")
        return self.git("rev-parse", "HEAD")

    def commit_all(self, moved: Sequence[float | None]) -> list[str]:
        """Commits of these numbers, without files in the folder; None has no number at all."""
        stream = []
        for place, number in enumerate(moved):
            change = "D moved" if number is None else f"M 100644 inline moved\n{_data(str(number))}"
            who = f"Ada <ada@example.org> {1_700_000_000 + place} +0000"
            stream.append(
                f"commit refs/heads/main\nauthor {who}\ncommitter {who}\n"
                f"{_data(f'Change number {place}')}\n{change}\n"
            )
        self.git("fast-import", "--quiet", data="".join(stream))
        return self.git("rev-list", "--reverse", "main").split()

    @property
    def writes(self) -> list[str]:
        """A command that writes a commit's number, and fails without one."""
        text = f'test -e moved && sed "s/{HOLE}/$(cat moved)/" {shlex.quote(str(self.template))}'
        return ["sh", "-c", f"{text} > '{{json}}.part' && mv '{{json}}.part' '{{json}}'"]

    def varies(self, noise: float) -> list[str]:
        """A command that writes a commit's number with noise of this standard deviation."""
        self.template.write_text(run_of([HOLE], metric="step_time_seconds"))
        program = self.folder.with_name("varying.py")
        program.write_text(VARYING)
        counter = program.with_suffix(".count")
        template = str(self.template)
        return [sys.executable, "-S", str(program), template, str(counter), str(noise), "{json}"]

    @property
    def worktrees(self) -> int:
        return self.git("worktree", "list").count("\n") + 1


def numbers(seed: int, *, commits: int = 100, rise: float = 1.05) -> tuple[list[float], int]:
    """Numbers of a seeded history, which drift by less than 1 %, and the place of the rise."""
    drawn = random.Random(seed)
    bad = drawn.randrange(1, commits + 1)
    level = drawn.uniform(1e6, 1e9)
    moved = [
        level * drawn.uniform(1, 1.004) * (rise if n >= bad else 1) for n in range(commits + 1)
    ]
    return moved, bad


def tried(out: str) -> list[list[str]]:
    """The words of each line about a commit or version."""
    return [line.split() for line in out.splitlines() if " × " in line or " skipped: " in line]


def _data(text: str) -> str:
    return f"data {len(text.encode())}\n{text}"
