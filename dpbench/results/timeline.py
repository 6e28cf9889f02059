"""When a GPU was busy, and how much was launched, by step and phase.

Times are whole nanoseconds of one clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dpbench.results.rows import STEP


class Activity(NamedTuple):
    """A kernel, a copy or a memset on the device.

    ``launched`` is when the CPU launched it, or its start if that was not recorded.
    """

    start: int
    end: int
    launched: int


class Range(NamedTuple):
    """A phase of a step as the CPU marked it; or a whole step, whose phase is `STEP`."""

    step: int
    phase: str
    start: int
    end: int


@dataclass(frozen=True)
class Timeline:
    """The recorded timeline of a GPU that was busy; ranges and activities by start.

    In a step with a `STEP` range the CPU runs ahead, so its phases say nothing of the GPU. In any
    other step the GPU finished each phase before the next began, so phases have busy times.
    """

    device: str
    tool: str
    ranges: Sequence[Range]
    activities: Sequence[Activity]

    @cached_property
    def busy(self) -> NDArray[np.int64]:
        """Starts and ends of the disjoint spans in which anything ran, in order; shape (n, 2)."""
        starts, ends = np.array([(each.start, each.end) for each in self.activities]).T
        ends = np.maximum.accumulate(ends)
        idle_before = np.append(True, starts[1:] > ends[:-1])
        return np.column_stack([starts[idle_before], ends[np.append(idle_before[1:], True)]])

    @property
    def whole_steps(self) -> list[Range]:
        """The `STEP` ranges; if there are no ranges at all, one over the whole recording."""
        if self.ranges:
            return [each for each in self.ranges if each.phase == STEP]
        return [Range(0, STEP, int(self.busy[0, 0]), int(self.busy[-1, 1]))]

    def usages(self) -> pd.DataFrame:
        """The metrics of nsys by ``step`` and ``phase``; whole steps have the phase `STEP`."""
        whole = self.whole_steps
        marked = {each.step for each in whole}
        launched = np.sort([each.launched for each in self.activities])
        rows = [
            (
                *(each.step, each.phase, each.end - each.start),
                np.diff(self.busy.clip(each.start, each.end)).sum(),
                np.diff(np.searchsorted(launched, (each.start, each.end))).sum(),
            )
            for each in (*(r for r in self.ranges if r.step not in marked), *whole)
        ]
        times = ["timeline_seconds", "timeline_busy_seconds"]
        table = pd.DataFrame(rows, columns=["step", "phase", *times, "timeline_launches"])
        sums = table.groupby(["step", "phase"], sort=False, as_index=False).sum()
        sums[times] /= 1e9
        return sums
