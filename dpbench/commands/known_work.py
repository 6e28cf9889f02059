"""Work and a message of known size, to calibrate counters.

Both are trainers, so dpbench runs and counts them in the same way as any other case.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn

from dpbench.commands.doctor import EXAMPLE_BYTES, IDLE_PHASE, MESSAGE_PHASE, WORK
from dpbench.training.base import Batch, TrainerBase
from dpbench.training.phases import phase

IDLE_SECONDS = 0.05
"""Time per step in which the GPU is idle."""


class KnownWork(TrainerBase):
    """Copies, fills and reads ``batch_size * EXAMPLE_BYTES`` bytes on its device, then idles.

    The copy negates the values, so that SMs copy. A copy engine might do a plain copy.
    """

    def __init__(self, model: nn.Module, *, batch_size: int, **options: Any) -> None:
        super().__init__(model, batch_size=batch_size, **options)
        device = next(model.parameters()).device
        # The values are random, because some GPUs compress zeros in memory.
        self.source = torch.rand(batch_size * EXAMPLE_BYTES // 4, device=device)
        self.copy = torch.empty_like(self.source)
        self.loss = torch.zeros((), device=device)
        self.work: Mapping[str, Callable[[], object]] = {
            "copy": lambda: torch.neg(self.source, out=self.copy),
            "fill": lambda: self.copy.fill_(0.5),
            "read": lambda: torch.sum(self.source),
        }

    def train_step(self, batch: Batch) -> Tensor:
        for name, (work, *_) in WORK.items():
            self.work[work]()  # L2 then has as many dirty bytes before the counted work as after it
            with phase(name):
                self.work[work]()
        with phase(IDLE_PHASE):
            time.sleep(IDLE_SECONDS)
        return self.loss


class KnownMessage(TrainerBase):
    """Sends ``batch_size * EXAMPLE_BYTES`` bytes from the first rank to each other rank."""

    def __init__(self, model: nn.Module, *, batch_size: int, **options: Any) -> None:
        super().__init__(model, batch_size=batch_size, **options)
        device = next(model.parameters()).device
        self.message = torch.rand(batch_size * EXAMPLE_BYTES // 4, device=device)
        self.loss = torch.zeros((), device=device)

    def distribute(self, model: nn.Module) -> nn.Module:
        return model

    def train_step(self, batch: Batch) -> Tensor:
        with phase(MESSAGE_PHASE):
            distributed.broadcast(self.message, 0)
        return self.loss
