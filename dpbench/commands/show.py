"""Print tables of saved runs, reports or timelines, or draw a page, without a GPU.

A run is a JSON file (of dpbench run --json, of pytest --dpbench-json, or in the storage), or the
number or name of a saved run, as dpbench list shows them. --html FILE draws runs as one HTML page
that opens offline. The page has charts, the numbers of each chart as a table, and every row.
--output FILE writes the format that the file's ending names: .html for that page, .md for the
tables, .csv for the rows, .json for the run.

--roofline compares the operations and bytes of each phase with the roofs of a card. The card is the
measured one, a named CARD, or a FILE of measured roofs. One of the runs must have counted the
operations, with dpbench run --instrument logical.

--time compares the time of each phase with the least time for its arithmetic and for its bytes, and
shows how long the GPU was idle. For a private step, it also shows the time beyond that of the
standard step. The ceilings are measured: the known ceilings of the card, or those of a FILE, which
--html uses too.

A report is a file of Nsight Compute. dpbench makes reports of ranges. Their case is read from the
JSON file next to the report, and without that file a report is named by its path. Reports of
kernels show which kernels move the bytes. They are in the folder kernels of each configuration, or
come from any program that was profiled in kernel replay with the same metrics. Kernels that were
launched in no phase of dpbench are "outside".

A timeline is a report of Nsight Systems (.nsys-rep, which needs nsys), or an SQLite file exported
from such a report. Its tables show how busy the GPU was in each phase, and the statistics of nsys
if nsys is on PATH.

Examples:
  dpbench show 3
  dpbench show run.json other.json --html report.html
  dpbench show 3 --output run.csv --output run.html
  dpbench show run.json counted.json --roofline
  dpbench show counted.json --roofline h200
  dpbench show run.json counted.json --time
  dpbench show ncu_reports/1b-fp32/*.ncu-rep
  dpbench show ncu_reports/1b-fp32/*.ncu-rep --group-by phase --columns dram_bytes,dram_ratio
  dpbench show ncu_reports/1b-fp32/kernels/*.ncu-rep --phase clip --top 20
  dpbench show ncu_reports/1b-bf16/report_dpsgd_bs8_seq256.sqlite
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pandas as pd

from dpbench.commands.list import saved_run
from dpbench.core import gpu
from dpbench.core.case import ALL_PHASES, BASELINE_TRAINER
from dpbench.core.errors import ConfigurationError
from dpbench.core.files import check_distinct_files, check_is_file, is_file, write_text
from dpbench.core.metrics import METRICS
from dpbench.core.registry import OUTPUTS
from dpbench.core.settings import Settings, declare
from dpbench.core.subject import Subject
from dpbench.instruments.ncu import report as ncu
from dpbench.instruments.nsys.nsys import timeline_of
from dpbench.results.kernels import KernelCount, fold, kernel_rows
from dpbench.results.outcome import Outcome
from dpbench.results.roofline import (
    CARDS,
    apply_roofs,
    find_card,
    find_ceilings,
    intensities,
    known_roofs,
    read_ceilings,
    time_breakdown,
)
from dpbench.results.rows import NO_HARDWARE, NUMBER, Measurement
from dpbench.results.run import Run
from dpbench.results.summary import own_values
from dpbench.show.layout import Table, as_markdown, as_text, terminal_width
from dpbench.show.outputs import summary_tables, write_output
from dpbench.show.profile import kernel_tables, timeline_tables
from dpbench.show.roofline import roofline_tables, time_tables
from dpbench.show.tables import tables
from dpbench.show.view import TableOptions

COMMON = ("--columns", "--sort", "--phase", "--roofline", "--time", "--output", "--html")
"""Options in the short help."""

REPORT = ".ncu-rep"
TIMELINES = (".nsys-rep", ".sqlite")
"""Suffixes of reports of Nsight Systems, and of SQLite files exported from such reports."""
RECORDED = (REPORT, *TIMELINES)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this command."""
    parser.add_argument("files", nargs="+", metavar="NUM|FILE", help="runs, reports or timelines")
    declare(parser.add_argument, "columns", "sort", "group_by", "expect", "top", "storage")
    parser.add_argument("--phase", choices=ALL_PHASES, help="show the kernels of this phase only")
    parser.add_argument(
        "--roofline",
        nargs="?",
        const="",
        metavar="CARD|FILE",
        help=f"show which roof of a card bounds each phase: {', '.join(CARDS)}, a name as in "
        "nvidia-smi, or a file of measured roofs (default: the measured card)",
    )
    parser.add_argument(
        "--time",
        nargs="?",
        const="",
        metavar="FILE",
        help="show how time divides into arithmetic, bytes and idling, with the known ceilings of "
        "the card or those of a FILE",
    )
    declare(parser.add_argument, "output", "markdown", "html")


def run(options: argparse.Namespace) -> int:
    """Print the tables, write the outputs, or both. Return the exit code."""
    settings = Settings.read(options)
    settings.check()
    read = {name: Path(name) for name in options.files}
    check_distinct_files(read | {name: path for name, (_, path) in settings.files.items()})
    files = settings.files.values()
    others = [(kind, path) for kind, path in files if kind != "md"]
    for kind, _ in others:
        OUTPUTS[kind]  # raises an error if a needed package is not installed
    together = options.roofline is not None or options.time is not None
    names = [name for name in options.files if together or Path(name).suffix not in RECORDED]
    runs = [saved_run(name, options.storage) for name in names]
    paths = [Path(name) for name in options.files if name not in names]
    if others and (recorded := [path for path in paths if path.suffix == REPORT]):
        runs.append(_run_from_reports(recorded))
    if others and (timelines := [str(path) for path in paths if path.suffix in TIMELINES]):
        raise ConfigurationError(f"{', '.join(timelines)}: a timeline can only be shown as tables")
    with METRICS.including(*(run.metrics for run in runs)):
        view = _view(options, runs)
        for kind, path in others:
            write_output(kind, path, runs, view)
            print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
        if len(others) == len(files) > 0:
            return 0
        if not (shown := list(_tables(runs, options, view))):
            raise ConfigurationError(f"{', '.join(options.files)}: nothing to show")
        print(as_text(shown, terminal_width()))
        for kind, path in files:
            if kind == "md":
                write_text(path, as_markdown(shown))
        return 0


def _view(options: argparse.Namespace, runs: Sequence[Run]) -> TableOptions:
    """Return the requested view.

    If the baseline is not the standard trainer, there are no default ranges of expected ratios.
    """
    baselines = {run.baseline for run in runs} - {BASELINE_TRAINER}
    ceilings = read_ceilings(Path(options.time)) if options.time else None
    return replace(TableOptions.of(options, *sorted(baselines)[:1]), ceilings=ceilings)


def _tables(
    runs: Sequence[Run], options: argparse.Namespace, view: TableOptions
) -> Iterator[Table]:
    """Return the tables that --roofline or --time requests, else all tables of the named files."""
    if options.roofline is not None and options.time is not None:
        raise ConfigurationError("--roofline and --time show different tables: choose one of them")
    if options.roofline is not None:
        return _roofline(runs, options)
    if options.time is not None:
        return _times(runs, options, view)
    paths = [Path(name) for name in options.files]
    return chain(
        *(summary_tables(run, _view(options, [run])) for run in runs),
        *(_timeline(path) for path in paths if path.suffix in TIMELINES),
        _report_tables([path for path in paths if path.suffix == REPORT], view, options),
    )


def _timeline(path: Path) -> list[Table]:
    check_is_file(path)
    timeline, statistics = timeline_of(path)
    title = f"{path.stem}, {timeline.device}, {timeline.tool}"
    return timeline_tables(timeline.usages(), statistics, title)


def _joined_summary(runs: Sequence[Run], options: argparse.Namespace) -> pd.DataFrame:
    summary = pd.concat([run.summary for run in runs], ignore_index=True)
    if own_values(summary).duplicated(NUMBER).any():
        names = ", ".join(options.files)
        raise ConfigurationError(
            f"{names}: two of the runs have the same case; leave out one of them"
        )
    return summary


def _roofline(runs: Sequence[Run], options: argparse.Namespace) -> Iterator[Table]:
    """Yield tables that compare phases with the roofs of a card.

    A roof is the largest rate at which a card moves bytes or computes. The option --roofline names
    a card, or a file with roofs. By default, the card is the measured card, else a GPU of this
    machine.
    """
    summary = _joined_summary(runs, options)
    measured_on = sorted(set(summary[summary.device != NO_HARDWARE].device))
    for device, rows in intensities(summary).groupby("device", sort=False):
        card = str(device) if device in measured_on else next(iter(measured_on), None)
        named, file = known_roofs(options.roofline), Path(options.roofline)
        if not named and (file.suffix == ".json" or is_file(file)):
            roofs = read_ceilings(file)
        else:
            roofs = find_card(options.roofline or card or _card_here())
        yield from roofline_tables(apply_roofs(rows, roofs), roofs)


def _times(runs: Sequence[Run], options: argparse.Namespace, view: TableOptions) -> Iterator[Table]:
    """Yield tables of how steps divide into arithmetic, bytes and idling, for each device."""
    summary = _joined_summary(runs, options)
    counted = summary.device == NO_HARDWARE
    if not (timed := summary.metric == "step_time_seconds").any():
        raise ConfigurationError(
            f"{', '.join(options.files)}: no step was timed; dpbench run --instrument cupti times "
            f"steps, counts their bytes and records how busy the GPU was"
        )
    baselines = {run.baseline for run in runs if {*run.devices} - {NO_HARDWARE}}
    if len(baselines) > 1:
        names = " and ".join(sorted(baselines))
        raise ConfigurationError(
            f"the baselines of these runs are {names}: show the runs one at a time"
        )
    for device in dict.fromkeys(summary[timed].device):
        roofs = view.ceilings or find_ceilings(device)
        times = time_breakdown(summary[counted | (summary.device == device)], roofs)
        yield from time_tables(times, roofs, *baselines)


def _card_here() -> str:
    for card in gpu.visible_gpus():
        return card.name
    raise ConfigurationError(
        f"this machine has no CUDA GPU, so name a card with --roofline: {', '.join(CARDS)}"
    )


def _report_tables(
    reports: Sequence[Path], view: TableOptions, options: argparse.Namespace
) -> Iterator[Table]:
    """Yield the tables of all ranges, then the tables of each case's kernels."""
    run = _run_from_reports(reports, options.phase)
    if not all(map(ncu.holds_kernels, reports)):
        yield from tables(run.summary, view)
    for outcome in run.outcomes:
        yield from kernel_tables(outcome, run.summary, options.top)


def _run_from_reports(reports: Sequence[Path], phase: str | None = None) -> Run:
    """Join reports into one run, with the ranges, and the kernels of ``phase`` or of all phases.

    If the folder above a report of kernels has a report of ranges of the same name, both are read
    (see `dpbench.instruments.ncu`).
    """
    outcomes: dict[Subject, Outcome] = {}
    read = [(path, ncu.case_of(path)) for path in reports]
    named = [path.resolve() for path in reports]
    for path, (_, case) in zip(named, read[:], strict=True):
        above = path.parent.parent / path.name
        if path.parent.name == ncu.KERNELS and above.exists() and above not in named:
            read.append((above, case))
    for path, case in read:
        known = outcomes.setdefault(case, Outcome(case, ()))
        by, rows, kernels = _read_report(path, case, phase)
        if by in known.instruments:
            raise ConfigurationError(
                f"{path} and another report have the same case: show the reports one at a time"
            )
        outcomes[case] = replace(
            known,
            rows=(*known.rows, *rows),
            kernels=(*known.kernels, *kernels),
            instruments=(*known.instruments, by),
        )
    return Run.of(", ".join(path.stem for path in reports), outcomes.values())


def _read_report(
    path: Path, case: Subject, phase: str | None
) -> tuple[str, Sequence[Measurement], Sequence[KernelCount]]:
    """Return a report's instrument, its rows, and its kernels in ``phase`` or in all phases."""
    check_is_file(path)
    if not ncu.holds_kernels(path):
        return "ncu", [*ncu.read(path, case)], ()
    report = ncu.read_kernels(path)
    chosen = [launch for launch in report.launches if phase in (None, launch.phase)]
    if not chosen:
        present = ", ".join(dict.fromkeys(launch.phase for launch in report.launches))
        raise ConfigurationError(f"{path}: no kernel in phase {phase!r}, only in {present}")
    by, tool = "ncu_kernels", path.name
    rows = kernel_rows(case, by, chosen, report.device, tool, whole=phase is None)
    return by, rows, fold(chosen)
