"""The folder of a profile, and the rows and the TensorBoard log made from its traces."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

from dpbench.child.failures import InstrumentError
from dpbench.core.files import check_writable
from dpbench.core.metrics import METRICS, OTHER_COPIES, unit
from dpbench.core.subject import Subject
from dpbench.instruments.torch_profiler import trace
from dpbench.results.rows import STEP, Measurement

INSTRUMENT = "torch_profiler"  # the instrument's name in rows
OPERATORS, REPORT, SNAPSHOT = "operators.txt", "report.txt", "memory_snapshot.pickle"

COPIES = {m.source: m.name for m in METRICS.had_by(INSTRUMENT) if m.source}
"""Metrics of copies and memsets, by the start of their names in a trace."""


class DeviceActivityMissing(InstrumentError):
    """A trace of a run on CUDA has no device events."""

    remedy = "another profiler may hold the GPU's profiling interface (CUPTI); end it"


def rank_folder(directory: Path, rank: int) -> Path:
    """The folder of a rank, within that of its case."""
    return directory / f"rank{rank}"


def own_folder(directory: Path) -> Path:
    """The folder for this process: that of the case, or under torchrun that of its rank.

    Other programs than torchrun set ``WORLD_SIZE`` too, so it alone proves nothing.
    """
    if "TORCHELASTIC_ERROR_FILE" not in os.environ or os.environ["WORLD_SIZE"] == "1":
        return directory
    return rank_folder(directory, int(os.environ["RANK"]))


def prepare(directory: Path) -> None:
    """Make the folder of a profile, and delete the files of an earlier profile."""
    check_writable(directory)
    for pattern in ("trace_*.json.gz", OPERATORS, REPORT, SNAPSHOT):
        for path in directory.glob(pattern):
            path.unlink()


def write_log(case: Subject, rows: Sequence[Measurement], directory: Path) -> None:
    """Write TensorBoard's event file: scalars ``METRIC/PHASE`` by step, and hyper-parameters.

    Hyper-parameters are the case's fields, the device and PyTorch's version. Beside
    them are the metrics of whole steps, as means over the recorded steps.
    """
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import hparams

    ours = ".dpbench"  # suffix of our files; others are kept
    for earlier in directory.glob(f"events.out.tfevents.*{ours}"):
        earlier.unlink()
    of_step: dict[str, list[float]] = defaultdict(list)
    # add_hparams would open a second event file, in a folder named after the time.
    with SummaryWriter(str(directory), filename_suffix=ours) as writer:
        for row in rows:
            writer.add_scalar(f"{row.metric}/{row.phase}", row.value, row.repeat)
            if row.phase == STEP:
                of_step[f"{row.metric}/{STEP}"].append(row.value)
        hyper_parameters = {**case.columns, "device": rows[0].device, "torch": rows[0].tool}
        metrics = {name: fmean(values) for name, values in of_step.items()}
        for summary in hparams(hyper_parameters, metrics):
            writer.file_writer.add_summary(summary)


def profile_rows(
    case: Subject, record: Mapping[str, Any], traces: Sequence[trace.Trace]
) -> Iterator[Measurement]:
    """Yield the rows of a profile: each recorded step, by phase and as a whole."""
    on_cuda = record["device"] != "cpu"
    repeats = count()
    where = record["device"], f"torch {record['torch']}"
    for recorded in traces:
        if on_cuda and not any(launch.kind == "kernel" for launch in recorded.launches):
            raise DeviceActivityMissing(f"{case.id}: the trace holds no GPU activity")
        for step, cpu_seconds in enumerate(recorded.cpu_seconds):
            repeat = next(repeats)
            growth = recorded.memory_growth[step].items()
            metrics: dict[str, Mapping[str, float]] = {
                "cpu_time_seconds": cpu_seconds,
                "memory_growth_bytes": {phase: max(0, more) for phase, more in growth},
            }
            if on_cuda:
                metrics |= _device_metrics(recorded, step)
            if recorded.communication:
                for metric, spent in recorded.communication[step].items():
                    metrics[metric] = dict.fromkeys(cpu_seconds, 0.0) | spent
            for metric, by_phase in metrics.items():
                together = max if "memory" in metric else sum
                whole = together([0.0, *by_phase.values()])
                for phase, value in {**by_phase, STEP: whole}.items():
                    numbers = phase, metric, value, unit(metric), repeat
                    yield Measurement(case, INSTRUMENT, *numbers, *where)


def _device_metrics(recorded: trace.Trace, step: int) -> dict[str, Mapping[str, float]]:
    """Device time, copied bytes and peak memory of one step, by metric and phase."""
    launches = [launch for launch in recorded.launches if launch.repeat == step]
    phases = [*recorded.cpu_seconds[step], *(launch.phase for launch in launches)]
    names = ["device_time_seconds", *COPIES.values()]
    names += [copy_metric(launch.name) for launch in launches if launch.kind != "kernel"]
    metrics = {name: dict.fromkeys(phases, 0.0) for name in names}
    for launch in launches:
        metrics["device_time_seconds"][launch.phase] += launch.seconds
        if launch.kind != "kernel":
            metrics[copy_metric(launch.name)][launch.phase] += launch.bytes
    if recorded.memory_before:
        before, growth = recorded.memory_before[step], recorded.memory_growth[step]
        metrics["phase_peak_memory_bytes"] = {p: before + more for p, more in growth.items()}
    return {**metrics}


def copy_metric(name: str) -> str:
    """The metric for a copy or memset with this name in a trace."""
    return next((m for start, m in COPIES.items() if name.startswith(start)), OTHER_COPIES)
