"""List the saved runs.

One line a run: its number, by which the other commands know it, name, device, when, how many
cases came to an end, and whether it is complete. Files that cannot be read are named and
skipped. A run that is marked regressed, or interrupted, is no reference by default.

Examples:
  dpbench list
  dpbench list --storage results/.dpbench
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from dpbench.commands.options import add_storage

if TYPE_CHECKING:
    from dpbench.results.run import Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what this command takes."""
    add_storage(parser)


def run(options: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from dpbench.results.layout import Table
    from dpbench.results.storage import Storage

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
    ok = sum(outcome.error is None for outcome in run.outcomes)
    return [
        number,
        name,
        ", ".join(run.devices) or "-",
        run.started[:16].replace("T", " ") or "-",
        f"{ok}/{len(run.outcomes)}",
        "regressed" if run.regressed else run.status,
    ]
