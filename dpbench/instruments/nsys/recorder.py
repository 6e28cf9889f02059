"""The process under ``nsys profile``: steps before the recording, then those that are recorded."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch

from dpbench.case import OUTSIDE, Case
from dpbench.instruments.recorder import Recorder, Silent, whole_steps
from dpbench.instruments.timing import TimingRecorder
from dpbench.process.messages import NVTX_DOMAIN
from dpbench.results.rows import STEP, Measurement
from dpbench.training.phases import PhaseListener


class PhaseRanges:
    """Marks a step's phases as NVTX start/end ranges ``dpbench:STEP.PHASE``.

    Start/end ranges, because autograd runs backward on threads of its own, which push/pop ranges
    do not cover. Of torch's and not of the nvtx package, which is silent under older nsys.

    Args:
        step: its number.
        whole: whether the step has a range around all of it, and the device is synchronized at
            its start and end alone, so that the CPU runs ahead as it usually does. Otherwise the
            device is synchronized at every border: a phase's range then has all of its work.
        cuda: `torch.cuda`, or what stands for it.
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
    """Times steps, and then has some recorded.

    What is recorded lies between ``cudaProfilerStart`` and ``cudaProfilerStop``: one step without
    ranges, in which the recording gets under way, one by phase, and whole ones.
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
        """Have nsys record from here on; returns what hears each of the steps."""
        whole = [False, *[True] * whole_steps(self.timing.median_seconds)]
        self.wanted = self.timing.heard + 1 + len(whole)
        self.cuda.synchronize()
        self.cuda.profiler.start()
        self.held.callback(self.cuda.profiler.stop)
        self.held.callback(self.cuda.synchronize)  # before that
        ranges = [PhaseRanges(step, whole=each, cuda=self.cuda) for step, each in enumerate(whole)]
        return iter([Silent(), *ranges])

    def record(self, case: Case) -> dict[str, Any]:
        return self.timing.record(case) | {"untraced_seconds": self.timing.median_seconds}

    def rows(self, case: Case) -> list[Measurement]:
        return []  # which the exported report has
