"""Ordinary training: the baseline of every ratio."""

from __future__ import annotations

from torch import Tensor

from dpbench.training.base import Batch, TrainerBase, mean_of
from dpbench.training.phases import phase


class StandardTrainer(TrainerBase):
    """Minibatch gradient descent without privacy."""

    def train_step(self, batch: Batch) -> Tensor:
        losses = []
        for _, part in self.parts(batch):
            with phase("forward"):
                loss = self.mean_loss(self.model, part)
            with phase("backward"):
                (loss if self.micro_batches == 1 else loss / self.micro_batches).backward()
            losses.append(loss.detach())
        with phase("optimizer"):
            self.plain_optimizer.step()
            self.plain_optimizer.zero_grad(set_to_none=True)
        return mean_of(losses)
