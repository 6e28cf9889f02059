"""Times steps under ``nsys profile``, then starts the recording and marks further steps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch

from dpbench.child.messages import NVTX_DOMAIN
from dpbench.child.recorder import NullListener, Recorder, whole_steps
from dpbench.core.case import OUTSIDE
from dpbench.core.subject import Subject
from dpbench.instruments.timing import TimingRecorder
from dpbench.results.rows import STEP, Measurement
from dpbench.training.phases import PhaseListener


class PhaseRanges:
    """Marks the phases of a step as NVTX start/end ranges ``dpbench:STEP.PHASE``.

    Push/pop ranges would not cover the threads of autograd, which run backward. The ranges are
    made with torch, because older versions of nsys do not record ranges of the package nvtx.

    Args:
        step: number of the step.
        whole: whether an additional range covers the whole step. If True, the GPU is synchronized
            only at the start and end of the step, so the CPU can run ahead. If False, the GPU is
            synchronized at the start and end of each phase, so that the range of a phase covers
            all work of the phase.
        cuda: `torch.cuda`, or a fake for tests.
    """

    def __init__(self, step: int, *, whole: bool, cuda: Any) -> None:
        self.step, self.whole, self.cuda = step, whole, cuda
        self.open: list[int] = []

    def start_step(self) -> None:
        self.cuda.synchronize()
        if self.whole:
            self._start(STEP)
        self._start(OUTSIDE)

    def switch(self, phase: str) -> None:
        if not self.whole:
            self.cuda.synchronize()
        self.cuda.nvtx.range_end(self.open.pop())
        self._start(phase)

    def end_step(self) -> None:
        self.cuda.synchronize()
        while self.open:
            self.cuda.nvtx.range_end(self.open.pop())

    def _start(self, phase: str) -> None:
        self.open.append(self.cuda.nvtx.range_start(f"{NVTX_DOMAIN}:{self.step}.{phase}"))


class NsysRecorder(Recorder):
    """Times steps, and then starts the recording of nsys for more steps.

    nsys records one step without ranges, then one step with ranges of its phases, and then one or
    more steps with an additional range of the whole step. The first recorded step is not used,
    because starting the recording slows it.
    """

    def __init__(self, timed: int, *, cuda: Any = torch.cuda) -> None:
        super().__init__(timed + 1)
        self.timing, self.cuda = TimingRecorder(timed), cuda
        self._recorded: Iterator[PhaseListener] | None = None

    @cached_property
    def listener(self) -> PhaseListener:
        return self.timing

    def start_step(self) -> None:
        if self.timing.finished:
            self._recorded = self._recorded or self._start_recording()
            self.listener = next(self._recorded)
        super().start_step()

    def _start_recording(self) -> Iterator[PhaseListener]:
        """Start the recording, and return an iterator over the listeners of the recorded steps."""
        whole = [False, *[True] * whole_steps(self.timing.median_seconds)]
        self.wanted = self.timing.observed + 1 + len(whole)
        self.cuda.synchronize()
        self.cuda.profiler.start()
        self.held.callback(self.cuda.profiler.stop)
        self.held.callback(self.cuda.synchronize)  # runs before `profiler.stop`
        ranges = [PhaseRanges(step, whole=each, cuda=self.cuda) for step, each in enumerate(whole)]
        return iter([NullListener(), *ranges])

    def details(self) -> dict[str, Any]:
        return {"untraced_seconds": self.timing.median_seconds}

    def rows(self, case: Subject) -> list[Measurement]:
        return []  # `Nsys.read` makes the rows from the exported report
