"""Print tables from saved reports; needs no GPU.

The reports are Nsight Compute's that dpbench made. The case is read off the path,
.../SIZE-PRECISION/report_TRAINER_bsB_seqT.ncu-rep.

Examples:
  dpbench show ncu_reports/1b-fp32/*.ncu-rep
  dpbench show ncu_reports/1b-fp32/*.ncu-rep --group-by phase --columns dram_bytes,dram_ratio
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dpbench.case import Case
from dpbench.commands.options import add_view, chosen_view
from dpbench.errors import ConfigurationError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what this command takes."""
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT.ncu-rep")
    add_view(parser)


def run(options: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from dpbench.instruments.ncu_report_file import case_of, read
    from dpbench.results.frame import to_frame
    from dpbench.results.layout import as_text, terminal_width
    from dpbench.results.tables import tables

    view = chosen_view(options)
    paths: dict[Case, Path] = {}
    for path in options.reports:
        case = case_of(path)
        if case in paths:
            raise ConfigurationError(
                f"{paths[case]} and {path} are the same case; show them one at a time"
            )
        paths[case] = path
    rows = [row for case, path in paths.items() for row in read(path, case)]
    print(as_text(tables(to_frame(rows), view), terminal_width()))
    return 0
