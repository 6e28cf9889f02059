"""What a GPU did when, and who asked for it: busy time, gaps and launches, by phase.

Times are whole nanoseconds of one clock.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from dpbench.case import OUTSIDE
from dpbench.results.rows import STEP

THE_END = "the end of the step"
"""What the CPU waits for when the GPU has done all its work."""


@dataclass(frozen=True)
class Activity:
    """A kernel by its short name, a copy or a memset on the device.

    ``bytes`` are what a copy or memset moved, 0 for a kernel; ``launched`` is when the CPU asked
    for it, None if that was not recorded.
    """

    start: int
    end: int
    kind: str
    name: str
    bytes: int = 0
    launched: int | None = None


@dataclass(frozen=True)
class Call:
    """A call of CUDA's API on the CPU, by its name without a version."""

    start: int
    end: int
    name: str


@dataclass(frozen=True)
class Range:
    """A phase of a step as the CPU marked it, or with the phase `STEP` a whole step."""

    step: int
    phase: str
    start: int
    end: int


@dataclass(frozen=True)
class Usage:
    """How a phase or step used the GPU."""

    step: int
    phase: str
    seconds: float
    busy_seconds: float
    launches: int


@dataclass(frozen=True)
class Gap:
    """When nothing ran on the GPU in a whole step.

    ``waited_for`` is what ended it, or `THE_END`, ``phase`` that in which the CPU asked for it;
    ``calls`` are nanoseconds that the CPU spent in calls of CUDA meanwhile, by name.
    """

    step: int
    start: int
    end: int
    phase: str
    waited_for: str
    calls: Mapping[str, int]

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / 1e9

    @property
    def call_seconds(self) -> float:
        """How much of it the CPU spent in calls of CUDA; threads can overlap."""
        return min(self.seconds, sum(self.calls.values()) / 1e9)


@dataclass(frozen=True)
class Timeline:
    """A recorded timeline of one GPU; everything in the order of its start.

    In a step that has a range of its own (`STEP`), phases only say where the CPU was. In others
    the GPU finished each phase's work before the next began, and phases have busy shares.
    """

    device: str
    tool: str
    ranges: Sequence[Range]
    activities: Sequence[Activity]
    calls: Sequence[Call]

    @cached_property
    def busy(self) -> list[tuple[int, int]]:
        """When anything ran on the GPU: intervals that do not touch, in order."""
        merged: list[tuple[int, int]] = []
        for activity in self.activities:
            if merged and activity.start <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(merged[-1][1], activity.end)
            else:
                merged.append((activity.start, activity.end))
        return merged

    @property
    def whole_steps(self) -> list[Range]:
        """Steps with a range of their own; all that was recorded, if nobody marked a range."""
        if self.ranges or not self.busy:
            return [each for each in self.ranges if each.phase == STEP]
        return [Range(0, STEP, self.busy[0][0], self.busy[-1][1])]

    def usages(self) -> list[Usage]:
        """Of each phase in steps that have phases, and of each whole step."""
        whole = self.whole_steps
        marked = {each.step for each in whole}
        sums: dict[tuple[int, str], list[int]] = defaultdict(lambda: [0, 0, 0])
        for each in (*(r for r in self.ranges if r.step not in marked), *whole):
            busy = sum(end - start for start, end in self._busy_in(each))
            parts = (each.end - each.start, busy, self._launches_in(each))
            for place, part in enumerate(parts):
                sums[each.step, each.phase][place] += part
        return [
            Usage(*key, time / 1e9, busy / 1e9, launches)
            for key, (time, busy, launches) in sums.items()
        ]

    def gaps(self) -> list[Gap]:
        """Of the whole steps, in order."""
        gaps: list[Gap] = []
        ended_by = {activity.start: activity for activity in reversed(self.activities)}
        going: list[Call] = []
        coming = deque(self.calls)  # in order, as gaps are, so one pass does
        for step in self.whole_steps:
            working = [(step.start, step.start), *self._busy_in(step), (step.end, step.end)]
            for (_, start), (end, _) in pairwise(working):
                if end <= start:
                    continue
                while coming and coming[0].start < end:
                    going.append(coming.popleft())
                going = [call for call in going if call.end > start]
                calls: Counter[str] = Counter()
                for call in going:
                    calls[call.name] += min(call.end, end) - max(call.start, start)
                phase, waited_for = OUTSIDE, THE_END
                if activity := ended_by.get(end):
                    phase, waited_for = self.phase_at(_launched(activity)), activity.name
                gaps.append(Gap(step.step, start, end, phase, waited_for, calls))
        return gaps

    def during(self, ranges: Iterable[Range]) -> list[Activity]:
        """What was launched in some ranges."""
        order, times = self._by_launch
        return [
            order[i]
            for each in ranges
            for i in range(bisect_left(times, each.start), bisect_left(times, each.end))
        ]

    def phase_at(self, when: int) -> str:
        """The phase that the CPU was in; `OUTSIDE` if it was in none."""
        phases, starts = self._phases
        place = bisect_right(starts, when) - 1
        inside = place >= 0 and when < phases[place].end
        return phases[place].phase if inside else OUTSIDE

    @cached_property
    def _phases(self) -> tuple[list[Range], list[int]]:
        phases = [each for each in self.ranges if each.phase != STEP]
        return phases, [each.start for each in phases]

    @cached_property
    def _by_launch(self) -> tuple[list[Activity], list[int]]:
        # Without its call (it lies before the recording), its own time is the best guess.
        order = sorted(self.activities, key=_launched)
        return order, [*map(_launched, order)]

    def _launches_in(self, where: Range) -> int:
        times = self._by_launch[1]
        return bisect_left(times, where.end) - bisect_left(times, where.start)

    def _busy_in(self, where: Range) -> Iterator[tuple[int, int]]:
        first = bisect_right(self.busy, where.start, key=lambda interval: interval[1])
        for start, end in self.busy[first:]:
            if start >= where.end:
                return
            yield max(start, where.start), min(end, where.end)


def _launched(activity: Activity) -> int:
    return activity.start if activity.launched is None else activity.launched


def unversioned(call: str) -> str:
    """The name of a CUDA call without its version, e.g. of ``cudaLaunchKernel_v7000``."""
    return re.sub(r"_v\d+$", "", call)
