"""List the saved runs.

Each run has a line with its number, which other commands take, its name, device and date, the
number of requested cases that succeeded, and its status. The status is running while a session
writes the run, and interrupted if the session ended early. Unreadable files are named and skipped.
A run is regressed if a limit was exceeded, and unjudged if a limit could not be checked for all
cases. A run with one of these statuses is a reference only if you name it.

Examples:
  dpbench list
  dpbench list --storage results/.dpbench
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dpbench.core.case import AXES
from dpbench.core.files import printable
from dpbench.core.settings import declare
from dpbench.results.outcome import INTERRUPTED
from dpbench.results.run import Run
from dpbench.results.storage import Storage, is_being_written
from dpbench.show.layout import Table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this command."""
    declare(parser.add_argument, "storage")


def run(options: argparse.Namespace) -> int:
    """Print a line for each saved run."""
    storage = Storage(options.storage)
    runs, skipped = storage.listing()
    for line in skipped:
        print(printable(f"dpbench list: {line}"), file=sys.stderr)
    headers = ["number", "name", "device", "started (UTC)", "cases ok", "status"]
    table = Table(f"Runs in {options.storage}", headers, list(map(_cells, runs)))
    # Lines are not wrapped, so that other programs can read them.
    print(table.as_text(width=1000) if runs else f"no runs in {options.storage}")
    return 0


def _cells(run: Run) -> list[str]:
    number, _, name = run.name.partition("_")
    axes = [(tuple(map(c.get, AXES)), c.get("error")) for c in run.document.get("cases", ())]
    requested, failed = {case for case, _ in axes}, {case for case, error in axes if error}
    return [
        number,
        name,
        ", ".join(run.devices) or "-",
        str(run.session.get("started", ""))[:16].replace("T", " ") or "-",
        f"{len(requested - failed)}/{max(len(requested), run.cases_asked)}",
        _status(run),
    ]


def _status(run: Run) -> str:
    if run.status == INTERRUPTED and is_being_written(run.path):
        return "running"
    return run.verdict


def saved_run(name: str, storage: Path) -> Run:
    """Return a run by its path, or by the number or name that ``dpbench list`` shows."""
    return Run.load(Storage(storage).find(name))
