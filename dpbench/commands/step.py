"""Run one case in this process and print one JSON line.

step builds the case, warms up, and runs the active steps. Instruments measure a process that runs
this command. The command is also the quickest way to try a trainer by hand. The JSON line has the
seconds of each active step by phase, the peak memory in bytes (CUDA only), and the seconds that
building, warming up and the remaining work took.

With --instrument, step records what that instrument records in the process of a case.
torch_profiler writes a folder with tables, traces for https://ui.perfetto.dev, a memory snapshot
(CUDA only) for https://docs.pytorch.org/memory_viz, and a TensorBoard log. cupti counts bytes in
further steps after the timed steps. ncu and nsys only mark ranges, for a profiler that has started
this process. With --task, step runs the case of a task file, which dpbench run writes next to each
log.

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

from dpbench.child.imported import listen
from dpbench.child.messages import report
from dpbench.child.task import Task
from dpbench.commands.case_arguments import add_case, chosen_case
from dpbench.core import gpu
from dpbench.core.case import Case
from dpbench.core.errors import (
    ConfigurationError,
    as_instrument_error,
)
from dpbench.core.settings import Settings, declare, own_values
from dpbench.instruments import choose, declare_built_in
from dpbench.instruments.timing import Timing
from dpbench.instruments.torch_profiler.profile_folder import (
    OPERATORS,
    REPORT,
    own_folder,
    rank_folder,
)
from dpbench.instruments.torch_profiler.profiler import TorchProfiler
from dpbench.results.outcome import Outcome
from dpbench.results.rows import Measurement
from dpbench.runner import check_ranks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this command."""
    add_case(parser, device="auto", required=False)
    declare(parser.add_argument, "warmup", "active")
    declare_built_in(parser.add_argument)
    parser.add_argument(
        "--instrument", metavar="NAME", help="record with this instrument (default timing)"
    )
    parser.add_argument(
        "--task",
        type=Path,
        metavar="FILE",
        help="run the case with the instrument of this task file",
    )


def run(options: argparse.Namespace) -> int:
    """Take the steps, and report their outcome."""
    task = Task.read(options.task) if options.task else _task(options)
    if options.task:  # another process reads the outcome, and this process ends with the case
        listen()
    case, instrument = task.case, task.instrument
    assert isinstance(case, Case)
    try:
        check_ranks(case, [instrument])
        if case.gpus > 1 and instrument.hardware:  # without hardware, one rank is counted here
            from dpbench.launch.ranks import on_all_ranks  # imports torch

            device = getattr(instrument, "device", options.device)
            outcomes = on_all_ranks(instrument.record_case, case, device)
            outcome = Outcome.of_ranks(outcomes) if len(outcomes) > 1 else outcomes[0]
        else:
            outcome = instrument.record_case(case)
        if isinstance(instrument, TorchProfiler):
            _report(outcome, own_folder(instrument.directory / case.file_name))
    except Exception as error:  # the parent reads the error from the outcome
        failed = Outcome.failed(case, as_instrument_error(error))
        # The parent adds the case's id.
        report(replace(failed, message=failed.message.removeprefix(f"{case.id}: ")))
        raise
    report(outcome)
    return 0


def _task(options: argparse.Namespace) -> Task:
    """Return the task that the options describe. The default instrument is timing."""
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
    # With --device cuda, the step itself reports a missing GPU.
    on_cpu = options.device == "cpu" or (options.device == "auto" and not gpu.visible_gpus())
    if on_cpu and instrument.needs_gpu:
        raise ConfigurationError(
            f"{name} needs a GPU, but the case runs on the CPU: choose another --instrument"
        )
    return Task(case, instrument)


def _report(outcome: Outcome, directory: Path) -> None:
    """Write the report of a profiled case, unless the user started this process as a rank."""
    ranks = len(outcome.details.get("ranks", [outcome]))
    if ranks == outcome.case.gpus:
        first = rank_folder(directory, 0) if ranks > 1 else directory
        write_report(directory, outcome.rows, outcome.details["schedule"], first)


def write_report(
    directory: Path, rows: Sequence[Measurement], schedule: Mapping[str, int], operators: Path
) -> None:
    """Write the report of a profile.

    Args:
        directory: the folder of the profile.
        rows: the rows of all ranks.
        schedule: the numbers of steps, from the record of the profile.
        operators: the folder with the tables of operators. With several ranks, it is the folder of
            rank 0.
    """
    from dpbench.show.profile import profile_report  # imports pandas

    tables = (operators / OPERATORS).read_text(encoding="utf-8")
    (directory / REPORT).write_text(profile_report(rows, schedule, tables), encoding="utf-8")
