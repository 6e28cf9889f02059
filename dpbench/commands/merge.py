"""Join runs of one measurement: shards of a grid, or what several machines have measured.

A run is the number of a saved one (dpbench list shows them) or a file written by --json. Runs of
other GPU models, versions, code or settings are refused, and so are two that have measured the
same case; machines whose CPU or driver differ are named. The exit code is 1 if a shard is missing,
or a case failed.

Examples:
  dpbench run --grid grid1 --shard 1/2 --json shard1.json
  dpbench run --grid grid1 --shard 2/2 --json shard2.json
  dpbench merge shard1.json shard2.json --output grid1.json --output grid1.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dpbench.commands.case_arguments import saved_run
from dpbench.commands.shards import joined
from dpbench.core.files import printable
from dpbench.core.metrics import METRICS
from dpbench.core.settings import Settings, declare
from dpbench.results.outcome import COMPLETE
from dpbench.results.rows import NO_HARDWARE
from dpbench.results.run import Run
from dpbench.results.storage import Storage
from dpbench.show.export import summary_tables
from dpbench.show.layout import as_text, terminal_width
from dpbench.show.outputs import write_output
from dpbench.show.view import TableOptions

WRITTEN = ("output", "json", "markdown", "csv", "html", "save", "storage")
"""The options that say what is written of the run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what this command takes."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="numbers or files")
    declare(parser.add_argument, *WRITTEN)


def run(options: argparse.Namespace) -> int:
    """Join the runs, show and write the result."""
    settings = Settings.read(options)
    settings.check()  # before anything is done
    return finish([saved_run(name, options.storage) for name in options.runs], settings, "merge")


def finish(
    runs: Sequence[Run], settings: Settings, command: str, problems: Sequence[str] = ()
) -> int:
    """Join runs, show and write the result; the exit status is 1 if it lacks a part."""
    with METRICS.including(*(run.metrics for run in runs)):
        merged, notes = joined(runs)
        view = TableOptions(baseline=merged.baseline)
        merged = merged.with_derived()
        for kind, path in settings.files.values():
            write_output(kind, path, [merged], view)
        if settings.save is not None:
            device = next((name for name in merged.devices if name != NO_HARDWARE), None)
            storage = Storage(settings.storage)
            notes.append(f"saved {storage.allocate(settings.save, device, merged.text)}")
        for note in (*problems, *notes):
            print(printable(f"dpbench {command}: {note}"), file=sys.stderr)
        text = as_text(summary_tables(merged, view), terminal_width())
        print(text, file=settings.tables_to)
    failed = any(outcome.error for outcome in merged.outcomes)
    return int(bool(problems) or failed or merged.status != COMPLETE)
