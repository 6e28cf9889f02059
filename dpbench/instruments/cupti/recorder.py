"""Times the first steps, and counts the following steps with CUPTI."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import count
from typing import Any

from dpbench.child.recorder import Recorder, device_and_torch, on_cuda, whole_steps
from dpbench.core.errors import InstrumentError
from dpbench.core.metrics import unit
from dpbench.core.subject import Subject
from dpbench.instruments.cupti import NAME
from dpbench.instruments.cupti.library import load_library
from dpbench.instruments.cupti.ranges import MAX_RANGES, StepCounter, Target
from dpbench.instruments.timing import TimingRecorder, timing_rows
from dpbench.results.rows import STEP, Measurement
from dpbench.training.phases import PhaseListener


class CuptiRecorder(Recorder):
    """Times steps without counters, then counts steps by phase, then counts whole steps.

    The steps of a script may differ. Therefore the recorder counts by default only DRAM bytes,
    time and busy shares, which fit in one pass (see `BASIC`). Unless ``alike`` is True,
    each pass counts as many steps by phase, and as many whole steps, as steps were timed.

    Args:
        timed: number of steps to time.
        names: names of metrics to count in addition to DRAM bytes, time and busy shares. If None,
            all metrics of the chip are counted.
        alike: whether all steps are equal, as in a case. If True, each pass counts one step by
            phase, and then three whole steps if a step is short, or one whole step otherwise.
    """

    def __init__(
        self, timed: int = 5, names: Iterable[str] | None = (), *, alike: bool = False
    ) -> None:
        super().__init__(3 * timed)
        self.timing = TimingRecorder(timed)
        self.names, self.alike = names, alike
        self._counter: StepCounter | None = None

    def prepare(self) -> None:
        load_library()

    @cached_property
    def listener(self) -> PhaseListener:
        return self.timing

    def start_step(self) -> None:
        if self.timing.finished and self._counter is None:
            timed = self.timing.observed
            by_phase, whole = timed, timed
            if self.alike:
                by_phase, whole = 1, whole_steps(self.timing.median_seconds)
            self._target = Target.of_torch()
            self.notes = [self._target.note] if self._target.note else []
            rounds = [*[True] * by_phase, *[False] * whole]
            # A counted step may have more ranges than a timed step, for example in more
            # micro-batches.
            most = max(2 * self.timing.listener.ranges, 0 if self.alike else MAX_RANGES)
            self.listener = self._counter = StepCounter(self.names, self._target, rounds, most)
            self.held.callback(self._counter.close)
            self.wanted = timed + self._counter.steps
        super().start_step()

    def details(self) -> dict[str, Any]:
        """Return the details of the timed steps and, if steps were counted, of these steps.

        The keys ``cupti`` (version of libcupti), ``chip``, ``passes``, ``counters`` (of each
        metric) and ``counted`` (the result of `StepCounter.rounds`) describe the counted steps.
        """
        self.timing.wait = self.wait
        details = self.timing.details() | {"cupti": "", "counted": []}
        if counter := self._counter:
            details |= {
                "cupti": "{}.{}".format(*self._target.library.cuda_version),
                "chip": counter.chip.name,
                "passes": counter.passes,
                "counters": {metric.name: metric.counters for metric in counter.metrics},
                "counted": counter.rounds(),
            }
        return details

    def rows(self, case: Subject) -> list[Measurement]:
        if not on_cuda():
            raise InstrumentError("cupti counts work of a GPU, but the steps ran on the CPU")
        return list(cupti_rows(case, {**device_and_torch(), **self.details()}, self.sizes))


def cupti_rows(
    case: Subject, details: Mapping[str, Any], sizes: Sequence[int] = ()
) -> Iterator[Measurement]:
    """Yield the rows of the timed steps and of the counted steps."""
    device, tool = details["device"], f"cupti {details['cupti']}, torch {details['torch']}"
    for row in timing_rows(case, details, sizes):
        yield replace(row, instrument=NAME, tool=tool)
    repeats = {True: count(), False: count()}  # True for whole steps, False for steps by phase
    for step in details["counted"]:
        where = (next(repeats[STEP in step]), device, tool)
        for phase, values in step.items():
            for metric, value in values.items():
                of = "B" if "bytes" in metric.partition("__")[2] else unit(metric)
                yield Measurement(case, NAME, phase, metric, value, of, *where)
