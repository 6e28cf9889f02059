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
from dpbench.errors import ConfigurationError, DpbenchError, OutOfMemory, own_line
from dpbench.instruments import choose
from dpbench.instruments.base import CaseOutOfMemory, CaseRefused
from dpbench.instruments.child import name_of
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
        ("nsys", "under nsys profile: have some steps recorded after the timed ones"),
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
        "--instrument", metavar="NAME", help="have the recorder of this instrument hear the steps"
    )
    parser.add_argument(
        "--profile", type=Path, metavar="DIR", help="run under the PyTorch profiler, output here"
    )


WAYS = ("nvtx", "cupti", "nsys", "logical", "profile", "instrument")
"""The options of which each is a way to observe the steps."""


MEANT: dict[type[Exception], type[Exception]] = {
    ConfigurationError: CaseRefused,
    OutOfMemory: CaseOutOfMemory,
}
"""What errors of this process are to the one that started it, if not what they are here."""


def run(options: argparse.Namespace) -> int:
    """Take the steps, and print what was observed, or why not."""
    case = chosen_case(options)
    steps = Steps(options.warmup, options.active)
    ways = [way for way in WAYS if getattr(options, way) not in (None, False)]
    if len(ways) > 1:
        raise ConfigurationError(f"--{ways[0]} excludes --{ways[1]}: choose one")
    # With "cuda", as Nsight is told to run it, the step itself says so.
    elsewhere = options.device == "cpu" or (options.device == "auto" and not gpu.visible_gpus())
    if elsewhere and ways and ways[0] in ("nvtx", "cupti", "nsys"):
        raise ConfigurationError(f"--{ways[0]} is about a GPU's work, and there is none: drop it")
    try:
        record = _observed(case, steps, options)
    except Exception as error:  # whoever started this process learns why from the record
        message = str(error)
        if not isinstance(error, DpbenchError):
            first_line = message.partition("\n")[0]  # PyTorch appends its C++ stack
            message = f"{type(error).__name__}: {first_line}{own_line(error.__traceback__)}"
        message = message.removeprefix(f"{case.id}: ")  # the parent says whose it is
        kind = next((to for of, to in MEANT.items() if isinstance(error, of)), type(error))
        print_record(error={"kind": name_of(kind), "message": message})
        raise
    print_record(**record)
    return 0


def _observed(case: Case, steps: Steps, options: argparse.Namespace) -> dict[str, Any]:
    """The record of a case, observed in the way that was asked for."""
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
    """What hears the steps, in the way that was asked for."""
    if options.instrument:
        settings = Settings(own=own_values(options))
        recorder = choose([options.instrument], settings, "step")[0].recorder(case, steps)
        recorder.wanted = recorder.wanted or steps  # an end, if it wants all that there are
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
    """Make what a person reads of what the profiler recorded: summary, report, TensorBoard."""
    from dpbench.show.profile import profile_report  # which imports pandas

    profile = write_summary(case, record, directory)
    report = profile_report(record, profile.rows, profile.launches, profile.operators, threshold)
    (directory / REPORT).write_text(report, encoding="utf-8")
