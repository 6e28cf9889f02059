"""The child process under the PyTorch profiler: traces, operators and memory of some steps.

``dpbench step --profile DIR`` runs this instead of the plain steps of `dpbench.process.step`. Never
under Nsight Compute: both want the GPU's one profiling interface.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function
from torch.profiler import schedule as torch_schedule

from dpbench.case import OUTSIDE, Case
from dpbench.process.build import build, pick_device
from dpbench.process.messages import Schedule
from dpbench.process.step import PhaseTimes, alone_on, describe
from dpbench.training.base import Batch, TrainerBase
from dpbench.training.phases import observed_step

RECORDED = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)


class PhaseAnnotations:
    """Marks each phase in the trace.

    The device is not stopped at the borders, because a launch belongs to the phase in which the
    CPU made it; so does an allocation.
    """

    def start_step(self, phase: str = OUTSIDE) -> None:
        self.annotation: Any = record_function(f"dpbench.{phase}")
        self.annotation.__enter__()

    def switch(self, phase: str) -> None:
        self.end_step()
        self.start_step(phase)

    def end_step(self) -> None:
        self.annotation.__exit__(None, None, None)


def profile_case(
    case: Case, *, device: str = "auto", schedule: Schedule, directory: Path
) -> dict[str, Any]:
    """Profile one case in this process.

    Writes into ``directory``, for each cycle N of the schedule, ``trace_N.json.gz`` (Chrome trace)
    and ``operators_N.json`` (sums by operator and by input shape), and on CUDA
    ``memory_snapshot.pickle``, taken in one more step after the others, because recording the
    stack of each allocation slows a step down. Returns what was done, as plain JSON types.
    """
    planned = torch_schedule(**asdict(schedule))
    cycles = count()

    def run(target: torch.device, spent: PhaseTimes) -> dict[str, Any]:
        trainer, batches = build(case, target, schedule.steps + 1)
        annotations, on_cuda = PhaseAnnotations(), target.type == "cuda"
        with profiler_of(
            on_cuda,
            schedule=planned,
            on_trace_ready=lambda profiler: save(profiler, directory, next(cycles)),
        ) as profiler:
            for number, batch in enumerate(batches[:-1]):
                with observed_step(annotations if planned(number) in RECORDED else None):
                    loss = trainer.train_step(batch)
                if on_cuda:  # or what still runs would count as the next step's
                    torch.cuda.synchronize()
                profiler.step()
        if on_cuda:
            _snapshot(trainer, batches[-1], directory / "memory_snapshot.pickle")
        return {**describe(case, target, trainer, loss), "schedule": asdict(schedule)}

    return alone_on(case, pick_device(device), run)


def profiler_of(on_cuda: bool, **options: Any) -> profile:
    """The profiler that records what `save` writes."""
    return profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA][: 1 + on_cuda],
        record_shapes=True,
        profile_memory=True,
        with_flops=True,
        **options,
    )


def save(profiler: profile, directory: Path, cycle: int) -> None:
    """Write the trace and the operators of one cycle."""
    profiler.export_chrome_trace(str(directory / f"trace_{cycle}.json.gz"))
    operators = json.dumps(_operators(profiler))
    (directory / f"operators_{cycle}.json").write_text(operators, encoding="utf-8")


def _operators(profiler: profile) -> list[dict[str, Any]]:
    """Sums over the recorded steps of a cycle: once by name, once by name and input shapes."""
    return [
        {
            "name": event.key,
            "kind": _kind(event),
            "input_shapes": str(event.input_shapes) if by_shape else None,
            "calls": event.count,
            "self_cpu_seconds": event.self_cpu_time_total / 1e6,
            "cpu_seconds": event.cpu_time_total / 1e6,
            "self_device_seconds": event.self_device_time_total / 1e6,
            "device_seconds": event.device_time_total / 1e6,
            "self_cpu_memory_bytes": event.self_cpu_memory_usage,
            "self_device_memory_bytes": event.self_device_memory_usage,
            "flops": event.flops,
        }
        for by_shape in (False, True)
        for event in profiler.key_averages(group_by_input_shape=by_shape)
    ]


def _kind(event: Any) -> str:
    if event.is_user_annotation:
        return "annotation"
    return "operator" if event.device_type.name == "CPU" else "kernel"


def _snapshot(trainer: TrainerBase, batch: Batch, path: Path) -> None:
    """The allocations of one more step, each with its Python stack, for PyTorch's memory_viz."""
    # A step of the 1b model allocates and frees some 15 000 times.
    torch.cuda.memory._record_memory_history(max_entries=400_000, stacks="python")
    try:
        trainer.train_step(batch)
        torch.cuda.memory._dump_snapshot(str(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
