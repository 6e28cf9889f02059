"""Stands in for ``python -m dpbench step`` where there is no GPU: replays a recorded process.

Started with the command line of an unprofiled process it prints the record of one, with that of
the PyTorch profiler it leaves the files of one. It does so for the case and the steps that were
recorded; anything else fails as a crashed process does.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEventAvg

from dpbench.case import ADDED
from dpbench.child.messages import Schedule, hand_over
from dpbench.cli import build_parser
from dpbench.commands.options import chosen_case
from dpbench.commands.step import write_report
from dpbench.instruments.torch_profiler import profile_folder as profile_files
from dpbench.instruments.torch_profiler import trace
from dpbench.instruments.torch_profiler.operators import operator_tables
from dpbench.options import own_values
from dpbench.results.outcome import Outcome

DATA = Path(__file__).parent / "data"


TIMES = ("self_cpu", "cpu", "self_device", "device")


def averages(lines: list[dict[str, Any]]) -> EventList:
    """What ``key_averages()`` returned, of the lines that were saved of it."""
    events = []
    for line in lines:
        event = FunctionEventAvg()
        event.key, event.count, event.flops = line["name"], line["calls"], line["flops"]
        event.input_shapes, event.use_device = [], "cuda"
        event.is_user_annotation = line["kind"] == "annotation"
        event.device_type = DeviceType.CUDA if line["kind"] == "kernel" else DeviceType.CPU
        for kind in TIMES:
            setattr(event, f"{kind}_time_total", line[f"{kind}_seconds"] * 1e6)
        event.self_cpu_memory_usage = line["self_cpu_memory_bytes"]
        event.self_device_memory_usage = line["self_device_memory_bytes"]
        events.append(event)
    return EventList(events, use_device="cuda", profile_memory=True, with_flops=True)


def write_operators(folder: Path, calls: Collection[str], threshold: float) -> None:
    """Write the tables of the step whose sums are in a folder, as the recorder does."""
    lines = json.loads((folder / "operators_0.json").read_text(encoding="utf-8"))
    by_name = averages([line for line in lines if line["input_shapes"] is None])
    text = operator_tables(by_name, by_name, calls=calls, steps=1, threshold=threshold)
    (folder / profile_files.OPERATORS).write_text(text, encoding="utf-8")


def recording(options: argparse.Namespace) -> Path:
    """The recorded record of such a process, and how many steps it was told to take."""
    folder = "profile/standard" if options.profile else "timing"
    return DATA / folder / "record.json"


def asked(options: argparse.Namespace) -> dict[str, Any]:
    """What a process with these options says that it did."""
    if options.profile:
        return {"schedule": vars(Schedule.parse(own_values(options)["profile_schedule"]))}
    return {"warmup": options.warmup, "active": options.active}


def main() -> int:
    """Replay."""
    options = build_parser("step").parse_args(sys.argv[4:])  # after python -P -m dpbench
    path, case = recording(options), chosen_case(options)
    record = json.loads(path.read_text(encoding="utf-8"))
    for name, value in {"case": vars(case), **asked(options)}.items():
        found = {**ADDED, **record[name]} if name == "case" else record[name]
        if found != value:
            error = {"kind": "RuntimeError", "message": f"no recording of {name} {value}"}
            hand_over(error=error)
            return 1
    if options.profile:
        profile_files.prepare(options.profile)
        shutil.copytree(path.parent, options.profile, dirs_exist_ok=True)
        recorded = trace.read(options.profile / "trace_0.json.gz")
        rows = tuple(profile_files.profile_rows(case, record, [recorded]))
        write_operators(options.profile, recorded.calls, own_values(options)["profile_threshold"])
        write_report(options.profile, rows, record["schedule"], options.profile)
        record["outcome"] = Outcome(case, rows).as_json()
    hand_over(**record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
