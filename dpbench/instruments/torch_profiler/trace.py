"""Reading the PyTorch profiler's Chrome traces: what ran on the device, and who launched it.

A trace is a JSON object whose ``traceEvents`` are the events of Chrome's trace format, times in
microseconds. What the device did has the category ``kernel``, ``gpu_memcpy`` or ``gpu_memset``
and a correlation number that it shares with the CUDA call that launched it. The device runs
behind the CPU, so the phase of a kernel is that of its launch, not of its own time: the launch
lies inside the phase's annotation also where autograd launched it from a thread of its own,
because the training thread waits for that one inside the phase.

Neither torch nor a GPU is needed here.
"""

from __future__ import annotations

import gc
import gzip
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpbench.case import OUTSIDE
from dpbench.instruments.interface import InstrumentError
from dpbench.instruments.torch_profiler.spans import Busy, each_alone

ANNOTATION = "dpbench."  # what the name of a phase's annotation begins with
STEP_ANNOTATION = "ProfilerStep#"  # what PyTorch itself puts around a step
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of what the device does."""

CALLS = ("cuda_runtime", "cuda_driver", "overhead")
"""Categories of what the CPU does between an operator and the device. PyTorch calls them operators
too, and gives some the time of kernels once more ("Command Buffer Full": 119 of 336 ms)."""

AUTOGRAD = "autograd::engine::evaluate_function: "
"""What PyTorch puts before the name of a backward function while it evaluates it."""

GLOO, NCCL = "gloo:", "nccl"
"""What names of collectives begin with: annotations in gloo's threads, and kernels of NCCL."""

Event = dict[str, Any]


class TraceUnreadable(InstrumentError):
    """A trace is missing, cut off, or no trace at all."""

    remedy = "profile the case again"


@dataclass(frozen=True)
class Launch:
    """One thing that the device did."""

    repeat: int  # the recorded step, from 0
    phase: str  # in which it was launched
    kind: str  # kernel, memcpy or memset
    name: str  # the kernel's, demangled, or e.g. "Memcpy DtoD (Device -> Device)"
    seconds: float  # how long the device took
    bytes: int  # what a copy or memset moved; 0 for a kernel, whose trace does not say
    operator: str | None  # the innermost around the launch, e.g. aten::mm, if there is one
    called_by: str | None  # the outermost one, e.g. aten::linear or AddmmBackward0


@dataclass(frozen=True)
class Trace:
    """A recorded trace, by step and phase.

    Memory is what PyTorch's allocator of the measured device has handed out, in bytes. It grows by
    as much as there was, at most while the step was in a phase, beyond what there was at its start;
    below 0 where the step had freed more than it took.

    A collective takes from when it begins in this rank until it ends: moving data, and waiting for
    ranks that come later. It is exposed while nothing else runs: on the device no other kernel or
    copy, on the CPU no operator of PyTorch's (``aten``).
    """

    launches: list[Launch]  # in the order of the launches; empty on the CPU
    cpu_seconds: list[dict[str, float]]  # of each step, of the training thread
    memory_before: list[int]  # at the start of each step; empty if nothing is known of it
    memory_growth: list[dict[str, int]]  # of each step
    calls: frozenset[str]  # the names of `CALLS`
    # Of each step, seconds in collectives, and those of them that are exposed; empty without any.
    communication: list[dict[str, dict[str, float]]]


def read(path: Path) -> Trace:
    """Read one trace, ``.json.gz``.

    Work that was launched outside every phase belongs to `OUTSIDE`; nothing is dropped, and a
    trace of another program is one step outside all phases.
    """
    was_enabled = gc.isenabled()
    gc.disable()  # it takes three quarters of the time and finds nothing
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
    """The number that a CUDA call shares with what it launched; None if the trace says none."""
    return event.get("args", {}).get("correlation")


class _Timeline:
    """Which step and phase the training thread was in at a time."""

    def __init__(self, annotations: Iterable[Event]) -> None:
        ordered = sorted(annotations, key=lambda event: float(event["ts"]))
        steps = [event for event in ordered if event["name"].startswith(STEP_ANNOTATION)]
        self.step_starts = [float(event["ts"]) for event in steps] or [float("-inf")]
        self.phases = [event for event in ordered if event["name"].startswith(ANNOTATION)]
        self.starts = [float(event["ts"]) for event in self.phases]

    def locate(self, when: float) -> tuple[int, str]:
        """Step and phase of a time; before the first step counts as the first."""
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
    """The CUDA call that launched each thing that the device did, by their number."""
    wanted = {_correlation(event) for event in _on_device(by_category)} - {None}
    calls = by_category["cuda_runtime"] + by_category["cuda_driver"]
    return {number: call for call in calls if (number := _correlation(call)) in wanted}


def _launched(event: Event, call_of: Mapping[Any, Event]) -> float:
    """When it was launched.

    Without its call (the call lies before the recording), its own time is the best guess.
    """
    return float(call_of.get(_correlation(event), event)["ts"])


def _launches(
    by_category: dict[str, list[Event]], timeline: _Timeline, call_of: Mapping[Any, Event]
) -> list[Launch]:
    stacks = dict(_operators_around(call_of.values(), by_category["cpu_op"]))
    device = [(_launched(event, call_of), event) for event in _on_device(by_category)]
    launches = []
    for when, event in sorted(device, key=lambda each: (each[0], float(each[1]["ts"]))):
        repeat, phase = timeline.locate(when)
        operators = stacks.get(_correlation(event), [])
        launches.append(
            Launch(
                repeat,
                phase,
                event["cat"].removeprefix("gpu_"),
                event["name"],
                float(event["dur"]) / 1e6,
                int(event.get("args", {}).get("bytes", 0)),
                operators[-1] if operators else None,
                operators[0].removeprefix(AUTOGRAD) if operators else None,
            )
        )
    return launches


def _operators_around(
    calls: Iterable[Event], operators: Iterable[Event]
) -> Iterator[tuple[int, list[str]]]:
    """Correlation number of each call, and the operators that were open on its thread then.

    One pass over both in the order of time: operators of one thread nest.
    """
    open_on: dict[Any, list[tuple[float, str]]] = defaultdict(list)
    merged = [*operators, *calls]
    merged.sort(key=lambda event: (float(event["ts"]), -float(event["dur"])))
    for event in merged:
        start, stack = float(event["ts"]), open_on[event["tid"]]
        while stack and stack[-1][0] < start:
            stack.pop()
        if event["cat"] == "cpu_op":
            stack.append((start + float(event["dur"]), event["name"]))
        else:
            yield event["args"]["correlation"], [name for _, name in stack]


def _communication(
    by_category: dict[str, list[Event]], timeline: _Timeline, call_of: Mapping[Any, Event]
) -> list[dict[str, dict[str, float]]]:
    """Seconds in collectives by metric and phase, of each step.

    Gloo's belong to the phase in which they begin, NCCL's to the one that launched them.
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
    busy = Busy(map(_span, others))
    for event, (start, end) in zip(collectives, each_alone(map(_span, collectives)), strict=True):
        step, phase = timeline.locate(_launched(event, call_of))
        for by_phase, lasted in zip(
            steps[step].values(), (end - start, end - start - busy.between(start, end)), strict=True
        ):
            by_phase[phase] = by_phase.get(phase, 0.0) + lasted / 1e6
    return steps


def _span(event: Event) -> tuple[float, float]:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _memory(by_category: dict[str, list[Event]], timeline: _Timeline) -> dict[str, Any]:
    """What each step found handed out, and the most beyond that in each phase."""
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
    # The border of a phase is a change by nothing: a phase begins with what the last one left.
    for event in sorted([*timeline.phases, *changes], key=lambda event: float(event["ts"])):
        step, phase = timeline.locate(float(event["ts"]))
        if step != current:
            before[step], current = level, step
        level += int(event.get("args", {}).get("Bytes", 0))
        more = level - before[step]
        growth[step][phase] = max(growth[step].get(phase, more), more)
    return {"memory_before": before if changes else [], "memory_growth": growth}
