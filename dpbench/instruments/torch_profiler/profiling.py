"""The PyTorch profiler: annotations of phases, allocations, and the text of ``operators.txt``.

This module imports torch, which a script may do only after it has set its environment.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerActivity, profile, record_function
from torch.profiler import schedule as schedule

from dpbench.core.case import OUTSIDE


class PhaseAnnotations:
    """Marks each phase in the trace, without synchronizing the GPU.

    Launches and allocations belong to the phase in which the CPU made them.
    """

    def start_step(self, phase: str = OUTSIDE) -> None:
        self.annotation = record_function(f"dpbench.{phase}")
        self.annotation.__enter__()

    def switch(self, phase: str) -> None:
        self.end_step()
        self.start_step(phase)

    def end_step(self) -> None:
        self.annotation.__exit__(None, None, None)


def profiler_of(on_cuda: bool, **options: Any) -> profile:
    """Create a profiler that records operators with their shapes, memory and FLOPs.

    If ``on_cuda`` is True, the profiler also records the GPU.
    """
    return profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA][: 1 + on_cuda],
        record_shapes=True,
        profile_memory=True,
        with_flops=True,
        **options,
    )


def is_running() -> bool:
    """Return True if a profiler records in this process."""
    return bool(torch._C._autograd._profiler_enabled())


def finish_work(on_cuda: bool) -> None:
    """Wait until the GPU has finished all work of a step, so that the work counts in this step."""
    if on_cuda:
        torch.cuda.synchronize()


def record_allocations() -> Callable[[], None]:
    """Begin to record the stack of each allocation on the GPU. Return a function that ends it."""
    # A step of the 1b model has about 15 000 allocations and frees, so 400 000 entries suffice.
    torch.cuda.memory._record_memory_history(max_entries=400_000, stacks="python")
    return partial(torch.cuda.memory._record_memory_history, enabled=None)


def write_snapshot(path: Path) -> None:
    """Write the recorded allocations to a file."""
    torch.cuda.memory._dump_snapshot(str(path))


# --- tables of operators --------------------------------------------------------------------------

TOP = 20
"""Largest number of rows in a table."""


def operator_tables(
    by_name: EventList,
    by_shape: EventList,
    *,
    calls: Collection[str],
    steps: int,
    threshold: float,
) -> str:
    """Return a text with a list of bottlenecks, and tables by time, memory and input shape.

    PyTorch counts the time of some kernels twice: for the operator and for a CUDA call such as
    "Command Buffer Full". In a profile from an H200, such calls made up 119 of 336 ms.
    Therefore CUDA calls and annotations appear only in the table by CPU time.

    Args:
        by_name: ``key_averages()`` of a profiler, summed over the recorded steps.
        by_shape: like ``by_name``, but also grouped by input shape.
        calls: names of the CUDA calls among the events.
        steps: number of recorded steps.
        threshold: operators that take at least this many milliseconds per step are bottlenecks.
    """
    device, kind = "CPU", "cpu"
    if any(event.self_device_time_total for event in by_name):
        device, kind = "GPU", "device"
    busiest = f"self_{kind}_time_total"
    operators, of_shapes = (_without(events, calls) for events in (by_name, by_shape))
    tables = [
        *[(operators, "self_device_time_total", "Operators by GPU time")] * (device == "GPU"),
        (by_name, "self_cpu_time_total", "Operators and CUDA calls by CPU time"),
        (operators, f"self_{kind}_memory_usage", f"Operators by {device} memory"),
        (of_shapes, busiest, f"Operators and input shapes by {device} time"),
    ]
    return "\n".join(
        [
            f"Bottlenecks: operators that take {threshold:g} ms or more per step on the {device}",
            *(list(_bottlenecks(operators, busiest, steps, threshold)) or ["none"]),
            f"\nSums over {steps} recorded steps.\n",
            *(
                events.table(sort_by=column, row_limit=TOP, header=title)
                for events, column, title in tables
            ),
        ]
    )


def _without(events: EventList, calls: Collection[str]) -> EventList:
    """Return the events without CUDA calls and annotations."""
    operators = [each for each in events if not each.is_user_annotation and each.key not in calls]
    return EventList(operators, use_device=events._use_device, profile_memory=True, with_flops=True)


def _bottlenecks(operators: EventList, column: str, steps: int, threshold: float) -> Iterator[str]:
    """Yield a line for each operator that takes at least ``threshold`` milliseconds per step.

    The time of other operators that an operator calls is not included.
    """
    spent = {
        event.key: getattr(event, column) / 1e3 / steps
        for event in operators
        if event.device_type.name == "CPU"
    }
    for name, milliseconds in sorted(spent.items(), key=lambda each: -each[1]):
        if milliseconds >= threshold:
            yield f"{milliseconds:10.2f} ms {milliseconds / sum(spent.values()):6.1%}  {name}"
