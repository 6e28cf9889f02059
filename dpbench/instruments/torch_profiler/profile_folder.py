"""Finds and clears the folder of a profile, and makes rows and a TensorBoard log from traces."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

from dpbench.core.errors import InstrumentError
from dpbench.core.files import check_writable
from dpbench.core.metrics import METRICS, OTHER_COPIES, unit
from dpbench.core.subject import Subject
from dpbench.instruments.torch_profiler import trace
from dpbench.results.rows import STEP, Measurement

INSTRUMENT = "torch_profiler"  # value of the column ``instrument``
OPERATORS, REPORT, SNAPSHOT = "operators.txt", "report.txt", "memory_snapshot.pickle"

COPIES = {m.source: m.name for m in METRICS.had_by(INSTRUMENT) if m.source}
"""Metrics of copies and memsets, by the first words of the event's name in a trace."""


class DeviceActivityMissing(InstrumentError):
    """A trace of a run on a GPU contains no GPU events."""

    remedy = "end other profilers, because they may use the GPU's profiling interface (CUPTI)"


def rank_folder(directory: Path, rank: int) -> Path:
    """Return the folder of a rank, in the folder of its case."""
    return directory / f"rank{rank}"


def own_folder(directory: Path) -> Path:
    """Return the folder for the files of this process.

    Under torchrun with several ranks, each rank has a subfolder of ``directory``. Any other
    process uses ``directory`` itself. The variable ``WORLD_SIZE`` alone does not show that
    torchrun started the process, because other programs set it too.
    """
    if "TORCHELASTIC_ERROR_FILE" not in os.environ or os.environ["WORLD_SIZE"] == "1":
        return directory
    return rank_folder(directory, int(os.environ["RANK"]))


def prepare(directory: Path) -> None:
    """Create the folder of a profile, and delete the traces and reports of an earlier profile."""
    check_writable(directory)
    for pattern in ("trace_*.json.gz", OPERATORS, REPORT, SNAPSHOT):
        for path in directory.glob(pattern):
            path.unlink()


def write_log(case: Subject, rows: Sequence[Measurement], directory: Path) -> None:
    """Write an event file of TensorBoard, with scalars ``METRIC/PHASE`` and hyper-parameters.

    Hyper-parameters are the fields of the case, the device and the version of PyTorch. The event
    file also contains, for each metric of the whole step, the mean over the recorded steps.
    """
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import hparams

    ours = ".dpbench"  # suffix of dpbench's event files
    for earlier in directory.glob(f"events.out.tfevents.*{ours}"):
        earlier.unlink()
    of_step: dict[str, list[float]] = defaultdict(list)
    # `add_hparams` would write to a second event file, in a new folder.
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
    """Yield the rows of each recorded step, by phase and for the whole step."""
    on_cuda = record["device"] != "cpu"
    repeats = count()
    where = record["device"], f"torch {record['torch']}"
    for recorded in traces:
        if on_cuda and not any(launch.kind == "kernel" for launch in recorded.launches):
            raise DeviceActivityMissing(f"{case.id}: the trace contains no GPU activity")
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
    """Return GPU time, copied bytes and any recorded peak memory of a step, by metric and phase."""
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
    """Return the name of the metric for a copy or memset, from the event's name in a trace."""
    return next((m for start, m in COPIES.items() if name.startswith(start)), OTHER_COPIES)
