"""Run one case in this process and print one JSON line.

Builds the case, warms up, runs the active steps. This is the process that instruments measure;
by hand it is the quickest way to try a trainer. The line holds seconds by phase for each active
step, peak memory in bytes (CUDA only), and what else the process spent its seconds on.

With --profile it runs under the PyTorch profiler instead, on the steps that the schedule names,
and leaves traces for https://ui.perfetto.dev, tables, a memory snapshot (CUDA only) for
https://docs.pytorch.org/memory_viz and a TensorBoard log in a folder. With --cupti further steps
follow the timed ones, whose hardware counters are read by phase.

Examples:
  dpbench step --trainer dpsgd --batch-size 4 --seq-len 32 --model-size tiny --device cpu
  dpbench step --trainer dpsgd_ghost --batch-size 8 --seq-len 256 --model-size 1b
  dpbench step --trainer dpsgd --model-size small --profile runs/mine --profile-schedule active=3
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dpbench.case import Case
from dpbench.commands.options import add_case, chosen_case
from dpbench.errors import ConfigurationError, DpbenchError, own_line
from dpbench.process.messages import print_record
from dpbench.process.schedule import Schedule, Steps
from dpbench.settings import declare


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what this command takes."""
    add_case(parser)
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="default auto: the GPU if there is one",
    )
    for name in ("warmup", "active"):
        declare(
            parser.add_argument, name, help=f"{name} steps of this process (default %(default)d)"
        )
    parser.add_argument(
        "--nvtx",
        action="store_true",
        help="mark phases as NVTX ranges for a profiler, and take no times",
    )
    parser.add_argument(
        "--cupti",
        nargs="?",
        const="",
        metavar="NAMES",
        help="read hardware counters in this process, after the timed steps: of these metrics or "
        "counters, separated by commas, or of everything",
    )
    parser.add_argument(
        "--profile", type=Path, metavar="DIR", help="run under the PyTorch profiler, output here"
    )
    declare(parser.add_argument, "profile_schedule", "profile_threshold")


def run(options: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from dpbench.gpu import visible_gpus

    case = chosen_case(options)
    steps = Steps(options.warmup, options.active)
    counts = options.cupti is not None
    if options.nvtx and options.profile:
        raise ConfigurationError("--nvtx is for Nsight, which excludes --profile: choose one")
    if counts and (options.nvtx or options.profile):
        raise ConfigurationError("--cupti excludes --nvtx and --profile: choose one")
    # With "cuda", as Nsight is told to run it, the step itself says so.
    elsewhere = options.device == "cpu" or (options.device == "auto" and not visible_gpus())
    if options.nvtx and elsewhere:
        raise ConfigurationError("--nvtx is for Nsight, which sees a GPU's work only: drop it")
    if counts and elsewhere:
        raise ConfigurationError("--cupti reads a GPU's counters, and there is none: drop it")
    try:
        record = _profile(case, options) if options.profile else _measure(case, steps, options)
    except Exception as error:  # whoever started this process learns why from the record
        kind = type(error).__name__
        first_line = str(error).partition("\n")[0]  # PyTorch appends its C++ stack
        if line := own_line(error.__traceback__):
            first_line += f" ({line})"
        message = str(error) if isinstance(error, DpbenchError) else f"{kind}: {first_line}"
        print_record(error={"kind": kind, "message": message})
        raise
    print_record(**record)
    return 0


def _measure(case: Case, steps: Steps, options: argparse.Namespace) -> dict[str, Any]:
    from dpbench.process.step import run_case

    if options.cupti is None:
        return run_case(case, device=options.device, **asdict(steps), nvtx=options.nvtx)
    from dpbench.instruments.cupti.child import count_case

    return count_case(
        case,
        list(filter(None, options.cupti.split(","))) or None,
        device=options.device,
        **asdict(steps),
    )


def _profile(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    from dpbench.instruments.torch_profiler.files import prepare
    from dpbench.process.profiled import profile_case

    schedule = Schedule.parse(options.profile_schedule)
    prepare(options.profile)
    record = profile_case(case, device=options.device, schedule=schedule, directory=options.profile)
    write_profile(case, record, options.profile, options.profile_threshold)
    return record


def write_profile(case: Case, record: dict[str, Any], directory: Path, threshold: float) -> None:
    """Make what a person reads of what the profiler recorded: summary, report, TensorBoard."""
    from dpbench.instruments.torch_profiler.files import REPORT, write_summary
    from dpbench.show.profile import profile_report

    profile = write_summary(case, record, directory)
    report = profile_report(record, profile.rows, profile.launches, profile.operators, threshold)
    (directory / REPORT).write_text(report, encoding="utf-8")
