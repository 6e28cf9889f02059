"""Find the commit that made a metric worse.

COMMAND must write a run. It is dpbench run or dpbench exec, to which --json is added, or any
command with {json} in place of the run's file. LIMIT is METRIC[@PHASE]:1%, as for dpbench compare.
GOOD and BAD are measured first. Of the numbers that exceed LIMIT in BAD, the one that changed most
is followed. Then the range is halved until the first commit is found in which this number exceeds
LIMIT, compared with GOOD.

COMMAND runs in a temporary git worktree of each commit, without uncommitted files. The worktree and
its folder src are first on PYTHONPATH. A commit is skipped if COMMAND writes no run with the
followed number.

Bytes and operations are taken from one run. Times, powers and shares vary, so COMMAND is repeated
until the 95 % intervals of the means decide whether LIMIT is exceeded, at most --repeat times. The
exit code is 0 if a commit is named. The exit code is 2 if none is named: BAD is not worse than
GOOD, times are ambiguous, or all remaining commits were skipped. The exit code is 1 if GOOD or BAD
cannot be measured.

Examples:
  dpbench bisect logical_bytes:1% v1.0..HEAD -- dpbench exec --instrument logical train.py
  dpbench bisect dram_bytes@clip:1% a1b2c3d..main -- pytest --ncu --dpbench-json={json}
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from shutil import rmtree
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from dpbench.core.case import AXES
from dpbench.core.errors import ConfigurationError, DpbenchError
from dpbench.core.files import printable
from dpbench.core.subject import subject_from
from dpbench.launch import processes
from dpbench.results.changes import largest_changes
from dpbench.results.conditions import git
from dpbench.results.gate import Gate
from dpbench.results.limits import Interval, Limit, mean_interval
from dpbench.results.rows import NUMBER
from dpbench.results.run import Run
from dpbench.show.comparison import amount, grown_text

JSON = "{json}"
"""Placeholder for the run's file in a command."""

VERDICTS = {False: "good", True: "bad", None: "ambiguous"}
"""Words for the verdicts on a trial: True if it exceeds the limit, None if this is undecided."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this command."""
    parser.usage = "dpbench bisect [options] LIMIT GOOD..BAD -- COMMAND …"
    parser.add_argument("limit", metavar="LIMIT", help="METRIC[@PHASE]:1%%")
    parser.add_argument("commits", metavar="GOOD..BAD", help="a range of commits")
    parser.add_argument(
        "--repeat",
        type=int,
        default=10,
        metavar="N",
        help="run each commit at most N times (default %(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    """Measure both ends of the range, and search the range for the first bad commit."""
    limit, command = Limit.parse(options.limit), with_json(options.words)
    with TemporaryDirectory(prefix="dpbench-bisect-", ignore_cleanup_errors=True) as folder:
        return Bisection(limit, command, options.repeat, Path(folder)).run(options.commits)


def with_json(words: Sequence[str]) -> list[str]:
    """Return the command, with ``--json {json}`` added if ``{json}`` is missing.

    ``--json`` can be added only to ``dpbench run`` and ``dpbench exec``.
    """
    if any(JSON in word for word in words):
        return [*words]
    for place, (program, command) in enumerate(pairwise(words), start=2):
        if Path(program).name == "dpbench" and command in ("run", "exec"):
            return [*words[:place], "--json", JSON, *words[place:]]
    raise ConfigurationError(
        "end with -- COMMAND, which is dpbench run, dpbench exec, or any command with {json} in "
        "place of the run's file"
    )


@dataclass
class Trial:
    """A commit, its worktree and runs, and each run's value of the number that is followed."""

    name: str
    tree: Path
    runs: list[Run] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


@dataclass
class Bisection:
    """The search for the first commit at which a number exceeds a limit."""

    limit: Limit
    command: Sequence[str]
    repeats: int
    folder: Path

    def run(self, commits: str) -> int:
        """Print a line for each trial, and name the first bad commit. Return the exit code."""
        first, last = range_ends(commits)
        self.below = git_output("rev-parse", "--show-prefix")
        _say(f"measuring {first:.9} and {last:.9} first")
        with worktree(self.folder, first) as tree, worktree(self.folder, last) as last_tree:
            self.good, bad = Trial(first, tree), Trial(last, last_tree)
            self.number = self._number_to_follow(
                self._run_command(self.good), self._run_command(bad)
            )
            self._update_interval(self.good)
            self._print(self.good, "good")
            if (verdict := self._verdict(bad)) is False:
                raise ConfigurationError(f"BAD does not exceed {self.limit}, compared with GOOD")
            return self._halve(bad) if verdict else 2

    def _halve(self, bad: Trial) -> int:
        passed, skipped = [self.good], set[str]()
        while between := commits_between([trial.name for trial in passed], bad.name):
            if not (left := [name for name in between if name not in skipped]):
                rest = [f"{name}  {describe_commit(name)}" for name in (*between, bad.name)]
                _say(
                    "\n".join(
                        [
                            "\nthe first bad one is one of these; all but the last were skipped:",
                            *rest,
                        ]
                    )
                )
                return 2
            # Neighbours of a skipped commit often fail for the same reason, so each skip looks
            # farther away.
            name = left[(len(between) - len(left)) ** 2 % len(left)]
            try:
                with worktree(self.folder, name) as tree:
                    trial = Trial(name, tree)
                    self._run_command(trial)
                    verdict = self._verdict(trial)
            except DpbenchError as error:
                skipped.add(name)
                _say(f"{name:.9}  skipped: {error}")
                continue
            if verdict is None:
                return 2
            passed, bad = (passed, trial) if verdict else ([*passed, trial], bad)
        _say(f"\nfirst bad: {bad.name}  {describe_commit(bad.name)}")
        _say(f"{self._amount(passed[-1])} -> {self._amount(bad)}")
        changes = largest_changes(passed[-1].runs[0], bad.runs[0], self.case, self.number)
        _say(grown_text([{"largest_changes": changes}]))
        return 0

    def _run_command(self, trial: Trial) -> Run:
        """Run the command once more. Raise `DpbenchError` if the command writes no run."""
        file, tree = self.folder / "run.json", trial.tree
        file.unlink(missing_ok=True)
        words = [word.replace(JSON, str(file)) for word in self.command]
        path = filter(None, [str(tree), str(tree / "src"), os.environ.get("PYTHONPATH")])
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
        code, output = processes.run(words, timeout=None, cwd=tree / self.below, env=environment)
        if not file.exists():
            last_line = output.strip().rpartition("\n")[2]
            raise DpbenchError(f"{trial.name:.9} wrote no run (exit code {code}): {last_line}")
        trial.runs.append(Run.load(file))
        return trial.runs[-1]

    def _number_to_follow(self, good: Run, bad: Run) -> dict[str, Any]:
        """Return the number to follow, as a row with its metric, phase, case and instrument.

        It is the number with the largest relative change among the numbers that exceed the limit in
        ``bad``. If no number exceeds the limit, it is the number with the largest relative change
        of all.
        """
        found = Gate(good, bad).judge([self.limit])
        if not found.judged:
            raise ConfigurationError("; ".join(map(str, found.unjudged)))

        def change(row: Mapping[str, Any]) -> tuple[bool, float]:
            relative = abs(row["relative"])
            return row["regressed"], math.inf if math.isnan(relative) else relative  # was 0

        number: dict[str, Any] = max(reversed(found.judged), key=change)
        self.case = subject_from(number)
        _say(f"following {self.case.id} by {number['instrument']}, limit {self.limit}")
        return number

    def _followed_value(self, run: Run) -> float:
        """Return a run's value of the number that the search follows.

        Raises:
            DpbenchError: the run lacks the number, or the limit cannot be checked.
        """
        found = Gate(self.good.runs[0], run).judge([self.limit])
        for unjudged in found.unjudged:
            if not unjudged.cases or self.case.id in unjudged.cases:
                raise DpbenchError(str(unjudged))
        same = [*AXES, *NUMBER[1:]]
        [row] = [r for r in found.judged if all(r[name] == self.number[name] for name in same)]
        return float(row["after"])

    def _update_interval(self, trial: Trial) -> Interval:
        trial.values += map(self._followed_value, trial.runs[len(trial.values) :])
        return mean_interval(trial.values if self.limit.varies else trial.values[:1] * 2)

    def _verdict(self, trial: Trial) -> bool | None:
        """Return True if a trial's number exceeds the limit, or None if this stays ambiguous.

        While the verdict is ambiguous, the command is repeated, at most ``repeats`` times. At the
        end, the verdict is printed.
        """
        while True:
            (low, high), (least, most) = map(self._update_interval, (trial, self.good))
            verdict = self.limit.exceeded_between((least, most), (low, high))
            if verdict is not None or len(trial.runs) >= self.repeats:
                break
            self._run_command(trial)
            if len(self.good.runs) < len(trial.runs):
                self._run_command(self.good)
        self._print(trial, VERDICTS[verdict])
        if verdict is None:
            ratios = f"× {low / most:.4f} to × {high / least:.4f}"
            _say(f"\nambiguous: {ratios}, limit {self.limit}; allow more runs with --repeat")
        return verdict

    def _print(self, trial: Trial, verdict: str) -> None:
        good, runs = fmean(self.good.values), f" in {len(trial.runs)} runs" * self.limit.varies
        ratio = f"× {fmean(trial.values) / good:.4f}" if good else "-"
        columns = f"{self._amount(trial):>10}  {ratio:>8}  {verdict + runs:<4}"
        _say(f"{trial.name:<9.9}  {columns}  {describe_commit(trial.name)}")

    def _amount(self, trial: Trial) -> str:
        return amount(fmean(trial.values), self.number["unit"], self.number["after"])


def _say(text: str) -> None:
    print(printable(text), flush=True)


# --- commits ----------------------------------------------------------------------------------


def git_output(*words: str, fetches: bool = False) -> str:
    """Run git here, and return its output. Raise an error if git fails."""
    if (output := git(Path(), *words, fetches=fetches)) is None:
        raise ConfigurationError(f"this command failed: git {' '.join(words)}")
    return output.decode(errors="replace").strip()


def range_ends(text: str) -> list[str]:
    """Return the hashes of GOOD and BAD in ``GOOD..BAD``. An end that is left out is HEAD.

    Raise an error if GOOD has a commit that BAD does not contain.
    """
    good, _, bad = text.partition("..")
    output = git(Path(), "rev-list", "--no-walk=unsorted", good or "HEAD", bad or "HEAD")
    hashes = (output or b"").decode().split()
    if len(hashes) != 2 or git_output("rev-list", "-1", f"{hashes[1]}..{hashes[0]}"):
        raise ConfigurationError(
            f"git finds no range {text!r} here: write OLDER..NEWER, two commits of this repository"
        )
    return hashes


def describe_commit(name: str) -> str:
    """Return the author date and the subject of a commit."""
    return git_output("show", "--no-patch", "--date=format:%F %H:%M", "--format=%ad  %s", name)


def commits_between(good: Sequence[str], bad: str) -> list[str]:
    """Return the commits between the ``good`` commits and ``bad``, in the best order to try.

    These commits are the ancestors of ``bad`` that are not in the history of a ``good`` commit.
    """
    lines = git_output("rev-list", "--bisect-all", bad, "--not", *good).splitlines()
    return [commit for commit in (line.split()[0] for line in lines) if commit != bad]


@contextmanager
def worktree(folder: Path, commit: str) -> Iterator[Path]:
    """Make a worktree of a commit in a folder, and remove the worktree afterwards."""
    tree = folder / commit
    try:
        # A partial clone fetches the files of a commit here.
        git_output("worktree", "add", "--detach", str(tree), commit, fetches=True)
        yield tree
    finally:
        rmtree(tree, ignore_errors=True)  # git does not remove an unfinished worktree
        git(Path(), "worktree", "remove", "--force", "--force", str(tree))
