"""Merge runs of one measurement: shards of a grid, or parts from several machines.

A run is a file that --json wrote, or the number or name of a saved run, as dpbench list shows them.
Runs are refused if they differ in GPU model, versions, code or settings, or if two runs measured
the same case with the same instrument. Differences in CPUs and drivers are allowed and printed. The
exit code is 1 if a shard or a case is missing, or if a case failed.

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
from dpbench.commands.shards import merge_runs
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

OUTPUT_OPTIONS = ("output", "json", "markdown", "csv", "html", "save", "storage")
"""Options for the files of the merged run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this command."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="numbers, names or files")
    declare(parser.add_argument, *OUTPUT_OPTIONS)


def run(options: argparse.Namespace) -> int:
    """Merge the runs, then print and write the merged run."""
    settings = Settings.read(options)
    settings.check()
    return finish([saved_run(name, options.storage) for name in options.runs], settings, "merge")


def finish(
    runs: Sequence[Run], settings: Settings, command: str, problems: Sequence[str] = ()
) -> int:
    """Merge runs, then print and write the merged run.

    Args:
        runs: the runs to merge.
        settings: the settings with the files to write.
        command: the command's name, for messages.
        problems: messages about missing parts that are already known.

    Returns:
        The exit code: 1 if a part is missing or a case failed.
    """
    with METRICS.including(*(run.metrics for run in runs)):
        merged, notes = merge_runs(runs)
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
        print(as_text(summary_tables(merged, view), terminal_width()))
    failed = any(outcome.error for outcome in merged.outcomes)
    return int(bool(problems) or failed or merged.status != COMPLETE)
