"""Ordinary training: the baseline of every ratio."""

from __future__ import annotations

from torch import Tensor

from dpbench.training.base import Batch, TrainerBase
from dpbench.training.phases import phase


class StandardTrainer(TrainerBase):
    """Minibatch gradient descent without privacy."""

    def train_step(self, batch: Batch) -> Tensor:
        with phase("forward"):
            loss = self.mean_loss(self.model, batch)
        with phase("backward"):
            loss.backward()
        with phase("optimizer"):
            self.plain_optimizer.step()
            self.plain_optimizer.zero_grad(set_to_none=True)
        return loss.detach()
