"""Print which kernels move the bytes, from saved reports; needs no GPU.

The reports are those of `dpbench run --kernels` and `pytest --ncu --ncu-kernels`, in each
configuration's folder kernels, or of any program profiled in kernel replay with the same metrics:
what it launched outside dpbench's phases is "outside". Reports in a folder sol (--ncu-set) hold
the Speed of Light of a few kernels.

Examples:
  dpbench kernels ncu_reports/1b-fp32/kernels/report_dpsgd_bs8_seq256.ncu-rep --phase clip
  dpbench kernels ncu_reports/1b-fp32/kernels/*.ncu-rep --top 20 --csv launches.csv
  dpbench kernels ncu_reports/1b-fp32/sol/report_dpsgd_bs8_seq256.ncu-rep
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpbench.case import ALL_PHASES
from dpbench.errors import ConfigurationError
from dpbench.files import check_is_file, check_writable_file
from dpbench.settings import declare
from dpbench.show.view import check_top

if TYPE_CHECKING:
    from dpbench.instruments.ncu.kernel_report import KernelReport
    from dpbench.show.kernels import KernelContext
    from dpbench.show.layout import Table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what this command takes."""
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT.ncu-rep", help="files")
    declare(parser.add_argument, "top")
    parser.add_argument("--phase", choices=ALL_PHASES, help="kernels of this phase only")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write each launch here")


def run(options: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    import pandas as pd

    from dpbench.instruments.ncu.range_report import SPEED_OF_LIGHT
    from dpbench.instruments.ncu.speed_of_light import read_speeds
    from dpbench.show.kernels import speed_table
    from dpbench.show.layout import as_text

    check_top(options.top)
    if options.csv:
        check_writable_file(options.csv)
    found: list[Table] = []
    launches: list[dict[str, Any]] = []
    for path in options.reports:
        check_is_file(path)
        if path.resolve().parent.name == SPEED_OF_LIGHT:
            found += speed_table(read_speeds(path), _title(path))
        else:
            found += _kernels(path, options, launches)
    if options.csv:
        try:
            pd.DataFrame(launches).to_csv(options.csv, index=False)
        except OSError as error:
            raise ConfigurationError(f"{options.csv}: {error.strerror}") from error
    print(as_text(found))
    return 0


def _kernels(
    path: Path, options: argparse.Namespace, launches: list[dict[str, Any]]
) -> list[Table]:
    """The tables of one report; its launches are added to the list."""
    from dpbench.instruments.ncu.kernel_report import read_kernels
    from dpbench.results.kernels import fold
    from dpbench.show.kernels import kernel_tables

    report = read_kernels(path)
    chosen = [launch for launch in report.launches if options.phase in (None, launch.phase)]
    if not chosen:
        present = ", ".join(dict.fromkeys(launch.phase for launch in report.launches))
        raise ConfigurationError(
            f"{path}: no kernel in phase {options.phase!r}; there is {present}"
        )
    launches += [{"report": str(path), **asdict(launch)} for launch in chosen]
    return kernel_tables(fold(chosen), _context(path, report), top=options.top)


def _context(path: Path, report: KernelReport) -> KernelContext:
    """What kernels are compared with: the case's report of ranges, if it lies where it should."""
    from dpbench.instruments.ncu.range_report import KERNELS, case_of, read
    from dpbench.results.cards import known_roofs
    from dpbench.results.kernels import dram_bytes_of_step
    from dpbench.show.kernels import KernelContext

    place = path.resolve().parent
    ranges = place.parent / path.name
    measured = None
    if place.name == KERNELS and ranges.exists():
        measured = dram_bytes_of_step(read(ranges, case_of(ranges)))
    return KernelContext(f"{_title(path)}, {report.device}", measured, known_roofs(report.device))


def _title(path: Path) -> str:
    """The case that a report is of, or the report's own name if dpbench did not make it."""
    from dpbench.instruments.ncu.range_report import ForeignReport, case_of

    try:
        return case_of(path).id
    except ForeignReport:
        return path.name
