"""Ordinary training without privacy, with which the costs of private training are compared."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dpbench.training.base import Batch, TrainerBase, mean_of
from dpbench.training.parallel import reduce_gradients, sharded
from dpbench.training.phases import phase


class StandardTrainer(TrainerBase):
    """Trains with minibatch gradient descent, without privacy.

    Has the phases ``forward``, ``backward`` and ``optimizer``, and the arguments of `TrainerBase`.
    """

    def distribute(self, model: nn.Module) -> nn.Module:
        if self.parallel == "ddp":
            return DistributedDataParallel(model)
        return (
            sharded(model, self.workload) if self.parallel == "fsdp2" else super().distribute(model)
        )

    def train_step(self, batch: Batch) -> Tensor:
        losses = []
        for last, part in self.parts(batch):
            reduce_gradients(self.model, wanted=last)
            with phase("forward"):
                loss = self.mean_loss(self.model, part)
            with phase("backward"):
                parts = self.batch_size / self.examples  # may be a fraction for a Poisson batch
                (loss if parts == 1 else loss / parts).backward()
            losses.append(loss.detach())
        with phase("optimizer"):
            self.plain_optimizer.step()
            self.plain_optimizer.zero_grad(set_to_none=True)
        return mean_of(losses, self.sizes)
