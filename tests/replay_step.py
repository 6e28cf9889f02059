"""Replay a recorded process of ``python -m dpbench step``, on a machine without a GPU.

For an unprofiled process the program prints the recorded record. For the PyTorch profiler it also
writes the recorded files. For a case or steps that were not recorded, it fails like a crashed
process.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpbench.child.messages import report
from dpbench.child.task import Task
from dpbench.commands.step import write_report
from dpbench.core.case import USUAL
from dpbench.core.errors import CaseFailed
from dpbench.instruments.timing import timing_rows
from dpbench.instruments.torch_profiler import profile_folder as profile_files
from dpbench.instruments.torch_profiler.profiler import TorchProfiler
from dpbench.instruments.torch_profiler.profiling import operator_tables
from dpbench.results.outcome import Outcome
from dpbench.results.rows import Measurement

if TYPE_CHECKING:
    from torch.autograd.profiler_util import EventList

DATA = Path(__file__).parent / "data"


TIMES = ("self_cpu", "cpu", "self_device", "device")


def averages(lines: list[dict[str, Any]]) -> EventList:
    """Restore the result of ``key_averages()`` from its saved lines."""
    from torch.autograd import DeviceType  # slow, and only needed for profiles
    from torch.autograd.profiler_util import EventList, FunctionEventAvg

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
    """Write the tables of operators from the recorded sums of a step, as the recorder does."""
    lines = json.loads((folder / "operators_0.json").read_text(encoding="utf-8"))
    by_name = averages([line for line in lines if line["input_shapes"] is None])
    text = operator_tables(by_name, by_name, calls=calls, steps=1, threshold=threshold)
    (folder / profile_files.OPERATORS).write_text(text, encoding="utf-8")


def recording(profiled: bool) -> Path:
    """Return the path of the record of a profiled or unprofiled process."""
    return DATA / ("profile/standard" if profiled else "timing") / "record.json"


def asked(instrument: Any) -> dict[str, Any]:
    """Return the fields of the record that depend on the instrument's options."""
    if isinstance(instrument, TorchProfiler):
        return {"schedule": vars(instrument.schedule)}
    return vars(instrument.steps)


def main() -> int:
    """Replay the recording for the task file in the command line."""
    task = Task.read(Path(sys.argv[-1]))
    case, instrument = task.case, task.instrument
    path = recording(isinstance(instrument, TorchProfiler))
    record = json.loads(path.read_text(encoding="utf-8"))
    for name, value in {"case": case.columns, **asked(instrument)}.items():
        found = {**USUAL, **record[name]} if name == "case" else record[name]
        if found != value:
            report(Outcome.failed(case, CaseFailed(f"no recording of {name} {value}")))
            return 1
    rows: list[Measurement]
    if isinstance(instrument, TorchProfiler):
        folder = instrument.directory / case.file_name
        profile_files.prepare(folder)
        shutil.copytree(path.parent, folder, dirs_exist_ok=True)
        recorded = profile_files.read_trace(folder / "trace_0.json.gz")
        rows = [*profile_files.profile_rows(case, record, [recorded])]
        write_operators(folder, recorded.calls, instrument.threshold)
        write_report(folder, rows, record["schedule"], folder)
    else:
        rows = timing_rows(case, record)
    report(Outcome(case, tuple(rows), labels=record.get("labels", {}), details=record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
