"""Run one case in this process and print one JSON line.

Builds the case, warms up, and runs the active steps. Instruments measure a process that runs this
command; by hand it is the quickest way to try a trainer. The line holds the seconds of each active
step by phase, the peak memory in bytes (CUDA only), and the seconds that building, warm-up and the
rest of the process took.

With --instrument it records what that instrument records in the process of a case. torch_profiler
writes a folder with tables, traces for https://ui.perfetto.dev, a memory snapshot (CUDA only) for
https://docs.pytorch.org/memory_viz and a TensorBoard log. cupti counts further steps after the
timed ones. ncu and nsys only mark ranges, for a profiler that has started this process. With --task
it runs the case that a task file describes: `dpbench run` writes one beside each log.

Examples:
  dpbench step --trainer dpsgd --batch-size 4 --seq-len 32 --model-size tiny --device cpu
  dpbench step --trainer dpsgd_ghost --batch-size 8 --seq-len 256 --model-size 1b
  dpbench step --trainer dpsgd --instrument torch_profiler --profile-schedule active=3
  dpbench step --task ncu_reports/1b-fp32/report_dpsgd_bs8_seq256.timing.task.json
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpbench.child.failures import CaseOutOfMemory, CaseRefused
from dpbench.child.messages import report_result
from dpbench.child.task import Task
from dpbench.commands.case_arguments import add_case, chosen_case
from dpbench.core import gpu
from dpbench.core.case import Case
from dpbench.core.errors import ConfigurationError, DpbenchError, OutOfMemory, own_line
from dpbench.core.option_fields import own_values
from dpbench.core.settings import Settings, declare
from dpbench.instruments import choose, declare_built_in
from dpbench.instruments.logical.logical import Logical
from dpbench.instruments.timing import Timing
from dpbench.instruments.torch_profiler.profile_folder import (
    OPERATORS,
    REPORT,
    own_folder,
    rank_folder,
)
from dpbench.instruments.torch_profiler.profiler import TorchProfiler
from dpbench.launch.case_process import name_of
from dpbench.results.outcome import Outcome
from dpbench.results.rows import Measurement
from dpbench.runner import check_ranks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what this command takes."""
    add_case(parser, device="auto", required=False)
    declare(parser.add_argument, "warmup", "active")
    declare_built_in(parser.add_argument)
    parser.add_argument(
        "--instrument", metavar="NAME", help="record what this instrument does (default timing)"
    )
    parser.add_argument(
        "--task", type=Path, metavar="FILE", help="run the case and instrument of this task file"
    )


ERRORS_FOR_PARENT: dict[type[Exception], type[Exception]] = {
    ConfigurationError: CaseRefused,
    OutOfMemory: CaseOutOfMemory,
}
"""For errors of this process, the errors that the process that started it raises."""


def run(options: argparse.Namespace) -> int:
    """Take the steps, and print their record, or the error."""
    task = Task.read(options.task) if options.task else _chosen(options)
    case, instrument = task.case, task.instrument
    assert isinstance(case, Case)
    try:
        check_ranks(case, [instrument])
        if case.gpus > 1 and not isinstance(instrument, Logical):  # it counts one rank alone
            from dpbench.launch.ranks import on_all_ranks  # which imports torch

            record = on_all_ranks(
                instrument.record_case, case, getattr(instrument, "device", options.device)
            )
        else:
            record = instrument.record_case(case)
        if isinstance(instrument, TorchProfiler):
            _report(case, record, own_folder(instrument.directory / case.file_name))
    except Exception as error:  # the parent reads the reason in the record
        message = str(error)
        if not isinstance(error, DpbenchError):
            first_line = message.partition("\n")[0]  # PyTorch appends its C++ stack
            message = f"{type(error).__name__}: {first_line}{own_line(error.__traceback__)}"
        message = message.removeprefix(f"{case.id}: ")  # the parent adds the case
        kind = next(
            (to for of, to in ERRORS_FOR_PARENT.items() if isinstance(error, of)), type(error)
        )
        report_result(error={"kind": name_of(kind), "message": message})
        raise
    report_result(**record)
    return 0


def _chosen(options: argparse.Namespace) -> Task:
    """The task that the options describe; the default instrument is timing."""
    if options.trainer is None:
        raise ConfigurationError("name a --trainer, or a --task")
    case = chosen_case(options)
    settings = Settings(
        device=options.device,
        warmup=options.warmup,
        active=options.active,
        own=own_values(options),
    )
    name = options.instrument or Timing.name
    [instrument] = choose([name], settings, "case")
    # With --device cuda, the step itself says that there is no GPU.
    elsewhere = options.device == "cpu" or (options.device == "auto" and not gpu.visible_gpus())
    if elsewhere and instrument.needs_gpu:
        raise ConfigurationError(
            f"{name} needs a GPU, and there is none: choose another --instrument"
        )
    return Task(case, instrument)


def _report(case: Case, record: Mapping[str, Any], directory: Path) -> None:
    """Write the report of a case, unless this is one of several ranks that the user started."""
    ranks = record.get("ranks", [record])
    if len(ranks) == case.gpus:
        rows = [
            replace(row, rank=rank)
            for rank, its in enumerate(ranks)
            for row in Outcome.from_json(its["outcome"]).rows
        ]
        first = rank_folder(directory, 0) if len(ranks) > 1 else directory
        write_report(directory, rows, record["schedule"], first)


def write_report(
    directory: Path, rows: Sequence[Measurement], schedule: Mapping[str, int], operators: Path
) -> None:
    """Write the report of a profile.

    Args:
        directory: the folder of the profile.
        rows: the rows of all ranks.
        schedule: the numbers of steps, from the record of the profile.
        operators: the folder that has the tables of operators; of several ranks, the first's.
    """
    from dpbench.show.profile import profile_report  # which imports pandas

    tables = (operators / OPERATORS).read_text(encoding="utf-8")
    (directory / REPORT).write_text(profile_report(rows, schedule, tables), encoding="utf-8")
