"""The child process: the steps that are timed, and after them those that are counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from itertools import cycle, islice
from statistics import median
from typing import Any

from dpbench.case import Case
from dpbench.instruments.cupti.library import load_library
from dpbench.instruments.cupti.steps import StepCounter, Target, enough_ranges
from dpbench.process.build import pick_device
from dpbench.process.step import run_case
from dpbench.training.base import Batch, TrainerBase
from dpbench.training.phases import observed_step

WHOLE_STEPS = 3
"""How often a short step is counted as a whole: one of them can have met a pause of the CPU."""

SHORT_SECONDS = 1.0
"""Below this such a pause matters."""


def count_case(
    case: Case,
    metrics: Iterable[str] | None = None,
    *,
    device: str = "auto",
    warmup: int = 3,
    active: int = 5,
    find_target: Callable[[], Target] | None = None,
) -> dict[str, Any]:
    """Run one case in this process, see `run_case`: time its steps, then count some more.

    Counted are DRAM bytes, time, busy shares, and ``metrics``: everything if None. ``find_target``
    makes what they are counted on, once there is a CUDA context; by default torch's GPU.

    Returns:
        The record of `run_case`, with libcupti's version as ``cupti``, ``chip``, ``passes``, the
        ``counters`` of each metric, and as ``counted`` the metrics of a step by phase and of whole
        steps, as `StepCounter.rounds` has them.
    """
    if find_target is None:
        pick_device(device)
        load_library()  # or fail, before this process holds the GPU
        find_target = Target.of_torch

    def count(
        trainer: TrainerBase, batches: Iterable[Batch], record: dict[str, Any]
    ) -> dict[str, Any]:
        seconds = median(sum(step.values()) for step in record["phase_seconds"])
        whole_steps = WHOLE_STEPS if seconds < SHORT_SECONDS else 1
        target = find_target()
        rounds, most = [True, *[False] * whole_steps], enough_ranges(record["ranges"])
        with closing(StepCounter(metrics, target, rounds, most)) as counter:
            for batch in islice(cycle(batches), counter.steps):
                with observed_step(counter):
                    trainer.train_step(batch)
            counted = counter.rounds()
        return {
            "cupti": "{}.{}".format(*target.library.cuda_version),
            "chip": counter.chip.name,
            "passes": counter.passes,
            "counters": {metric.name: metric.counters for metric in counter.metrics},
            "counted": counted,
        }

    return run_case(case, device=device, warmup=warmup, active=active, after=count)
