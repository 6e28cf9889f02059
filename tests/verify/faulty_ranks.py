"""Private trainers over ranks: a right one, and faults of it."""

from __future__ import annotations

from typing import Any

import torch
from opacus.optimizers import DPOptimizer
from torch import Tensor, distributed, nn

from dpbench import BookKeepingTrainer
from dpbench.training.fast_gradient_clipping import DPGhostClippingTrainer
from dpbench.training.fused import FusedTrainer
from dpbench.training.ghost_lean import GhostLeanTrainer
from tests.verify.faulty import Gradients, Looped


class OverRanks(Looped):
    """A right one under DDP: rank 0 draws the noise."""

    def spread(self, model: nn.Module) -> nn.Module:
        return model

    def noise(self, parameter: Tensor) -> Tensor:
        return super().noise(parameter) * (distributed.get_rank() == 0)

    def mean(self, noisy_sum: Tensor) -> Tensor:
        distributed.all_reduce(noisy_sum)
        return noisy_sum / self.joint_batch_size


class NoiseOfEachRank(OverRanks):
    """The noise of all ranks is added up."""

    def noise(self, parameter: Tensor) -> Tensor:
        return torch.randn_like(parameter)


class NoiseAfterReduction(OverRanks):
    """Each rank has noise of its own in what it updates."""

    def noise(self, parameter: Tensor) -> Tensor:
        return torch.zeros_like(parameter)

    def mean(self, noisy_sum: Tensor) -> Tensor:
        noise = self.deviation * torch.randn_like(noisy_sum)
        return super().mean(noisy_sum) + noise / self.joint_batch_size


class ReducedTwice(OverRanks):
    def mean(self, noisy_sum: Tensor) -> Tensor:
        distributed.all_reduce(noisy_sum)
        return super().mean(noisy_sum)


class MeanOfSums(OverRanks):
    """What ranks have added up is averaged, as if each had a mean."""

    def mean(self, noisy_sum: Tensor) -> Tensor:
        return super().mean(noisy_sum) / distributed.get_world_size()


class ThresholdOfRank(OverRanks):
    """Clips to C/W."""

    def clip(self, gradients: Gradients) -> Gradients:
        ranks = distributed.get_world_size()
        scaled = super().clip({name: g * ranks for name, g in gradients.items()})
        return {name: g / ranks for name, g in scaled.items()}


class OneNotReduced(OverRanks):
    def mean(self, noisy_sum: Tensor) -> Tensor:
        if noisy_sum.shape == self.trained["head.weight"].shape:
            return noisy_sum / self.joint_batch_size
        return super().mean(noisy_sum)


class SharesOfOneSeed(BookKeepingTrainer):
    """Each rank draws for its share of a buffer, all from the same seed."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.generator = torch.Generator().manual_seed(int(torch.randint(2**60, ())))


class ShardsOfOneSeed(GhostLeanTrainer):
    """The same for its shards."""

    def private_optimizer(self) -> DPOptimizer:
        optimizer = super().private_optimizer()
        optimizer.generator.manual_seed(int(torch.randint(2**60, ())))
        return optimizer


class ShardsOfDefaultGenerator(GhostLeanTrainer):
    """The same, once a script has seeded all ranks alike."""

    def private_optimizer(self) -> DPOptimizer:
        optimizer = super().private_optimizer()
        optimizer.generator = None
        return optimizer


class FusedShardsOfOneSeed(FusedTrainer):
    """Shards of all ranks have the seeds of the first rank's."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.seeds -= distributed.get_rank() * len(self.seeds)


class FirstPassKept(DPGhostClippingTrainer):
    """Lets FSDP2 reduce nothing in the pass for the norms, whose gradients it then keeps."""

    def backward(self, loss: Any) -> None:
        sharded: Any = self.model
        module: Any = self.grad_sample_module
        sharded.set_requires_gradient_sync(False)
        loss.loss_per_sample.mean().backward(retain_graph=True)
        self.optimizer.zero_grad()
        sharded.set_requires_gradient_sync(True)
        factors = module.get_clipping_coef()
        module.disable_hooks()
        (factors * loss.loss_per_sample).sum().backward()
        module.enable_hooks()
