"""Reads Chrome traces of the PyTorch profiler, and makes the rows and files of a profile.

A trace is a JSON object. The list ``traceEvents`` has Chrome's trace format, with times in
microseconds. Kernels, copies and memsets have the category ``kernel``, ``gpu_memcpy`` or
``gpu_memset``. Each of these events has the same correlation number as the CUDA call that launched
the event.

The GPU lags behind the CPU, so a kernel belongs to the phase in which the CPU launched it. Threads
of autograd launch kernels in the right phase, because the training thread waits for these threads.

A profile has a folder with traces, ``operators.txt`` and a TensorBoard log. This module needs
neither torch nor a GPU, but for the TensorBoard log.
"""

from __future__ import annotations

import gc
import gzip
import json
import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

from dpbench.core.case import OUTSIDE
from dpbench.core.errors import InstrumentError
from dpbench.core.files import check_writable
from dpbench.core.metrics import METRICS, OTHER_COPIES, unit
from dpbench.core.subject import Subject
from dpbench.results.rows import STEP, Measurement

ANNOTATION = "dpbench."
"""Prefix of dpbench's annotations of phases."""

STEP_ANNOTATION = "ProfilerStep#"
"""Prefix of PyTorch's annotations of steps."""

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of events on the GPU."""

CALLS = ("cuda_runtime", "cuda_driver", "overhead")
"""Categories of CUDA calls and their overhead, which PyTorch's tables list as operators."""

GLOO, NCCL = "gloo:", "nccl"
"""Name prefixes of gloo's annotations and of NCCL's kernels. Both mark collectives."""

Event = dict[str, Any]
Span = tuple[float, float]  # start and end in µs


class TraceUnreadable(InstrumentError):
    """The file of a trace is missing, truncated, or contains no trace."""

    remedy = "profile the case again"


@dataclass(frozen=True)
class Launch:
    """A kernel, copy or memset on the GPU.

    Attributes:
        repeat: number of the recorded step, from 0.
        phase: phase in which the CPU launched the work.
        kind: ``kernel``, ``memcpy`` or ``memset``.
        name: demangled name of a kernel, or a name such as "Memcpy DtoD (Device -> Device)".
        seconds: duration on the GPU.
        bytes: bytes that a copy or memset writes, or 0 for a kernel.
    """

    repeat: int
    phase: str
    kind: str
    name: str
    seconds: float
    bytes: int


@dataclass(frozen=True)
class Trace:
    """The contents of a trace, by step and phase.

    Memory is the number of bytes that PyTorch has allocated on the measured device. The growth of
    a phase is the largest memory within the phase minus the memory at the start of the step. The
    growth may be negative.

    The time of a collective lasts from its start in this rank to its end, so the time includes
    waiting for other ranks. If collectives overlap, their common time counts once. A part of this
    time is exposed if no other work runs meanwhile. On a GPU, other work means copies, memsets, and
    kernels that are not collectives. On the CPU, other work means ``aten`` operators in threads
    that run no collectives.

    Attributes:
        launches: work on the GPU, in launch order; empty for a run on the CPU.
        cpu_seconds: seconds of the training thread, by step and phase.
        memory_before: memory at the start of each step; empty if the trace contains no memory.
        memory_growth: growth of memory, by step and phase.
        calls: names of CUDA calls.
        communication: seconds in collectives and exposed seconds, by step, metric and phase;
            empty without collectives.
    """

    launches: list[Launch]
    cpu_seconds: list[dict[str, float]]
    memory_before: list[int]
    memory_growth: list[dict[str, int]]
    calls: frozenset[str]
    communication: list[dict[str, dict[str, float]]]


def read_trace(path: Path) -> Trace:
    """Read a trace from a file ``.json.gz``.

    Work that was launched in no phase belongs to `OUTSIDE`. In a trace without dpbench's
    annotations, all work belongs to `OUTSIDE`. In a trace without PyTorch's annotations of steps,
    all work belongs to one step.
    """
    was_enabled = gc.isenabled()
    gc.disable()  # garbage collection would take most of the time
    try:
        by_category = _events(path)
        timeline, call_of = _Timeline(by_category["user_annotation"]), _calls(by_category)
        return Trace(
            launches=_launches(by_category, timeline, call_of),
            cpu_seconds=timeline.seconds(),
            **_memory(by_category, timeline),
            calls=frozenset(event["name"] for name in CALLS for event in by_category[name]),
            communication=_communication(by_category, timeline, call_of),
        )
    except (OSError, EOFError, LookupError, ValueError, TypeError, AttributeError) as error:
        what = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise TraceUnreadable(f"{path} cannot be read as a trace ({what})") from error
    finally:
        if was_enabled:
            gc.enable()


def _events(path: Path) -> dict[str, list[Event]]:
    with gzip.open(path, "rb") as stream:
        events = json.load(stream)["traceEvents"]
    by_category: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_category[event.get("cat", "")].append(event)
    return by_category


def _correlation(event: Event) -> Any:
    """Return the number that a CUDA call shares with the GPU event that it launched, or None."""
    return event.get("args", {}).get("correlation")


class _Timeline:
    """Finds the step and phase of the training thread at a given time."""

    def __init__(self, annotations: Iterable[Event]) -> None:
        ordered = sorted(annotations, key=lambda event: float(event["ts"]))
        steps = [event for event in ordered if event["name"].startswith(STEP_ANNOTATION)]
        self.step_starts = [float(event["ts"]) for event in steps] or [float("-inf")]
        self.phases = [event for event in ordered if event["name"].startswith(ANNOTATION)]
        self.starts = [float(event["ts"]) for event in self.phases]

    def locate(self, when: float) -> tuple[int, str]:
        """Return the step and phase at a time.

        Times before the first step belong to the first step.
        """
        step = max(0, bisect_right(self.step_starts, when) - 1)
        place = bisect_right(self.starts, when) - 1
        if place < 0 or when > self.starts[place] + float(self.phases[place]["dur"]):
            return step, OUTSIDE
        return step, self.phases[place]["name"].removeprefix(ANNOTATION)

    def seconds(self) -> list[dict[str, float]]:
        steps: list[dict[str, float]] = [{} for _ in self.step_starts]
        for event in self.phases:
            step, phase = self.locate(float(event["ts"]))
            steps[step][phase] = steps[step].get(phase, 0.0) + float(event["dur"]) / 1e6
        return steps


def _on_device(by_category: Mapping[str, list[Event]]) -> list[Event]:
    return [event for category in ON_DEVICE for event in by_category[category]]


def _calls(by_category: Mapping[str, list[Event]]) -> dict[Any, Event]:
    """Return the CUDA calls that launched work on the GPU, by correlation number."""
    wanted = {_correlation(event) for event in _on_device(by_category)} - {None}
    calls = by_category["cuda_runtime"] + by_category["cuda_driver"]
    return {number: call for call in calls if (number := _correlation(call)) in wanted}


def _launched(event: Event, call_of: Mapping[Any, Event]) -> float:
    """Return the time at which the CPU launched a GPU event.

    If the launching call was not recorded, returns the start of the event.
    """
    return float(call_of.get(_correlation(event), event)["ts"])


def _launches(
    by_category: dict[str, list[Event]], timeline: _Timeline, call_of: Mapping[Any, Event]
) -> list[Launch]:
    on_gpu = [(_launched(event, call_of), event) for event in _on_device(by_category)]
    launches = []
    for when, event in sorted(on_gpu, key=lambda each: (each[0], float(each[1]["ts"]))):
        repeat, phase = timeline.locate(when)
        launches.append(
            Launch(
                repeat,
                phase,
                event["cat"].removeprefix("gpu_"),
                event["name"],
                float(event["dur"]) / 1e6,
                int(event.get("args", {}).get("bytes", 0)),
            )
        )
    return launches


def _communication(
    by_category: dict[str, list[Event]], timeline: _Timeline, call_of: Mapping[Any, Event]
) -> list[dict[str, dict[str, float]]]:
    """Return the seconds in collectives, by step, metric and phase.

    A gloo collective belongs to the phase in which it starts. An NCCL kernel belongs to the phase
    in which the CPU launched it.
    """
    import numpy as np  # no measured process needs it

    if on_gpu := _on_device(by_category):
        collectives = [event for event in on_gpu if event["name"].startswith(NCCL)]
        others = [event for event in on_gpu if not event["name"].startswith(NCCL)]
    else:
        named = by_category["user_annotation"]
        collectives = [event for event in named if event["name"].startswith(GLOO)]
        threads = {event["tid"] for event in collectives}
        own = (event for event in by_category["cpu_op"] if event["tid"] not in threads)
        others = [event for event in own if event["name"].startswith("aten::")]
    if not collectives:
        return []
    collectives.sort(key=lambda event: float(event["ts"]))
    steps: list[dict[str, dict[str, float]]] = [
        {"communication_seconds": {}, "exposed_communication_seconds": {}}
        for _ in timeline.step_starts
    ]
    busy = np.array([*_uncovered(sorted(map(_span, others)))]).reshape(-1, 2)
    for event, (start, end) in zip(collectives, _uncovered(map(_span, collectives)), strict=True):
        step, phase = timeline.locate(_launched(event, call_of))
        exposed = end - start - float(np.diff(busy.clip(start, end)).sum())
        for by_phase, lasted in zip(steps[step].values(), (end - start, exposed), strict=True):
            by_phase[phase] = by_phase.get(phase, 0.0) + lasted / 1e6
    return steps


def _span(event: Event) -> Span:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _uncovered(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield the part of each span that no earlier span covers. The part may be empty.

    The spans must be sorted by start.
    """
    covered = float("-inf")
    for start, end in spans:
        start, covered = max(start, covered), max(end, covered)
        yield start, covered


def _memory(by_category: dict[str, list[Event]], timeline: _Timeline) -> dict[str, Any]:
    """Return the fields ``memory_before`` and ``memory_growth`` of a `Trace`, by name."""
    on_gpu = bool(by_category["kernel"])
    changes = [
        event
        for event in sorted(by_category["cpu_instant_event"], key=lambda event: float(event["ts"]))
        if event["name"] == "[memory]" and (event["args"]["Device Type"] != 0) == on_gpu
    ]
    level = changes[0]["args"]["Total Allocated"] - changes[0]["args"]["Bytes"] if changes else 0
    before = [level for _ in timeline.step_starts]
    growth: list[dict[str, int]] = [{} for _ in timeline.step_starts]
    current = 0
    # The start of a phase is treated as a change of 0 bytes, so that its memory is included.
    for event in sorted([*timeline.phases, *changes], key=lambda event: float(event["ts"])):
        step, phase = timeline.locate(float(event["ts"]))
        if step != current:
            before[step], current = level, step
        level += int(event.get("args", {}).get("Bytes", 0))
        more = level - before[step]
        growth[step][phase] = max(growth[step].get(phase, more), more)
    return {"memory_before": before if changes else [], "memory_growth": growth}


# --- the folder -----------------------------------------------------------------------------------

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
    case: Subject, record: Mapping[str, Any], traces: Sequence[Trace]
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


def _device_metrics(recorded: Trace, step: int) -> dict[str, Mapping[str, float]]:
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
