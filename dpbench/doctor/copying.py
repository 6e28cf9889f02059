"""The work that calibrates the counters: a copy of known size, in the shape of a trainer.

As a trainer it runs through the same command, process, ranges and report reader as a case.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from dpbench.doctor.checks import EXAMPLE_BYTES
from dpbench.training.base import Batch, TrainerBase
from dpbench.training.phases import phase

IDLE_SECONDS = 0.05
"""For how long the GPU rests in each step, outside its phases."""


class CopyTrainer(TrainerBase):
    """Copies ``batch_size * EXAMPLE_BYTES`` bytes on its device in ``forward``, and then rests."""

    def __init__(self, model: nn.Module, *, batch_size: int, **options: Any) -> None:
        super().__init__(model, batch_size=batch_size, **options)
        device = next(model.parameters()).device
        size = batch_size * EXAMPLE_BYTES
        # Random bytes, for a memory that compresses zeros.
        self.source = torch.empty(size, dtype=torch.uint8, device=device).random_()
        self.copy = torch.empty_like(self.source)
        self.loss = torch.zeros((), device=device)

    def train_step(self, batch: Batch) -> Tensor:
        with phase("forward"):
            self.copy.copy_(self.source)
        time.sleep(IDLE_SECONDS)
        return self.loss
