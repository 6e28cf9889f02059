"""Trainers and an instrument for tests that count one rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, distributed
from torch.utils._python_dispatch import TorchDispatchMode

from dpbench.child.recorder import Recorder
from dpbench.core.case import Case
from dpbench.instruments.in_process import InProcessInstrument
from dpbench.instruments.logical.memory import LiveMemory, tensors, track_resizing
from dpbench.instruments.logical.recorder import LogicalRecorder
from dpbench.instruments.logical.rules import have_own_operators
from dpbench.results.outcome import Outcome
from dpbench.training.base import Batch
from dpbench.training.phases import phase
from dpbench.training.standard import StandardTrainer

PAIRS = (
    ("standard", "ddp"),
    ("dpsgd", "ddp"),
    ("dpsgd_ghost", "fsdp2"),
    ("fused", "ddp"),
    ("fused", "fsdp2"),
)
"""Pairs of trainer and parallelism, with every kind of operator and collective over ranks."""


Heards = list[list[Outcome]]
"""By rank, the counts of each of `PAIRS`."""


def case_of(trainer: str = "standard", parallel: str = "fsdp2", gpus: int = 4, **axes: Any) -> Case:
    """Two layers with widths not divisible by four, whose gradients exceed DDP's first bucket."""
    axes = {"model_size": "1001x90x2x2", "seq_len": 8, "batch_size": 2 * gpus} | axes
    return Case(trainer, parallel=parallel, gpus=gpus, **axes)


class Alive(TorchDispatchMode):
    """Tracks the memory of real tensors, as the counter does for fake ones."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = LiveMemory()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if have_own_operators(types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for tensor in tensors(out):
            self.memory.track(tensor)
        return out


class PeakRecorder(LogicalRecorder):
    """Also notes the peak of live bytes in its one step."""

    def __init__(self, memory: LiveMemory) -> None:
        super().__init__(1)
        self.memory = memory

    def start_step(self) -> None:
        self.memory.peak = self.memory.now
        super().start_step()

    def end_step(self) -> None:
        super().end_step()
        self.notes = [str(self.memory.peak)]


@dataclass(frozen=True)
class Heard(InProcessInstrument):
    """Counts the operators of all `PAIRS` as they run, each in a new process group."""

    name: ClassVar[str] = "heard"

    def recorder(self, case: Case, steps: int | None = None) -> Recorder:
        return LogicalRecorder(steps)

    def record_case(self, case: Case) -> Outcome:
        from dpbench.child.case import run_case

        heard = []
        for trainer, parallel in PAIRS:
            pair = replace(case, trainer=trainer, parallel=parallel)
            alive = Alive()
            recorder = PeakRecorder(alive.memory)
            # DDP's buckets are final from the second step on.
            warmup = 2 if (trainer, parallel) == ("standard", "ddp") else 1
            with alive, track_resizing(alive.memory):
                run_case(pair, recorder, device="cpu", warmup=warmup, active=1)
            heard.append(recorder.outcome(pair).as_json())
        return Outcome(case, (), details={"heard": heard})


class Noisy(StandardTrainer):
    """Adds noise to this rank's shard of each gradient."""

    def train_step(self, batch: Batch) -> Tensor:
        with phase("forward"):
            loss = self.mean_loss(self.model, batch)
        with phase("backward"):
            loss.backward()
            self.reduce()
        with phase("noise"):
            for parameter in self.model.parameters():
                part: Any = parameter.grad
                part.to_local().add_(self.noise(part))
        with phase("optimizer"):
            self.plain_optimizer.step()
            self.plain_optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def reduce(self) -> None:
        """Do nothing: FSDP2 has reduced the gradients."""

    def noise(self, gradient: Any) -> Tensor:
        return torch.randn_like(gradient.to_local())


class ReducesTwice(Noisy):
    def reduce(self) -> None:
        for parameter in self.model.parameters():
            part: Any = parameter.grad
            distributed.all_reduce(part.to_local())


class DrawsAll(Noisy):
    """Draws noise for a whole parameter, and takes this rank's shard."""

    def noise(self, gradient: Any) -> Tensor:
        rows, *_ = gradient.to_local().shape
        return torch.randn(gradient.shape)[:rows]
