"""Builds one case, warms up, and runs the active steps, in the measured process.

The process is started as ``dpbench step`` (`dpbench.commands.step`), or forked to run it.
"""

from __future__ import annotations

import gc
import math
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict
from importlib import import_module
from itertools import cycle, pairwise, takewhile
from typing import Any

import torch
from torch import Tensor

from dpbench.child.build import about_sizes, build, labels_of, pick_device
from dpbench.child.messages import MEASURING, WAITING, Steps, append_record
from dpbench.child.rank_messages import all_gather
from dpbench.child.recorder import Recorder
from dpbench.core import gpu
from dpbench.core.case import OUTSIDE, Case
from dpbench.core.errors import ConfigurationError, OutOfMemory
from dpbench.core.registry import import_named
from dpbench.training.base import TrainerBase
from dpbench.training.parallel import rank_and_ranks
from dpbench.training.phases import observed_step
from dpbench.workloads.base import examples_in


class PhaseTimes:
    """Seconds by phase and step; on CUDA from events, which do not synchronize."""

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self.marks: list[tuple[int, str, Any]] = []  # step, phase that begins, time or event
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

    @property
    def ranges(self) -> int:
        """The largest number of ranges in a step. A range lies between two changes of phase."""
        return max(Counter(step for step, phase, _ in self.marks if phase).values(), default=0)

    def seconds(self, *, wait: bool = True) -> list[dict[str, float]]:
        """For each step, the time in each phase; their sum is the step's time.

        Without ``wait``, only steps that the GPU has finished are returned.
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
) -> dict[str, Any]:
    """Run one case in this process.

    Args:
        case: what to run.
        recorder: observes the steps after the warm-up. If it wants more steps than the active
            ones, their batches are used again, from the first on.
        device: ``auto``, ``cpu`` or ``cuda``.
        warmup: number of unobserved first steps.
        active: number of steps after these.

    Returns:
        The run as plain JSON types, with the recorder's record.
    """
    target = pick_device(device)
    recorder.prepare()
    with run_exclusively(case, target) as spent:
        record = _active_steps(case, target, recorder, Steps(warmup, active), spent)
    return {**record, "spent_seconds": spent.seconds()[0]}


def _active_steps(
    case: Case, device: torch.device, recorder: Recorder, steps: Steps, spent: PhaseTimes
) -> dict[str, Any]:
    trainer, batches = build(case, device, steps.warmup + steps.active, sampled=steps.active)
    active = batches[steps.warmup :]
    sizes = [examples_in(batch) for batch in active]
    spent.switch("warmup")
    warmup = batches[: steps.warmup]
    if case.sampling != "fixed":
        warmup += active  # the first step of each size compiles and allocates
    for batch in warmup:
        with observed_step(recorder if recorder.hears_warmup else None):
            trainer.train_step(batch)
    if device.type == "cuda":
        torch.cuda.synchronize()
    scaler_before = trainer.scaler.state_dict()
    compiled = _compilations()
    spent.switch("active")
    with closing(recorder):
        for batch in active:
            with observed_step(recorder):
                loss = trainer.train_step(batch)
        check_stepped(trainer.scaler, scaler_before, sum(size > 0 for size in sizes))
        if _compilations() > compiled:
            raise ConfigurationError("torch.compile compiled in a step that counts: warm up longer")
        record = describe(case, device, trainer, loss) | asdict(steps)
        if case.sampling != "fixed":
            record |= {"sizes": sizes, "about": [about_sizes(case, steps.active)]}
        spent.switch("after")
        for batch in takewhile(lambda _: _one_wants_more(recorder), cycle(active)):
            with observed_step(None if recorder.finished else recorder):
                trainer.train_step(batch)
        return record | recorder.record(case)


def _one_wants_more(recorder: Recorder) -> bool:
    """Whether the recorder of any rank wants more steps; all ranks take the same number."""
    return "more" in all_gather("enough" if recorder.finished else "more")


def _compilations() -> int:
    """How many functions torch.compile has compiled in this process."""
    made: int = import_module("torch._dynamo.utils").counters["stats"]["unique_graphs"]
    return made


def peak_memory() -> int:
    """Peak bytes in use on this GPU since the allocator's peak was reset.

    It is the allocator's peak plus unheld memory in the pools of CUDA graphs: a replay uses that
    memory without allocating it.
    """
    held = held_by_graphs(torch.cuda.memory_snapshot(), torch.cuda.current_device())
    return torch.cuda.max_memory_allocated() + held


def held_by_graphs(segments: Iterable[Mapping[str, Any]], device: int) -> int:
    """Bytes in private pools that no tensor holds, from ``torch.cuda.memory_snapshot()``."""
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in segments
        if segment["device"] == device and tuple(segment["segment_pool_id"]) != (0, 0)
    )


def check_stepped(scaler: torch.amp.GradScaler, before: Mapping[str, Any], active: int) -> None:
    """Raise if a GradScaler skipped an active step, because a skipped step moves fewer bytes.

    Without a skip, the scaler's growth tracker counts each step, and restarts if the scale grows.

    Args:
        scaler: after these steps.
        before: the scaler's ``state_dict()`` before the active steps.
        active: the number of active steps.
    """
    if not scaler.is_enabled():
        return
    grown, steps = divmod(before["_growth_tracker"] + active, scaler.get_growth_interval())
    scale = before["scale"] * scaler.get_growth_factor() ** grown
    after = scaler.state_dict()
    if after["_growth_tracker"] != steps or not math.isclose(after["scale"], scale, rel_tol=1e-3):
        raise ConfigurationError(
            "the GradScaler has skipped a step that counts, because gradients overflowed: let it "
            "find its scale in more warm-up steps"
        )


@contextmanager
def run_exclusively(case: Case, device: torch.device) -> Iterator[PhaseTimes]:
    """Run a case while no other dpbench process uses the GPU, and leave its memory free.

    Yields the times of this process's activities, as phases of one step, from the request for the
    GPU to its release.
    """
    import_named(case)  # before locking the GPU, which others may use meanwhile
    import_module("torch._dynamo")  # the first optimizer would import it
    spent = PhaseTimes(torch.device("cpu"))
    spent.start_step("waiting")
    with with_gpus_locked(device, case.id):  # before the first CUDA call
        spent.switch("building")
        try:
            yield spent
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # they keep the model's memory alive
            if isinstance(error, torch.OutOfMemoryError):
                raise OutOfMemory(str(error).partition(" If reserved")[0]) from None
            raise
        finally:
            spent.switch("freeing")
            if device.type == "cuda":  # before the next process gets the GPU
                gc.collect()
                torch.cuda.empty_cache()
        spent.end_step()


@contextmanager
def with_gpus_locked(device: torch.device, purpose: str, number: int = 1) -> Iterator[None]:
    """Lock the first ``number`` GPUs against other dpbench processes; report any that holds one.

    The ranks of a case take no locks: the process that started them holds all locks.
    """
    locks = device.type == "cuda" and rank_and_ranks()[1] == 1
    cards = gpu.visible_gpus()[:number] if locks else []
    if locks and len(cards) < number:
        raise ConfigurationError(
            f"{purpose} needs {number} GPUs, and {len(cards)} are visible; CUDA_VISIBLE_DEVICES "
            f"chooses them, and --device cpu trains in as many processes without GPUs"
        )

    def say(what: str) -> None:
        print(f"dpbench: {WAITING} {what}", file=sys.stderr, flush=True)
        append_record({WAITING: what})

    if cards:
        say(" and ".join(card.uuid for card in cards))
    with gpu.lock_gpus(cards, purpose, lambda card, by: say(f"{card.uuid}, held by {by}")):
        append_record({MEASURING: purpose})
        yield


def describe(
    case: Case, device: torch.device, trainer: TrainerBase, loss: Tensor
) -> dict[str, Any]:
    """The record of what ran and where, as plain JSON types."""
    record: dict[str, Any] = {
        "case": asdict(case),
        "device": "cpu",
        "torch": torch.__version__,
        "labels": labels_of(trainer),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "loss": value if math.isfinite(value := float(loss)) else None,
    }
    if device.type == "cuda":
        record["device"] = torch.cuda.get_device_name(device)
    return record
