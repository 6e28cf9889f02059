"""Print tables from saved runs, saved reports or a timeline, or draw a page; needs no GPU.

A run is the number of a saved one (dpbench list shows them) or a JSON file: of
dpbench run --json, of pytest --dpbench-json, or in the storage. With --html FILE runs become one
HTML page that opens offline: charts, each with its numbers as a table, and every row.

With --roofline the operations and bytes of each phase are held against the roofs of the card that
they were measured on, of a CARD, or of a FILE of bench/ceilings.py. One of the runs must have
counted the operations: dpbench run --instrument logical.

With --time the time of each phase is held against the least time for its arithmetic and for its
bytes, and the part in which the GPU was idle; and of a private step, the time that it takes more
than the standard one. The ceilings are measured ones, of this card or of a FILE, also with --html.

The reports are Nsight Compute's. Of ranges, they are those that dpbench made: the case is read off
the path, .../SIZE-PRECISION/report_TRAINER_bsB_seqT.ncu-rep. Of kernels (in each configuration's
folder kernels, or of any program profiled in kernel replay with the same metrics), they say which
kernels move the bytes; what was launched outside dpbench's phases is "outside".

A timeline is a report of Nsight Systems (.nsys-rep, which needs nsys) or an SQLite file exported
from one: when the GPU worked, and for which launches it waited.

Examples:
  dpbench show 3
  dpbench show run.json other.json --html report.html
  dpbench show run.json counted.json --roofline
  dpbench show counted.json --roofline h200
  dpbench show run.json counted.json --time
  dpbench show ncu_reports/1b-fp32/*.ncu-rep
  dpbench show ncu_reports/1b-fp32/*.ncu-rep --group-by phase --columns dram_bytes,dram_ratio
  dpbench show ncu_reports/1b-fp32/kernels/*.ncu-rep --phase clip --top 20
  dpbench show ncu_reports/1b-fp32/kernels/report_dpsgd_bs8_seq256.ncu-rep --profile runs/CASE
  dpbench show ncu_reports/1b-bf16/report_dpsgd_bs8_seq256.sqlite
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pandas as pd

from dpbench import gpu
from dpbench.case import ALL_PHASES, BASELINE_TRAINER, Case
from dpbench.commands.options import saved_run
from dpbench.errors import ConfigurationError
from dpbench.files import (
    check_distinct_files,
    check_is_file,
    check_writable_file,
    in_words,
    write_text,
)
from dpbench.instruments.ncu import report as ncu
from dpbench.instruments.nsys.instrument import timeline_of
from dpbench.instruments.torch_profiler.files import with_operators
from dpbench.metrics import METRICS
from dpbench.results.frame import to_frame
from dpbench.results.kernels import KernelCount, fold
from dpbench.results.roofline import (
    CARDS,
    Roofs,
    find_card,
    find_ceilings,
    intensities,
    read_ceilings,
    under,
)
from dpbench.results.rows import NO_HARDWARE, identity
from dpbench.results.run import Run
from dpbench.results.times import account
from dpbench.settings import declare
from dpbench.show.export import summary_tables
from dpbench.show.html import check_libraries
from dpbench.show.html.data import Material, labelled
from dpbench.show.kernels import kernel_tables, roofline_tables
from dpbench.show.layout import Table, as_markdown, as_text, terminal_width
from dpbench.show.profile import whole_timeline
from dpbench.show.tables import tables
from dpbench.show.times import time_tables
from dpbench.show.view import View

REPORT = ".ncu-rep"
TIMELINES = (".nsys-rep", ".sqlite")
"""Suffixes of what Nsight Systems recorded, and of what was exported from that."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what this command takes."""
    parser.add_argument("files", nargs="+", metavar="NUM|FILE", help="one run, or reports")
    declare(parser.add_argument, "columns", "sort", "group_by", "expect", "top", "storage")
    parser.add_argument("--phase", choices=ALL_PHASES, help="of kernels, those of this phase only")
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="DIR",
        help="of kernels, the operators as well, by the PyTorch profile of the same case",
    )
    parser.add_argument(
        "--roofline",
        nargs="?",
        const="",
        metavar="CARD|FILE",
        help=f"which roof of a card bounds each phase: {', '.join(CARDS)}, its name in nvidia-smi, "
        "or measured roofs; without a value the card of the rows",
    )
    parser.add_argument(
        "--time",
        nargs="?",
        const="",
        metavar="FILE",
        help="what time is made of: arithmetic, bytes, idleness; by what the card is known to "
        "reach, or by a FILE of bench/ceilings.py",
    )
    declare(parser.add_argument, "markdown", called="--markdown")
    parser.add_argument("--html", type=Path, metavar="FILE", help="draw the runs as a page here")


def run(options: argparse.Namespace) -> int:
    """Print the tables, or write the page; returns the exit code."""
    if options.html:
        check_libraries()
    written = {"--markdown": options.markdown, "--html": options.html}
    written = {option: path for option, path in written.items() if path}
    check_distinct_files({name: Path(name) for name in options.files} | written)
    for path in written.values():
        check_writable_file(path)
    runs = [saved_run(name, options.storage) for name in _names_of_runs(options)]
    with METRICS.including(*(run.metrics for run in runs)):
        return _show(options, runs)


def _names_of_runs(options: argparse.Namespace) -> list[str]:
    """Which of the files are runs, not reports; refused where they share no table."""
    if options.html or options.roofline is not None or options.time is not None:
        return list(options.files)
    others = [name for name in options.files if Path(name).suffix != REPORT]
    if others and len(options.files) > 1:
        raise ConfigurationError(
            f"show {others[0]} alone: only reports of Nsight Compute share tables; dpbench compare "
            f"takes more runs, and so do --html, --roofline and --time"
        )
    return [name for name in others if Path(name).suffix not in TIMELINES]


def _show(options: argparse.Namespace, runs: Sequence[Run]) -> int:
    view = View.of(options)
    if options.html:
        _draw(runs, options, view)
        return 0
    shown = _tables(runs, options, view)
    if not shown:
        raise ConfigurationError(f"{', '.join(options.files)}: nothing to show")
    print(as_text(shown, terminal_width()))
    if options.markdown:
        write_text(options.markdown, as_markdown(shown))
    return 0


def _tables(runs: Sequence[Run], options: argparse.Namespace, view: View) -> list[Table]:
    if options.roofline is not None and options.time is not None:
        raise ConfigurationError("--roofline and --time are two tables: ask for one")
    if options.roofline is not None or options.time is not None:
        return list((_roofline if options.time is None else _times)(runs, options))
    for run in runs:
        return summary_tables(run.outcomes, View.of(options, run.baseline))
    path = Path(options.files[0])
    if path.suffix in TIMELINES:
        check_is_file(path)
        return whole_timeline(timeline_of(path), path.stem)
    return list(_of_reports(map(Path, options.files), view, options))


def _together(runs: Sequence[Run], options: argparse.Namespace) -> pd.DataFrame:
    frame = pd.concat([run.frame for run in runs], ignore_index=True)
    if frame.duplicated(identity()).any():
        names = ", ".join(options.files)
        raise ConfigurationError(f"{names}: the same case is in two of them; name one")
    return frame


def _roofline(runs: Sequence[Run], options: argparse.Namespace) -> Iterator[Table]:
    """The phases of the runs under the roofs of the card that was named, or of their own."""
    frame = _together(runs, options)
    measured_on = sorted(set(frame[frame.instrument != "logical"].device))
    for device, rows in intensities(frame).groupby("device", sort=False):
        card = str(device) if device in measured_on else next(iter(measured_on), None)
        if options.roofline.endswith(".json"):
            roofs = read_ceilings(Path(options.roofline))
        else:
            roofs = find_card(options.roofline or card or _card_here())
        yield from roofline_tables(under(rows, roofs), roofs)


def _times(runs: Sequence[Run], options: argparse.Namespace) -> Iterator[Table]:
    """What the time of the runs' cases is made of, by device."""
    frame = _together(runs, options)
    counted = frame.device == NO_HARDWARE
    if not (timed := frame.metric == "step_time_seconds").any():
        raise ConfigurationError(
            f"{', '.join(options.files)}: no step was timed; dpbench run --instrument cupti times "
            f"steps, counts their bytes and says how busy the GPU was"
        )
    baselines = {run.baseline for run in runs if {*run.devices} - {NO_HARDWARE}}
    if len(baselines) > 1:
        names = " and ".join(sorted(baselines))
        raise ConfigurationError(f"the baselines of these runs are {names}: show them one by one")
    for device in dict.fromkeys(frame[timed].device):
        roofs = _ceilings(options, device)
        times = account(frame[counted | (frame.device == device)], roofs)
        yield from time_tables(times, roofs, *baselines)


def _ceilings(options: argparse.Namespace, device: str) -> Roofs:
    return read_ceilings(Path(options.time)) if options.time else find_ceilings(device)


def _card_here() -> str:
    for card in gpu.visible_gpus():
        return card.name
    raise ConfigurationError(
        f"no CUDA GPU is visible here, so name a card with --roofline: {', '.join(CARDS)}"
    )


def _draw(runs: Sequence[Run], options: argparse.Namespace, view: View) -> None:
    """Write the page of the runs."""
    from dpbench.show.html.page import render  # which needs them

    for baseline in {run.baseline for run in runs} - {BASELINE_TRAINER}:
        view = View.of(options, baseline)  # the usual ranges are of ratios to standard
    for run in runs:
        if not run.outcomes:
            raise ConfigurationError(f"{run.path} holds no case: nothing to draw")
    named = labelled((run.name, run.document) for run in runs)
    ceilings = read_ceilings(Path(options.time)) if options.time else None
    try:
        write_text(options.html, render(Material(named, view.expected, ceilings)))
    except OSError as error:
        raise ConfigurationError(in_words(error)) from error
    print(f"{options.html}: {options.html.stat().st_size / 1e6:.1f} MB")


def _of_reports(
    reports: Iterable[Path], view: View, options: argparse.Namespace
) -> Iterator[Table]:
    """Tables of ranges, all together, then those of each report of kernels."""
    ranges: dict[Case, Path] = {}
    of_kernels: list[Table] = []
    for path in reports:
        if ncu.holds_kernels(path):
            of_kernels += _of_kernels(path, options)
        elif (other := ranges.setdefault(ncu.case_of(path), path)) is not path:
            raise ConfigurationError(
                f"{other} and {path} are the same case; show them one at a time"
            )
    yield from tables(
        to_frame(row for case, path in ranges.items() for row in ncu.read(path, case)), view
    )
    yield from of_kernels


def _of_kernels(path: Path, options: argparse.Namespace) -> list[Table]:
    """Which kernels of a report move the bytes, beside the step's by its ranges if they are known.

    These are in a report that lies where it should, see `dpbench.instruments.ncu`.
    """
    report = ncu.read_kernels(path)
    launches: Sequence[KernelCount] = report.launches
    if options.profile:
        launches = with_operators(options.profile, launches)
    chosen = [launch for launch in launches if options.phase in (None, launch.phase)]
    if not chosen:
        present = ", ".join(dict.fromkeys(launch.phase for launch in launches))
        raise ConfigurationError(
            f"{path}: no kernel in phase {options.phase!r}; there is {present}"
        )
    ranges, rows = path.resolve().parents[1] / path.name, []
    if path.resolve().parent.name == ncu.KERNELS and ranges.exists():
        rows = ncu.read(ranges, ncu.case_of(ranges))
    name = path.name
    with suppress(ncu.ForeignReport):  # dpbench did not make it
        name = ncu.case_of(path).id
    return kernel_tables(fold(chosen), name, report.device, rows, options.top)
