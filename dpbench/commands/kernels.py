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

from dpbench.case import ALL_PHASES
from dpbench.errors import ConfigurationError
from dpbench.files import check_is_file, check_writable_file
from dpbench.settings import declare
from dpbench.show.view import check_top


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what this command takes."""
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT.ncu-rep", help="files")
    declare(parser.add_argument, "top")
    parser.add_argument("--phase", choices=ALL_PHASES, help="kernels of this phase only")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write each launch here")


def run(options: argparse.Namespace) -> int:
    """Print the tables and write the launches; returns the exit code."""
    import pandas as pd

    from dpbench.instruments.ncu.kernel_report import read_kernels
    from dpbench.instruments.ncu.range_report import SPEED_OF_LIGHT
    from dpbench.instruments.ncu.speed_of_light import read_speeds
    from dpbench.results.kernels import fold
    from dpbench.results.roofline import known_roofs
    from dpbench.show.kernels import kernel_tables, speed_table
    from dpbench.show.layout import as_text

    check_top(options.top)
    if options.csv:
        check_writable_file(options.csv)
    tables, launches = [], []
    for path in options.reports:
        check_is_file(path)
        if path.resolve().parent.name == SPEED_OF_LIGHT:
            tables += speed_table(read_speeds(path), _title(path))
            continue
        report = read_kernels(path)
        chosen = [launch for launch in report.launches if options.phase in (None, launch.phase)]
        if not chosen:
            present = ", ".join(dict.fromkeys(launch.phase for launch in report.launches))
            raise ConfigurationError(
                f"{path}: no kernel in phase {options.phase!r}; there is {present}"
            )
        launches += [{"report": str(path), **asdict(launch)} for launch in chosen]
        title, roofs = f"{_title(path)}, {report.device}", known_roofs(report.device)
        tables += kernel_tables(fold(chosen), title, _step_bytes(path), roofs, top=options.top)
    if options.csv:
        try:
            pd.DataFrame(launches).to_csv(options.csv, index=False)
        except OSError as error:
            raise ConfigurationError(f"{options.csv}: {error.strerror}") from error
    print(as_text(tables))
    return 0


def _step_bytes(path: Path) -> float | None:
    """DRAM bytes of the case's step by its report of ranges, if that lies where it should."""
    from dpbench.instruments.ncu.range_report import KERNELS, case_of, read
    from dpbench.results.kernels import dram_bytes_of_step

    ranges = path.resolve().parents[1] / path.name
    if path.resolve().parent.name != KERNELS or not ranges.exists():
        return None
    return dram_bytes_of_step(read(ranges, case_of(ranges)))


def _title(path: Path) -> str:
    """The case that a report is of, or the report's own name if dpbench did not make it."""
    from dpbench.instruments.ncu.range_report import ForeignReport, case_of

    try:
        return case_of(path).id
    except ForeignReport:
        return path.name
