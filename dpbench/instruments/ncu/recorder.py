"""Marks steps and phases as NVTX ranges for Nsight Compute."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from dpbench.child.messages import NVTX_DOMAIN, NVTX_END
from dpbench.child.recorder import Recorder
from dpbench.core.case import OUTSIDE
from dpbench.core.subject import Subject
from dpbench.results.rows import Measurement


class NvtxRanges:
    """Marks each phase as an NVTX start/end range ``STEP.PHASE`` in dpbench's NVTX domain.

    Push/pop ranges would not cover the threads of autograd, which run backward. The GPU is
    synchronized at the start and end of each range, so that work counts in the phase that
    launched it.
    """

    def __init__(self) -> None:
        import nvtx
        import torch

        self.synchronize = torch.cuda.synchronize
        self.domain = nvtx.get_domain(NVTX_DOMAIN)
        self.step = -1
        self.range: Any = None

    def start_step(self) -> None:
        self.step += 1
        self.synchronize()
        self._start(f"{self.step}.{OUTSIDE}")

    def switch(self, phase: str) -> None:
        self.end_step()
        self._start(f"{self.step}.{phase}")

    def end_step(self) -> None:
        self.synchronize()
        self.domain.end_range(self.range)

    def finish(self) -> None:
        """Mark the end of the last step, so that a truncated report can be detected."""
        self._start(NVTX_END)
        self.end_step()

    def _start(self, name: str) -> None:
        self.range = self.domain.start_range(self.domain.get_event_attributes(message=name))


class NvtxRecorder(Recorder):
    """Marks phases as NVTX ranges. Records no times, because the profiler slows the steps."""

    @cached_property
    def listener(self) -> NvtxRanges:
        ranges = NvtxRanges()
        self.held.callback(self._finish)
        return ranges

    def _finish(self) -> None:
        if self.listener.step >= self.observed:  # the script ended within a step
            self.listener.end_step()
        self.listener.finish()

    def rows(self, case: Subject) -> list[Measurement]:
        return []
