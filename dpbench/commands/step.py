"""Run one case in this process and print one JSON line.

Builds the case, warms up, runs the active steps. This is the process that instruments measure;
by hand it is the quickest way to try a trainer. The line holds seconds by phase for each active
step, peak memory in bytes (CUDA only), and what else the process spent its seconds on.

With --profile it runs under the PyTorch profiler instead, on the steps that the schedule names,
and leaves traces for https://ui.perfetto.dev, tables, a memory snapshot (CUDA only) for
https://docs.pytorch.org/memory_viz and a TensorBoard log in a folder. With --cupti or --nsys
further steps follow the timed ones, which are counted or recorded by phase.

Examples:
  dpbench step --trainer dpsgd --batch-size 4 --seq-len 32 --model-size tiny --device cpu
  dpbench step --trainer dpsgd_ghost --batch-size 8 --seq-len 256 --model-size 1b
  dpbench step --trainer dpsgd --model-size small --profile runs/mine --profile-schedule active=3
"""

from __future__ import annotations

import argparse
import faulthandler
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dpbench import gpu
from dpbench.case import Case
from dpbench.commands.options import add_case, chosen_case
from dpbench.errors import ConfigurationError, DpbenchError, own_line
from dpbench.instruments import choose
from dpbench.instruments.recorder import Recorder
from dpbench.instruments.timing import TimingRecorder
from dpbench.instruments.torch_profiler.files import REPORT, write_summary
from dpbench.options import own_values
from dpbench.process.messages import Schedule, Steps, print_record
from dpbench.settings import Settings, declare


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what this command takes."""
    add_case(parser, device="auto")
    declare(parser.add_argument, "warmup", "active", "profile_schedule", "profile_threshold")
    for name, help in (
        ("nvtx", "mark phases as NVTX ranges for a profiler, and take no times"),
        ("nsys", "under nsys profile: record some steps after the timed ones"),
        ("logical", "count a step on tensors without data instead"),
    ):
        parser.add_argument(f"--{name}", action="store_true", help=help)
    parser.add_argument(
        "--cupti",
        nargs="?",
        const="",
        metavar="NAMES",
        help="read hardware counters in this process, after the timed steps: of these metrics or "
        "counters, separated by commas, or of everything",
    )
    parser.add_argument(
        "--instrument", metavar="NAME", help="record the steps as this instrument does"
    )
    parser.add_argument(
        "--profile", type=Path, metavar="DIR", help="run under the PyTorch profiler, output here"
    )


WAYS = ("nvtx", "cupti", "nsys", "logical", "profile", "instrument")
"""The options that exclude each other: each is a way to observe the steps."""


def run(options: argparse.Namespace) -> int:
    """Take the steps, and print their record, or the error."""
    case = chosen_case(options)
    steps = Steps(options.warmup, options.active)
    ways = [way for way in WAYS if getattr(options, way) not in (None, False)]
    if len(ways) > 1:
        raise ConfigurationError(f"--{ways[0]} excludes --{ways[1]}: choose one")
    # With --device cuda, as instruments start it, the step itself reports a missing GPU.
    elsewhere = options.device == "cpu" or (options.device == "auto" and not gpu.visible_gpus())
    if elsewhere and ways and ways[0] in ("nvtx", "cupti", "nsys"):
        raise ConfigurationError(f"--{ways[0]} needs a GPU, and there is none: drop it")
    try:
        record = _observed(case, steps, options)
    except Exception as error:  # the record tells the parent process why
        kind = type(error).__name__
        first_line = str(error).partition("\n")[0]  # PyTorch appends its C++ stack
        first_line += own_line(error.__traceback__)
        message = str(error) if isinstance(error, DpbenchError) else f"{kind}: {first_line}"
        message = message.removeprefix(f"{case.id}: ")  # the parent adds it
        print_record(error={"kind": kind, "message": message})
        raise
    print_record(**record)
    return 0


def _observed(case: Case, steps: Steps, options: argparse.Namespace) -> dict[str, Any]:
    """The record of a case, observed as the options say."""
    if options.logical:
        from dpbench.instruments.logical.instrument import Logical

        faulthandler.enable(2)  # what crashes in here is in the log, with its line
        return Logical().count(case).as_json()
    from dpbench.process.step import run_case

    recorder = _recorder(case, steps.active, options)
    if options.profile:
        schedule = Schedule.parse(options.profile_schedule)
        steps = Steps(schedule.steps - schedule.active, schedule.active)
    record = run_case(case, recorder, device=options.device, **asdict(steps))
    if options.profile:
        write_profile(case, record, options.profile, options.profile_threshold)
    return record


def _recorder(case: Case, steps: int, options: argparse.Namespace) -> Recorder:
    """The recorder that the options choose."""
    if options.instrument:
        settings = Settings(own=own_values(options))
        recorder = choose([options.instrument], settings, "step")[0].recorder(case, steps)
        recorder.wanted = recorder.wanted or steps  # where it would record all that there are
        return recorder
    if options.profile:
        from dpbench.instruments.torch_profiler.recorder import ScheduledRecorder

        return ScheduledRecorder(options.profile, Schedule.parse(options.profile_schedule))
    if options.nvtx:
        from dpbench.instruments.ncu.recorder import NvtxRecorder

        return NvtxRecorder(steps)
    if options.nsys:
        from dpbench.instruments.nsys.recorder import NsysRecorder

        return NsysRecorder(steps)
    if options.cupti is not None:
        from dpbench.instruments.cupti.recorder import CuptiRecorder

        names = list(filter(None, options.cupti.split(","))) or None
        return CuptiRecorder(steps, names, alike=True)
    return TimingRecorder(steps)


def write_profile(case: Case, record: dict[str, Any], directory: Path, threshold: float) -> None:
    """Write the summary, the report and the TensorBoard log of a profile."""
    from dpbench.show.profile import profile_report  # which imports pandas

    profile = write_summary(case, record, directory)
    report = profile_report(record, profile.rows, profile.launches, profile.operators, threshold)
    (directory / REPORT).write_text(report, encoding="utf-8")
