"""The process under ``nsys profile``: steps before the recording, then those that are recorded."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle
from statistics import median
from typing import Any

import torch

from dpbench.case import OUTSIDE, Case
from dpbench.instruments.cupti.child import SHORT_SECONDS, WHOLE_STEPS
from dpbench.process.messages import NVTX_DOMAIN
from dpbench.process.step import run_case
from dpbench.results.rows import STEP
from dpbench.training.base import Batch, TrainerBase
from dpbench.training.phases import observed_step


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


def trace_case(
    case: Case, *, warmup: int, active: int, device: str = "cuda", cuda: Any = torch.cuda
) -> dict[str, Any]:
    """Run one case in this process: first steps that are not recorded, then those that are.

    What is recorded lies between ``cudaProfilerStart`` and ``cudaProfilerStop``: one step without
    ranges, in which the recording gets under way, one by phase, and whole ones.
    """

    def trace(
        trainer: TrainerBase, batches: Iterable[Batch], record: dict[str, Any]
    ) -> dict[str, Any]:
        seconds = median(sum(step.values()) for step in record["phase_seconds"])
        whole = [False, *[True] * (WHOLE_STEPS if seconds < SHORT_SECONDS else 1)]
        ranges = [PhaseRanges(step, whole=each, cuda=cuda) for step, each in enumerate(whole)]
        cuda.synchronize()
        cuda.profiler.start()
        try:
            for listener, batch in zip([None, *ranges], cycle(batches), strict=False):
                with observed_step(listener):
                    trainer.train_step(batch)
            cuda.synchronize()
        finally:
            cuda.profiler.stop()
        return {"untraced_seconds": seconds}

    return run_case(case, device=device, warmup=warmup, active=active, after=trace)
