"""Print tables from a saved run, saved reports or a timeline; needs no GPU.

A run is the number of a saved one (dpbench list shows them) or a JSON file: of
dpbench run --json, of pytest --dpbench-json, or in the storage.
The reports are Nsight Compute's that dpbench made. The case is read off the path,
.../SIZE-PRECISION/report_TRAINER_bsB_seqT.ncu-rep. A timeline is a report of Nsight Systems
(.nsys-rep, which needs nsys) or an SQLite file exported from one: when the GPU worked, and
for which launches it waited.

Examples:
  dpbench show 3
  dpbench show run.json
  dpbench show ncu_reports/1b-fp32/*.ncu-rep
  dpbench show ncu_reports/1b-bf16/report_dpsgd_bs8_seq256.sqlite
  dpbench show ncu_reports/1b-fp32/*.ncu-rep --group-by phase --columns dram_bytes,dram_ratio
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dpbench.case import Case
from dpbench.commands.options import saved_run
from dpbench.errors import ConfigurationError
from dpbench.files import check_is_file
from dpbench.settings import declare

if TYPE_CHECKING:
    from dpbench.results.rows import Measurement
    from dpbench.show.layout import Table


TIMELINES = (".nsys-rep", ".sqlite")
"""Suffixes of what Nsight Systems recorded, and of what was exported from that."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what this command takes."""
    parser.add_argument("files", nargs="+", metavar="NUM|FILE", help="one run, or reports")
    declare(parser.add_argument, "columns", "sort", "group_by", "expect", "storage")


def run(options: argparse.Namespace) -> int:
    """Print the tables; returns the exit code."""
    from dpbench.results.frame import to_frame
    from dpbench.show.export import summary_tables
    from dpbench.show.layout import as_text, terminal_width
    from dpbench.show.tables import tables
    from dpbench.show.view import View

    viewed = partial(View.of, options.columns, options.sort, options.group_by)
    view = viewed(expect=options.expect)
    runs = [name for name in options.files if Path(name).suffix not in (".ncu-rep", *TIMELINES)]
    timelines = [Path(name) for name in options.files if Path(name).suffix in TIMELINES]
    if (runs or timelines) and len(options.files) > 1:
        raise ConfigurationError(
            f"{runs[0]} is a saved run: show it alone; dpbench compare and dpbench report take more"
            if runs
            else f"{timelines[0]} is a timeline: show it alone"
        )
    if timelines:
        shown = _of_timeline(timelines[0])
    elif runs:
        run = saved_run(runs[0], options.storage)
        view = viewed(expect=options.expect, baseline=run.baseline)
        shown = summary_tables(run.outcomes, view)
    else:
        shown = tables(to_frame(_rows(map(Path, options.files))), view)
    if not shown:
        raise ConfigurationError(f"{', '.join(options.files)}: nothing to show")
    print(as_text(shown, terminal_width()))
    return 0


def _of_timeline(path: Path) -> list[Table]:
    from dpbench.instruments.nsys.instrument import timeline_of
    from dpbench.show.profile import whole_timeline

    check_is_file(path)
    return whole_timeline(timeline_of(path), path.stem)


def _rows(reports: Iterable[Path]) -> list[Measurement]:
    from dpbench.instruments.ncu.range_report import case_of, read

    paths: dict[Case, Path] = {}
    for path in reports:
        check_is_file(path)
        other = paths.setdefault(case_of(path), path)
        if other is not path:
            raise ConfigurationError(
                f"{other} and {path} are the same case; show them one at a time"
            )
    return [row for case, path in paths.items() for row in read(path, case)]
