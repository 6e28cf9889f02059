"""Makes the text of ``operators.txt`` from the PyTorch profiler's tables of operators."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.autograd.profiler_util import EventList

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
    from torch.autograd.profiler_util import EventList

    kept = [each for each in events if not each.is_user_annotation and each.key not in calls]
    return EventList(kept, use_device=events._use_device, profile_memory=True, with_flops=True)


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
