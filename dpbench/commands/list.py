"""List the saved runs.

One line a run: its number, by which the other commands know it, name, device, when, how many of
the cases that were asked for succeeded, and whether it is complete: a session that still writes it
is running, one that ended before its time was interrupted. Files that cannot be read are named and
skipped. A run that is marked regressed, or interrupted, is no reference by default.

Examples:
  dpbench list
  dpbench list --storage results/.dpbench
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from dpbench.options import add_storage

if TYPE_CHECKING:
    from dpbench.results.run import Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what this command takes."""
    add_storage(parser.add_argument)


def run(options: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from dpbench.results.storage import Storage
    from dpbench.show.layout import Table

    listing = Storage(options.storage).listing()
    for line in listing.skipped:
        print(f"dpbench list: {line}", file=sys.stderr)
    headers = ["number", "name", "device", "started (UTC)", "cases ok", "status"]
    table = Table(f"Runs in {options.storage}", headers, [_cells(run) for run in listing.runs])
    # One line a run, however long its name, so that other programs can read it.
    print(table.as_text(width=1000) if listing.runs else f"no runs in {options.storage}")
    return 0


def _cells(run: Run) -> list[str]:
    number, _, name = run.name.partition("_")
    cases = {outcome.case for outcome in run.outcomes}
    failed = {outcome.case for outcome in run.outcomes if outcome.error}
    return [
        number,
        name,
        ", ".join(run.devices) or "-",
        run.started[:16].replace("T", " ") or "-",
        f"{len(cases - failed)}/{max(len(cases), run.cases_asked)}",
        _status(run),
    ]


def _status(run: Run) -> str:
    from dpbench.results.outcome import INTERRUPTED
    from dpbench.results.storage import is_being_written

    if run.status == INTERRUPTED:
        return "running" if is_being_written(run.path) else INTERRUPTED
    return ("regressed" if run.regressed else run.status) + (", updated" if run.updates else "")
