"""List one number over saved runs, and mark where it changed.

Each case has a table with a line for each run that has METRIC. A line shows the value, and the
change since the last line that is marked as changed, or else since the first line. A change of
bytes or operations above the --tolerance is marked as changed. A change of a time is marked as
changed if it exceeds the --tolerance for all steps of both runs, and as ambiguous if it does so for
only some steps. Notes below a table list the differences between runs: versions, machine, settings.

With --commits, the runs are read from --file: at the first commit of a range, and at each commit
that changes the file.

Examples:
  dpbench history
  dpbench history logical_bytes@clip --tolerance 1%
  dpbench history logical_bytes --commits v1.0..HEAD --file bytes.json
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from dpbench.commands.bisect import describe_commit, git_output, range_ends
from dpbench.core.case import AXES
from dpbench.core.errors import ConfigurationError
from dpbench.core.files import printable
from dpbench.core.metrics import METRICS
from dpbench.core.settings import declare
from dpbench.core.subject import subject_from
from dpbench.results.conditions import differing_conditions
from dpbench.results.gate import clock_notes, limited
from dpbench.results.limits import Limit
from dpbench.results.rows import NUMBER
from dpbench.results.run import Run
from dpbench.results.storage import Storage, readable
from dpbench.show.comparison import amount
from dpbench.show.layout import ABSENT, Table

DEFAULT_METRICS = ("dram_bytes", "logical_bytes", "step_time_seconds")
"""Candidates for the default metric. The default is the first candidate that a run contains."""

VERDICTS = {False: ABSENT, True: "changed", None: "ambiguous"}

HEADERS = ["number", "name", "date", "commit", "value", "change", "verdict"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this command."""
    parser.add_argument(
        "metric",
        nargs="?",
        metavar="METRIC[@PHASE]",
        help="default: the first of dram_bytes, logical_bytes and step_time_seconds that a run has",
    )
    declare(parser.add_argument, "storage")
    largest = "the largest change to ignore: 1%%, 0.1GB, 1%%+0.1GB (default %(default)s)"
    parser.add_argument("--tolerance", default="0.5%", metavar="LIMIT", help=largest)
    parser.add_argument(
        "--commits", metavar="GOOD..BAD", help="the range of commits in which --file is read"
    )
    parser.add_argument("--file", type=Path, metavar="PATH", help="the committed file with a run")


def run(options: argparse.Namespace) -> int:
    """Print a table for each case, device and instrument."""
    if bool(options.commits) != bool(options.file):
        raise ConfigurationError(
            "--commits needs --file, and --file needs --commits: name both or neither"
        )
    skipped, where = list[str](), options.file or options.storage
    entries = [*(_committed(options, skipped) if options.commits else _saved(options, skipped))]
    for line in skipped:
        print(printable(f"dpbench history: {line}"), file=sys.stderr)
    with METRICS.including(*(run.metrics for run, _ in entries)):
        numbers = [limited(run).assign(run=place) for place, (run, _) in enumerate(entries)]
        rows = pd.concat(numbers or [limited(Run.of(""))]).dropna(subset="value")
        metric = next(
            (name for name in DEFAULT_METRICS if name in {*rows.metric}), DEFAULT_METRICS[0]
        )
        limit = Limit.parse(f"{options.metric or metric}:±{options.tolerance}")
        rows = rows[(rows.metric == limit.metric) & (rows.phase == limit.phase)]
        groups = rows.groupby([*AXES, *NUMBER[1:]], sort=False)
        tables = [_table(entries, group.to_dict("records"), limit) for _, group in groups]
    if not tables:
        number = f"{where} has no {limit.metric}@{limit.phase}"
        raise ConfigurationError(number if entries else f"no runs in {where}")
    # Lines are not wrapped, so that other programs can read them.
    print("\n\n".join(table.as_text(width=1000) for table in tables))
    return 0


def _saved(options: argparse.Namespace, skipped: list[str]) -> Iterator[tuple[Run, list[str]]]:
    """Yield the saved runs in the order of their numbers, with the first cells of their lines."""
    for run in readable(Storage(options.storage).paths(), Run.load, skipped):
        number, _, name = run.name.partition("_")
        yield run, [number, name, str(run.session.get("started", ""))[:16].replace("T", " ")]


def _committed(options: argparse.Namespace, skipped: list[str]) -> Iterator[tuple[Run, list[str]]]:
    """Yield a file's run at the first commit of a range, and at each commit that changes it."""
    good, bad = range_ends(options.commits)
    path = f"./{os.path.relpath(options.file)}"
    changing = git_output("log", "--reverse", "--format=%H", f"{good}..{bad}", "--", path).split()

    def load(commit: Path) -> Run:
        # Unlike `git show`, this command converts the file with no program.
        return Run.parse(git_output("cat-file", "blob", f"{commit}:{path}").encode(), commit)

    commits = [good] * bool(git_output("ls-tree", good, path)) + changing
    for run in readable(map(Path, commits), load, skipped):
        date, _, subject = describe_commit(run.name).partition("  ")
        yield run, [run.name[:9], subject, date]


def _table(entries: Sequence[tuple[Run, list[str]]], rows: list[Any], limit: Limit) -> Table:
    """Make the table of one case, device and instrument, with notes on differences between runs."""
    cells, notes = list[list[str]](), list[str]()
    level, before, most = rows[0], entries[rows[0]["run"]][0], max(row["value"] for row in rows)
    for row in rows:
        run, labels = entries[row["run"]]
        verdict = _verdict(limit, *((each["value"], each["spread"]) for each in (level, row)))
        change = f"{row['value'] / level['value'] - 1:+.2%}" if level["value"] else ABSENT
        commit = ((run.environment.get("code") or {}).get("commit") or ABSENT)[:9]
        value = amount(row["value"], row["unit"], most)
        cells.append([*labels, commit, value, change, VERDICTS[verdict]])
        differ = [each for each in differing_conditions(before, run) if each[:7] != "commit "]
        differ += clock_notes(level, row)
        if differ or verdict is not False:
            notes.append(f"{labels[0]}: {'; '.join(differ) or 'same software, machine, options'}")
        level, before = row if verdict else level, run
    number = f"{subject_from(level).id}: {limit.written.partition(':')[0]}"
    return Table(f"{number}, {level['instrument']} on {level['device']}", HEADERS, cells, (*notes,))


def _verdict(limit: Limit, *pair: tuple[float, float]) -> bool | None:
    """Return True if a number changed by more than a limit, or None if its spread leaves that open.

    Args:
        limit: the limit.
        pair: the numbers before and after, each as a value and its relative spread over steps.
    """
    exact = [(value, value) for value, _ in pair]
    steps = [(value * (1 - spread / 2), value * (1 + spread / 2)) for value, spread in pair]
    return limit.exceeded_between(*exact) and (not limit.varies or limit.exceeded_between(*steps))
