"""What a GPU did when, and who asked for it: busy time, gaps and launches, by phase.

Times are whole nanoseconds of one clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dpbench.case import OUTSIDE
from dpbench.results.rows import STEP

THE_END = "the end of the step"
"""What the CPU waits for when the GPU has done all its work."""


class Activity(NamedTuple):
    """A kernel by its short name, a copy or a memset on the device.

    ``launched`` is when the CPU asked for it, or its own start if that was not recorded; ``bytes``
    are what a copy or memset moved, 0 for a kernel.
    """

    start: int
    end: int
    kind: str
    name: str
    launched: int
    bytes: int = 0


class Call(NamedTuple):
    """A call of CUDA's API on the CPU, by its name without a version."""

    start: int
    end: int
    name: str


class Range(NamedTuple):
    """A phase of a step as the CPU marked it, or with the phase `STEP` a whole step."""

    step: int
    phase: str
    start: int
    end: int


@dataclass(frozen=True)
class Timeline:
    """A recorded timeline of one GPU, which did something; everything in the order of its start.

    In a step that has a range of its own (`STEP`), phases only say where the CPU was. In others
    the GPU finished each phase's work before the next began, and phases have busy shares.
    """

    device: str
    tool: str
    ranges: Sequence[Range]
    activities: Sequence[Activity]
    calls: Sequence[Call]

    @cached_property
    def busy(self) -> NDArray[np.int64]:
        """When anything ran on the GPU: starts and ends that do not touch, in order."""
        starts, ends = np.array([(each.start, each.end) for each in self.activities]).T
        ends = np.maximum.accumulate(ends)
        idle_before = np.append(True, starts[1:] > ends[:-1])
        return np.column_stack([starts[idle_before], ends[np.append(idle_before[1:], True)]])

    @property
    def whole_steps(self) -> list[Range]:
        """Steps with a range of their own; the whole recording if it has no ranges."""
        if self.ranges:
            return [each for each in self.ranges if each.phase == STEP]
        return [Range(0, STEP, int(self.busy[0, 0]), int(self.busy[-1, 1]))]

    def usages(self) -> pd.DataFrame:
        """By step and phase, for steps that have phases and for whole ones, nsys's metrics."""
        whole = self.whole_steps
        marked = {each.step for each in whole}
        launched = np.sort([each.launched for each in self.activities])
        rows = [
            (
                *(each.step, each.phase, each.end - each.start),
                np.diff(self._busy_in(each)).sum(),
                np.diff(np.searchsorted(launched, (each.start, each.end))).sum(),
            )
            for each in (*(r for r in self.ranges if r.step not in marked), *whole)
        ]
        times = ["timeline_seconds", "timeline_busy_seconds"]
        table = pd.DataFrame(rows, columns=["step", "phase", *times, "timeline_launches"])
        sums = table.groupby(["step", "phase"], sort=False, as_index=False).sum()
        sums[times] /= 1e9
        return sums

    def gaps(self) -> pd.DataFrame:
        """When nothing ran on the GPU in whole steps, in order.

        Returns:
            ``step``, ``start`` and ``end``; ``waited_for``, what ended it, or `THE_END`, and
            ``phase``, in which the CPU asked for that; ``calls``, nanoseconds that the CPU spent
            in calls of CUDA meanwhile, by name; ``seconds``, and of these ``called``, in calls.
        """
        rows = []
        ended_by = {activity.start: activity for activity in reversed(self.activities)}
        going: list[Call] = []
        coming = deque(self.calls)  # in order, as gaps are, so one pass does
        for step in self.whole_steps:
            busy = self._busy_in(step)
            starts, ends = np.append(step.start, busy[:, 1]), np.append(busy[:, 0], step.end)
            for start, end in np.column_stack([starts, ends])[starts < ends].tolist():
                while coming and coming[0].start < end:
                    going.append(coming.popleft())
                going = [call for call in going if call.end > start]
                calls: Counter[str] = Counter()
                for call in going:
                    calls[call.name] += min(call.end, end) - max(call.start, start)
                phase, waited_for = OUTSIDE, THE_END
                if activity := ended_by.get(end):
                    phase, waited_for = self.phase_at(activity.launched), activity.name
                rows.append((step.step, start, end, phase, waited_for, calls))
        gaps = pd.DataFrame(rows, columns=["step", "start", "end", "phase", "waited_for", "calls"])
        seconds = (gaps.end - gaps.start) / 1e9
        called = gaps.calls.map(lambda spent: sum(spent.values()) / 1e9)
        return gaps.assign(seconds=seconds, called=np.minimum(seconds, called))  # threads overlap

    def phase_at(self, when: int) -> str:
        """The phase that the CPU was in; `OUTSIDE` if it was in none."""
        place = bisect_right(self._phases, when, key=lambda each: each.start) - 1
        inside = place >= 0 and when < self._phases[place].end
        return self._phases[place].phase if inside else OUTSIDE

    @cached_property
    def _phases(self) -> list[Range]:
        return [each for each in self.ranges if each.phase != STEP]

    def _busy_in(self, where: Range) -> NDArray[np.int64]:
        reaches_in = (self.busy[:, 1] > where.start) & (self.busy[:, 0] < where.end)
        return self.busy[reaches_in].clip(where.start, where.end)
