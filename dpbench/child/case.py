"""Builds a case in the measured process, warms up, and runs the observed steps.

The measured process runs the command ``dpbench step`` (`dpbench.commands.step`).
"""

from __future__ import annotations

import gc
import math
import sys
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from importlib import import_module
from itertools import cycle, pairwise, takewhile
from typing import Any

import torch

from dpbench.child.build import about_sizes, build, labels_of, pick_device
from dpbench.child.messages import MEASURING, WAITING, Steps, append_record
from dpbench.child.recorder import Recorder
from dpbench.core import gpu
from dpbench.core.case import OUTSIDE, Case
from dpbench.core.errors import CaseOutOfMemory, ConfigurationError
from dpbench.core.registry import import_named
from dpbench.results.outcome import Outcome
from dpbench.training.parallel import all_gather, rank_and_ranks
from dpbench.training.phases import observed_step
from dpbench.workloads.base import examples_in


class PhaseTimes:
    """Measures the seconds of each phase in each step, on CUDA with events.

    Attributes:
        on_cuda: whether events are used, which do not make the CPU wait for the GPU.
        marks: for each change of phase, the step, the phase that begins, and a time or an event.
        step: number of the current step.
        ends: the events at the ends of steps that `newly_finished` has not yet returned.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self.marks: list[tuple[int, str, Any]] = []
        self.ends = deque[Any]()
        self.step = -1

    def start_step(self, phase: str = OUTSIDE) -> None:
        self.step += 1
        self.switch(phase)

    def switch(self, phase: str) -> None:
        if self.on_cuda:
            now: Any = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            now = time.perf_counter()
        self.marks.append((self.step, phase, now))

    def end_step(self) -> None:
        self.switch("")
        if self.on_cuda:
            self.ends.append(self.marks[-1][2])

    def newly_finished(self, *, wait: bool = False) -> int:
        """Return how many steps the GPU has finished since the last call. On the CPU, return 0.

        With ``wait``, wait for the GPU first. While a graph is captured, return 0.
        """
        if not self.ends or torch.cuda.is_current_stream_capturing():
            return 0
        if wait:
            self.ends[-1].synchronize()
        number = sum(1 for _ in takewhile(lambda end: end.query(), self.ends))
        for _ in range(number):
            self.ends.popleft()
        return number

    @property
    def ranges(self) -> int:
        """Largest number of ranges in a step. A range lies between two changes of phase."""
        return max(Counter(step for step, phase, _ in self.marks if phase).values(), default=0)

    def seconds(self, *, wait: bool = True) -> list[dict[str, float]]:
        """Return the seconds of each phase in each step. A step's seconds add up to its duration.

        Without ``wait``, the result contains only steps that the GPU has finished.
        """
        steps: list[dict[str, float]] = []
        if self.on_cuda and wait:
            torch.cuda.synchronize()
        for (step, phase, start), (_, _, end) in pairwise(self.marks):
            if not phase:
                continue
            if self.on_cuda and not (wait or end.query()):
                return [dict(each) for each in steps[:step]]
            if step == len(steps):
                steps.append(defaultdict(float))
            elapsed = start.elapsed_time(end) / 1e3 if self.on_cuda else end - start
            steps[step][phase] += elapsed
        return [dict(each) for each in steps]


def run_case(
    case: Case, recorder: Recorder, *, device: str = "auto", warmup: int = 3, active: int = 5
) -> Outcome:
    """Run one case in this process, and return the outcome of the observed steps.

    Args:
        case: the case to run.
        recorder: observes the steps after the warm-up; with ``hears_warmup``, also the warm-up. If
            the recorder wants more steps than ``active``, further steps use the active steps'
            batches again.
        device: ``auto``, ``cpu`` or ``cuda``.
        warmup: number of warm-up steps. If batch sizes are sampled, a warm-up step with each active
            batch is added.
        active: number of active steps, which follow the warm-up.
    """
    steps = Steps(warmup, active)
    target = pick_device(device)
    recorder.wanted = recorder.wanted or active
    recorder.prepare()
    with run_exclusively(case, target) as spent:
        labels, about = _active_steps(case, target, recorder, steps, spent)
    outcome = recorder.outcome(case)  # may be slow, so the GPU is free again
    notes = outcome.notes
    if case.sampling != "fixed":
        notes = (about_sizes(case, active), *notes)
    about |= {**asdict(steps), "spent_seconds": spent.seconds()[0]}
    return replace(outcome, labels=labels, notes=notes, details={**about, **outcome.details})


def _active_steps(
    case: Case, device: torch.device, recorder: Recorder, steps: Steps, spent: PhaseTimes
) -> tuple[dict[str, str], dict[str, Any]]:
    """Take all steps, and return the trainer's labels, and details of the trained model."""
    trainer, batches = build(case, device, steps.warmup + steps.active, sampled=steps.active)
    active = batches[steps.warmup :]
    spent.switch("warmup")
    warmup = batches[: steps.warmup]
    if case.sampling != "fixed":
        recorder.sizes = [examples_in(batch) for batch in active]
        warmup += active  # the first step with each batch size compiles and allocates
    for batch in warmup:
        with observed_step(recorder if recorder.hears_warmup else None):
            trainer.train_step(batch)
    if device.type == "cuda":
        torch.cuda.synchronize()
    compiled = _compilations()
    spent.switch("active")
    with closing(recorder):
        for batch in active:
            with observed_step(recorder):
                loss = trainer.train_step(batch)
        if _compilations() > compiled:
            raise ConfigurationError(
                "torch.compile compiled a function during a counted step: use more warm-up steps"
            )
        number = float(loss)
        parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
        about = {"parameters": parameters, "loss": number if math.isfinite(number) else None}
        labels = labels_of(trainer)
        spent.switch("after")
        for batch in takewhile(lambda _: _any_rank_wants_more(recorder), cycle(active)):
            with observed_step(None if recorder.finished else recorder):
                trainer.train_step(batch)
    return labels, about


def _any_rank_wants_more(recorder: Recorder) -> bool:
    """Return True if the recorder of any rank wants another step, which all ranks then take."""
    return "more" in all_gather("enough" if recorder.finished else "more")


def _compilations() -> int:
    """Return the number of graphs that torch.compile has compiled in this process."""
    made: int = import_module("torch._dynamo.utils").counters["stats"]["unique_graphs"]
    return made


def peak_memory() -> int:
    """Return the largest number of bytes in use on this GPU since the peak was last reset.

    The result is the allocator's peak plus the free memory in the pools of CUDA graphs. A graph's
    replay uses this memory without allocating it.
    """
    held = held_by_graphs(torch.cuda.memory_snapshot(), torch.cuda.current_device())
    return torch.cuda.max_memory_allocated() + held


def held_by_graphs(segments: Iterable[Mapping[str, Any]], device: int) -> int:
    """Return the free bytes in the pools of CUDA graphs on a device.

    Args:
        segments: the result of ``torch.cuda.memory_snapshot()``.
        device: number of the device.
    """
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in segments
        if segment["device"] == device and tuple(segment["segment_pool_id"]) != (0, 0)
    )


@contextmanager
def run_exclusively(case: Case, device: torch.device) -> Iterator[PhaseTimes]:
    """Lock the GPU against other dpbench processes, and free its memory at the end.

    Yields:
        A `PhaseTimes` with one step, whose phases are the activities of this process. The step
        lasts from the request for the GPU to the GPU's release.
    """
    # Slow imports run before the GPU is locked, so that others can use the GPU meanwhile.
    import_named(case)
    import_module("torch._dynamo")  # the first optimizer would import this module
    spent = PhaseTimes(torch.device("cpu"))
    spent.start_step("waiting")
    with with_gpus_locked(device, case.id):  # the first CUDA call comes later
        spent.switch("building")
        try:
            yield spent
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # these frames hold the model's memory
            if isinstance(error, torch.OutOfMemoryError):
                raise CaseOutOfMemory(str(error).partition(" If reserved")[0]) from None
            raise
        finally:
            spent.switch("freeing")
            if device.type == "cuda":  # the next process needs this memory
                gc.collect()
                torch.cuda.empty_cache()
        spent.end_step()


@contextmanager
def with_gpus_locked(device: torch.device, purpose: str, number: int = 1) -> Iterator[None]:
    """Lock the first ``number`` GPUs, and report which other dpbench process holds a lock.

    A rank of a case takes no locks, because the process that started the ranks holds all locks.
    """
    locks = device.type == "cuda" and rank_and_ranks()[1] == 1
    cards = gpu.visible_gpus()[:number] if locks else []
    if locks and len(cards) < number:
        raise ConfigurationError(
            f"{purpose} needs {number} GPUs, and {len(cards)} are visible; make more GPUs visible "
            f"with CUDA_VISIBLE_DEVICES, or train in {number} processes without GPUs by "
            f"--device cpu"
        )

    def say(what: str) -> None:
        print(f"dpbench: {WAITING} {what}", file=sys.stderr, flush=True)
        append_record({WAITING: what})

    if cards:
        say(" and ".join(card.uuid for card in cards))
    with gpu.lock_gpus(cards, purpose, lambda card, by: say(f"{card.uuid}, held by {by}")):
        append_record({MEASURING: purpose})
        yield
