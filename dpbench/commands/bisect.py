"""Find the commit that made a metric worse.

COMMAND writes a run. It is dpbench run or dpbench exec, to which --json is added, or any command
with {json} in place of the run's file. LIMIT is METRIC[@PHASE]:1%, as for dpbench compare. GOOD and
BAD are measured first. The number that grew most from GOOD to BAD is followed: the range is halved
until the first commit is found where that number exceeds LIMIT, compared with GOOD.

COMMAND runs in a temporary git worktree of each commit. The worktree and its folder src are first
on PYTHONPATH. Uncommitted files are missing there. A commit that writes no run with that number is
skipped.

Bytes and operations are taken from one run. Times, powers and shares vary: COMMAND is repeated
until the 95 % intervals of the means decide whether LIMIT is exceeded, at most --repeat times. The
exit status is 0 if a commit is named. It is 2 if none is: BAD is not worse than GOOD,
times are ambiguous, or only skipped ones are left. It is 1 if GOOD or BAD cannot be measured.

Examples:
  dpbench bisect logical_bytes:1% v1.0..HEAD -- dpbench exec --instrument logical train.py
  dpbench bisect dram_bytes@clip:1% a1b2c3d..main -- pytest --ncu --dpbench-json={json}
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from dpbench.commands.candidates import Commits, Place
from dpbench.core.case import AXES
from dpbench.core.errors import ConfigurationError, DpbenchError
from dpbench.core.files import printable
from dpbench.core.subject import subject_from
from dpbench.launch import processes
from dpbench.results.changes import largest_changes
from dpbench.results.compare import Interval, Threshold, mean_interval
from dpbench.results.gate import Gate
from dpbench.results.rows import NUMBER
from dpbench.results.run import Run
from dpbench.show.comparison import amount, grown_text

JSON = "{json}"
"""What stands for the run's file in a command."""

VERDICTS = {False: "good", True: "bad", None: "ambiguous"}
"""What it is called whether the limit is exceeded."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what this command takes."""
    parser.usage = "dpbench bisect [options] LIMIT GOOD..BAD -- COMMAND …"
    parser.add_argument("limit", metavar="LIMIT", help="METRIC[@PHASE]:1%%")
    parser.add_argument("commits", metavar="GOOD..BAD", help="a range of commits")
    parser.add_argument(
        "--repeat", type=int, default=10, metavar="N", help="at most N runs of each (10)"
    )


def run(options: argparse.Namespace) -> int:
    """Measure both ends, and halve the range between them until one is left."""
    limit, command = Threshold.parse(options.limit), with_json(options.words)
    with TemporaryDirectory(prefix="dpbench-bisect-", ignore_cleanup_errors=True) as folder:
        among = Commits(options.commits, Path(folder))
        return Bisection(among, limit, command, options.repeat, Path(folder) / "run.json").run()


def with_json(words: Sequence[str]) -> list[str]:
    """The command with ``{json}``, which ``dpbench run`` and ``dpbench exec`` need not have."""
    if any(JSON in word for word in words):
        return [*words]
    for place, (program, command) in enumerate(pairwise(words), start=2):
        if Path(program).name == "dpbench" and command in ("run", "exec"):
            return [*words[:place], "--json", JSON, *words[place:]]
    raise ConfigurationError("end with -- COMMAND: dpbench run or exec, or with {json} for a run")


@dataclass
class Trial:
    """A commit, its runs, and the number of each."""

    name: str
    place: Place
    runs: list[Run] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


@dataclass
class Bisection:
    """The search for the first commit that exceeds a limit against the good end."""

    among: Commits
    limit: Threshold
    command: Sequence[str]
    repeats: int
    file: Path

    def run(self) -> int:
        """Print a line for each that is tried, and the first bad one; returns the exit code."""
        first, last = self.among.good, self.among.bad
        _say(f"measuring {first:.9} and {last:.9} first")
        with self.among.place(first) as place, self.among.place(last) as last_place:
            self.good, bad = Trial(first, place), Trial(last, last_place)
            self.number = self._largest(self._run(self.good), self._run(bad))
            self._interval(self.good)
            self._print(self.good, "good")
            if (verdict := self._judged(bad)) is False:
                raise ConfigurationError(f"{self.limit} is not exceeded: there is nothing to find")
            return self._halve(bad) if verdict else 2

    def _halve(self, bad: Trial) -> int:
        passed, skipped = [self.good], set[str]()
        while between := self.among.between([trial.name for trial in passed], bad.name):
            if not (left := [name for name in between if name not in skipped]):
                rest = [f"{name}  {self.among.about(name)}" for name in (*between, bad.name)]
                _say("\n".join(["\nthe others are skipped; the first bad one is of these:", *rest]))
                return 2
            # What is beside a skipped one often fails as it does: look farther away each time.
            name = left[(len(between) - len(left)) ** 2 % len(left)]
            try:
                with self.among.place(name) as place:
                    trial = Trial(name, place)
                    self._run(trial)
                    verdict = self._judged(trial)
            except DpbenchError as error:
                skipped.add(name)
                _say(f"{name:.9}  skipped: {error}")
                continue
            if verdict is None:
                return 2
            passed, bad = (passed, trial) if verdict else ([*passed, trial], bad)
        _say(f"\nfirst bad: {bad.name}  {self.among.about(bad.name)}")
        _say(f"{self._amount(passed[-1])} -> {self._amount(bad)}")
        changes = largest_changes(passed[-1].runs[0], bad.runs[0], self.case, self.number)
        _say(grown_text([{"largest_changes": changes}]))
        return 0

    def _run(self, trial: Trial) -> Run:
        """Run the command once more; `DpbenchError` if it writes no run."""
        self.file.unlink(missing_ok=True)
        words = [word.replace(JSON, str(self.file)) for word in self.command]
        directory, imports = trial.place
        path = filter(None, [*map(str, imports), os.environ.get("PYTHONPATH")])
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
        code, said = processes.run(words, timeout=None, cwd=directory, env=environment)
        if not self.file.exists():
            last = said.strip().rpartition("\n")[2]
            raise DpbenchError(f"{trial.name:.9} wrote no run (status {code}): {last}")
        trial.runs.append(Run.load(self.file))
        return trial.runs[-1]

    def _largest(self, good: Run, bad: Run) -> dict[str, Any]:
        """The number that changed most, of those that exceed the limit if any does."""
        verdict = Gate(good, bad).judge([self.limit])
        if verdict.judged.empty:
            raise ConfigurationError("; ".join(map(str, verdict.unjudged)))
        change = verdict.judged.relative.astype(float).abs().fillna(math.inf)  # from 0
        judged = verdict.judged.assign(most=change).sort_values(["regressed", "most"])
        number = judged.to_dict("records")[-1]
        self.case = subject_from(number)
        _say(f"{self.limit} of {self.case.id} by {number['instrument']}")
        return {str(name): value for name, value in number.items()}

    def _value(self, run: Run) -> float:
        """The number in a run; `DpbenchError` if it lacks it, or cannot be judged by it."""
        verdict = Gate(self.good.runs[0], run).judge([self.limit])
        for unjudged in verdict.unjudged:
            if not unjudged.cases or self.case.id in unjudged.cases:
                raise DpbenchError(str(unjudged))
        values = verdict.judged.set_index(keys := [*AXES, *NUMBER[1:]]).after.to_dict()
        return float(values[tuple(self.number[name] for name in keys)])

    def _interval(self, trial: Trial) -> Interval:
        trial.values += map(self._value, trial.runs[len(trial.values) :])
        return mean_interval(trial.values if self.limit.varies else trial.values[:1] * 2)

    def _judged(self, trial: Trial) -> bool | None:
        """Whether one exceeds the limit, printed; repeats the command while that is ambiguous."""
        while True:
            (low, high), (least, most) = map(self._interval, (trial, self.good))
            verdict = self.limit.exceeded_between((least, most), (low, high))
            if verdict is not None or len(trial.runs) >= self.repeats:
                break
            self._run(trial)
            if len(self.good.runs) < len(trial.runs):
                self._run(self.good)
        self._print(trial, VERDICTS[verdict])
        if verdict is None:
            ratios = f"× {low / most:.4f} to × {high / least:.4f}"
            _say(f"\nambiguous: {ratios}, limit {self.limit}; allow more runs by --repeat")
        return verdict

    def _print(self, trial: Trial, said: str) -> None:
        good, runs = fmean(self.good.values), f" in {len(trial.runs)} runs" * self.limit.varies
        ratio = f"× {fmean(trial.values) / good:.4f}" if good else "-"
        columns = f"{self._amount(trial):>10}  {ratio:>8}  {said + runs:<4}"
        _say(f"{trial.name:<9.9}  {columns}  {self.among.about(trial.name)}")

    def _amount(self, trial: Trial) -> str:
        return amount(fmean(trial.values), self.number["unit"], self.number["after"])


def _say(text: str) -> None:
    print(printable(text), flush=True)
