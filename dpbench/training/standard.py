"""Ordinary training: the baseline of every ratio."""

from __future__ import annotations

from torch import Tensor

from dpbench.training.base import Batch, TrainerBase, mean_cross_entropy
from dpbench.training.phases import phase


class StandardTrainer(TrainerBase):
    """Minibatch gradient descent without privacy."""

    def train_step(self, batch: Batch) -> Tensor:
        input_ids, labels = self.unpack(batch)
        with phase("forward"):
            loss = mean_cross_entropy(self.model(input_ids), labels)
        with phase("backward"):
            loss.backward()
        with phase("optimizer"):
            self.plain_optimizer.step()
            self.plain_optimizer.zero_grad(set_to_none=True)
        return loss.detach()
