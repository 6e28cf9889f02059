"""Reads Chrome traces of the PyTorch profiler: what ran on the device, and what launched it.

A trace is a JSON object. Its ``traceEvents`` have Chrome's trace format, with times in
microseconds. Kernels, copies and memsets have the category ``kernel``, ``gpu_memcpy`` or
``gpu_memset``. They share a correlation number with the CUDA call that launched them. The device
lags behind the CPU, so a kernel belongs to the phase in which it was launched. Autograd's threads
launch in the right phase too, because the training thread waits for them.

This needs neither torch nor a GPU.
"""

from __future__ import annotations

import gc
import gzip
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from dpbench.child.failures import InstrumentError
from dpbench.core.case import OUTSIDE

ANNOTATION = "dpbench."  # prefix of a phase's annotation
STEP_ANNOTATION = "ProfilerStep#"  # prefix of PyTorch's own annotation of a step
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of device events."""

CALLS = ("cuda_runtime", "cuda_driver", "overhead")
"""Categories of CUDA calls and their overhead, which PyTorch also lists as operators."""

GLOO, NCCL = "gloo:", "nccl"
"""Prefixes of collectives: annotations in gloo's threads, and NCCL's kernels."""

Event = dict[str, Any]
Span = tuple[float, float]  # start and end, µs


class TraceUnreadable(InstrumentError):
    """The trace is missing, truncated, or not a trace."""

    remedy = "profile the case again"


@dataclass(frozen=True)
class Launch:
    """A kernel, copy or memset on the device."""

    repeat: int  # the recorded step, from 0
    phase: str  # in which it was launched
    kind: str  # kernel, memcpy or memset
    name: str  # the kernel's, demangled, or e.g. "Memcpy DtoD (Device -> Device)"
    seconds: float  # on the device
    bytes: int  # moved by a copy or memset; 0 for a kernel


@dataclass(frozen=True)
class Trace:
    """A recorded trace, by step and phase.

    Memory is in bytes, as allocated by PyTorch on the measured device. The growth of a phase is the
    maximum within the phase minus the memory at the start of the step; it may be negative.

    The time of a collective runs from its start in this rank to its end, so it includes waiting for
    other ranks. It is exposed while nothing else runs: no other kernel or copy on the device, or in
    a run on the CPU no ``aten`` operator.
    """

    launches: list[Launch]  # in launch order; empty on the CPU
    cpu_seconds: list[dict[str, float]]  # by step and phase, of the training thread
    memory_before: list[int]  # at the start of each step; empty if not recorded
    memory_growth: list[dict[str, int]]  # by step and phase
    calls: frozenset[str]  # the names of `CALLS`
    # By step, metric and phase: seconds in collectives, and exposed seconds; may be empty.
    communication: list[dict[str, dict[str, float]]]


def read(path: Path) -> Trace:
    """Read a trace, ``.json.gz``.

    Work launched in no phase belongs to `OUTSIDE`. A trace of another program is one step, all of
    it `OUTSIDE`.
    """
    was_enabled = gc.isenabled()
    gc.disable()  # it takes three quarters of the time
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
        raise TraceUnreadable(f"{path}: not a readable trace ({what})") from error
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
    """The number that a CUDA call shares with its device event, if any."""
    return event.get("args", {}).get("correlation")


class _Timeline:
    """The step and phase of the training thread at any time."""

    def __init__(self, annotations: Iterable[Event]) -> None:
        ordered = sorted(annotations, key=lambda event: float(event["ts"]))
        steps = [event for event in ordered if event["name"].startswith(STEP_ANNOTATION)]
        self.step_starts = [float(event["ts"]) for event in steps] or [float("-inf")]
        self.phases = [event for event in ordered if event["name"].startswith(ANNOTATION)]
        self.starts = [float(event["ts"]) for event in self.phases]

    def locate(self, when: float) -> tuple[int, str]:
        """The step and phase at a time; time before the first step belongs to the first step."""
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
    """The CUDA calls that launched something on the device, by correlation number."""
    wanted = {_correlation(event) for event in _on_device(by_category)} - {None}
    calls = by_category["cuda_runtime"] + by_category["cuda_driver"]
    return {number: call for call in calls if (number := _correlation(call)) in wanted}


def _launched(event: Event, call_of: Mapping[Any, Event]) -> float:
    """The launch time of a device event; its start if the call was not recorded."""
    return float(call_of.get(_correlation(event), event)["ts"])


def _launches(
    by_category: dict[str, list[Event]], timeline: _Timeline, call_of: Mapping[Any, Event]
) -> list[Launch]:
    device = [(_launched(event, call_of), event) for event in _on_device(by_category)]
    launches = []
    for when, event in sorted(device, key=lambda each: (each[0], float(each[1]["ts"]))):
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
    """Seconds in collectives, by step, metric and phase.

    A gloo collective belongs to the phase in which it starts; an NCCL kernel, to the phase of
    its launch.
    """
    if device := _on_device(by_category):
        collectives = [event for event in device if event["name"].startswith(NCCL)]
        others = [event for event in device if not event["name"].startswith(NCCL)]
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
    busy = _Busy(map(_span, others))
    for event, (start, end) in zip(collectives, _uncovered(map(_span, collectives)), strict=True):
        step, phase = timeline.locate(_launched(event, call_of))
        for by_phase, lasted in zip(
            steps[step].values(), (end - start, end - start - busy.between(start, end)), strict=True
        ):
            by_phase[phase] = by_phase.get(phase, 0.0) + lasted / 1e6
    return steps


def _span(event: Event) -> Span:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _uncovered(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield the part of each span, perhaps empty, that no earlier one covers; sorted by start."""
    covered = float("-inf")
    for start, end in spans:
        start, covered = max(start, covered), max(end, covered)
        yield start, covered


class _Busy:
    """The union of some spans."""

    def __init__(self, spans: Iterable[Span]) -> None:
        apart = [*_uncovered(sorted(spans))]
        self._starts = [start for start, _ in apart]
        self._lengths = [end - start for start, end in apart]
        self._before = [0.0, *accumulate(self._lengths)]

    def between(self, start: float, end: float) -> float:
        """The length of the union between two times."""
        return self._until(end) - self._until(start)

    def _until(self, when: float) -> float:
        place = bisect_right(self._starts, when) - 1
        if place < 0:
            return 0.0
        return self._before[place] + min(when - self._starts[place], self._lengths[place])


def _memory(by_category: dict[str, list[Event]], timeline: _Timeline) -> dict[str, Any]:
    """`Trace.memory_before` and `Trace.memory_growth`."""
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
    # The start of a phase is a change of 0 bytes, so that it starts with the present memory.
    for event in sorted([*timeline.phases, *changes], key=lambda event: float(event["ts"])):
        step, phase = timeline.locate(float(event["ts"]))
        if step != current:
            before[step], current = level, step
        level += int(event.get("args", {}).get("Bytes", 0))
        more = level - before[step]
        growth[step][phase] = max(growth[step].get(phase, more), more)
    return {"memory_before": before if changes else [], "memory_growth": growth}
