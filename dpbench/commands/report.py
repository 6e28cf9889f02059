"""Draw saved runs as one HTML page that opens offline.

A run is the number of a saved one (dpbench list shows them) or a JSON file: of
`dpbench run --json`, of `pytest --dpbench-json`, or in the storage. The page shows bytes by
trainer and phase, ratios over the grid, peak memory, a roofline and measured against logical
bytes, each with its numbers as a table, then every row. Several runs share a page; ratios stay
within a run, and a run's name tells cases apart that were measured more than once.

Examples:
  dpbench report run.json -o report.html
  dpbench report 1 2 after.json -o report.html
  dpbench report run.json --with-logical -o report.html
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dpbench.case import BASELINE_TRAINER
from dpbench.commands.options import count_cases, saved_run
from dpbench.errors import ConfigurationError
from dpbench.files import check_writable_file
from dpbench.metrics import expectations
from dpbench.settings import declare


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what this command takes."""
    parser.add_argument("runs", nargs="+", metavar="NUM|FILE", help="saved runs")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="the page (default report.html)",
    )
    parser.add_argument(
        "--with-logical",
        action="store_true",
        help="count the same cases without hardware, seconds each, for the charts that need it",
    )
    declare(parser.add_argument, "expect", "storage")


def run(options: argparse.Namespace) -> int:
    """Write the page; returns the exit code."""
    from dpbench.show.html import check_libraries

    check_libraries()
    from dpbench.results.conditions import environment
    from dpbench.results.outcome import document
    from dpbench.show.html.data import cases_without_logical, labelled
    from dpbench.show.html.page import write_html

    expected = expectations(options.expect)
    runs = [saved_run(name, options.storage) for name in options.runs]
    if any(run.baseline != BASELINE_TRAINER for run in runs):  # the usual ones are to that
        expected = expectations([*options.expect, "none"])
    for run in runs:
        if not run.outcomes:
            raise ConfigurationError(f"{run.path} holds no case: nothing to draw")
    sources = labelled((run.name, run.document) for run in runs)
    check_writable_file(options.output)
    if options.with_logical and (cases := cases_without_logical(sources)):
        counted = document(count_cases(cases), environment())
        sources += labelled([("counted for this page", counted)])
    try:
        write_html(options.output, sources, expected)
    except OSError as error:
        raise ConfigurationError(f"{error.filename}: {error.strerror}") from error
    print(f"{options.output}: {options.output.stat().st_size / 1e6:.1f} MB")
    return 0
