"""Ordinary training: the baseline of every ratio."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dpbench.training.base import Batch, TrainerBase, mean_of
from dpbench.training.parallel import reduce_gradients, sharded
from dpbench.training.phases import phase


class StandardTrainer(TrainerBase):
    """Minibatch gradient descent without privacy."""

    def spread(self, model: nn.Module) -> nn.Module:
        if self.parallel == "ddp":
            return DistributedDataParallel(model)
        return sharded(model, self.workload) if self.parallel == "fsdp2" else super().spread(model)

    def train_step(self, batch: Batch) -> Tensor:
        losses = []
        for last, part in self.parts(batch):
            reduce_gradients(self.model, wanted=last)
            with phase("forward"):
                loss = self.mean_loss(self.model, part)
            with phase("backward"):
                part_loss = loss if self.micro_batches == 1 else loss / self.micro_batches
                self.scaler.scale(part_loss).backward()
            losses.append(loss.detach())
        with phase("optimizer"):
            self.scaler.step(self.plain_optimizer)
            self.scaler.update()
            self.plain_optimizer.zero_grad(set_to_none=True)
        return mean_of(losses)
