"""Trainers of which rank 1 goes wrong in each step, or is late, and ranks that want more steps."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, distributed

from dpbench.child.recorder import Recorder, whole_steps
from dpbench.core.case import Case
from dpbench.instruments.in_process import InProcessInstrument
from dpbench.results.rows import STEP, Measurement
from dpbench.training.base import Batch
from dpbench.training.parallel import rank_and_ranks
from dpbench.training.phases import phase
from dpbench.training.standard import StandardTrainer

TURNS = count()


class Fails(StandardTrainer):
    def train_step(self, batch: Batch) -> Tensor:
        if rank_and_ranks()[0] == 1:
            self.fail()
        return super().train_step(batch)

    def fail(self) -> None:
        raise NotImplementedError


class Killed(Fails):
    def fail(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Exits(Fails):
    def fail(self) -> None:
        os._exit(3)


class Vanishes(Fails):
    def fail(self) -> None:
        os._exit(0)


class Leaves(Fails):
    def fail(self) -> None:
        raise SystemExit(0)


class Raises(Fails):
    def fail(self) -> None:
        raise ValueError("the loss is not finite\nat all")


class FillsMemory(Fails):
    def fail(self) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class Waits(Fails):
    """All ranks hold ``alive`` open and write their group down, and rank 1 is never done."""

    def train_step(self, batch: Batch) -> Tensor:
        self.alive = Path("alive").open("w")  # noqa: SIM115  # until this process ends
        Path(f"group{rank_and_ranks()[0]}").write_text(str(os.getpgid(0)))
        return super().train_step(batch)

    def fail(self) -> None:
        time.sleep(600)


class ComesLast(StandardTrainer):
    """Rank 1 reduces gradients a second after rank 0 has begun to."""

    def train_step(self, batch: Batch) -> Tensor:
        loss = super().train_step(batch)
        arrived = f"arrived{(turn := next(TURNS))}"
        if rank_and_ranks()[0] == 0:
            Path(arrived).touch()
        else:
            while not Path(arrived).exists():
                time.sleep(0.01)
            time.sleep(1)
        with phase("optimizer"):
            distributed.all_reduce(torch.full((1,), float(turn)))
        return loss


class Returns(Waits):
    """Rank 1 takes no step."""

    def train_step(self, batch: Batch) -> Tensor:
        if rank_and_ranks()[0] == 1:
            Path("group1").write_text(str(os.getpgid(0)))
            return torch.zeros(())
        return super().train_step(batch)


class UnevenRecorder(Recorder):
    """Decides after one step how many it wants, by a time, as if ranks had different ones."""

    def start_step(self) -> None:
        if self.observed == 1:
            rank, _ = rank_and_ranks()
            self.wanted = 1 + whole_steps(0.1 + 2.0 * rank) + rank
        super().start_step()

    def rows(self, case: Case) -> list[Measurement]:
        return [
            Measurement(case, "uneven", STEP, "launches", float(self.observed), "", 0, "cpu", "")
        ]


@dataclass(frozen=True)
class Uneven(InProcessInstrument):
    name: ClassVar[str] = "uneven"

    def recorder(self, case: Case, steps: int | None = None) -> Recorder:
        return UnevenRecorder(steps)
