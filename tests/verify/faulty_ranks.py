"""A right private trainer over ranks, and trainers with faults."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn

from dpbench.training.dpsgd import DPGhostClippingTrainer
from dpbench.training.fused import FusedTrainer
from tests.verify.trainers import Gradients, Looped


class OverRanks(Looped):
    """A right trainer under DDP: rank 0 draws the noise."""

    def distribute(self, model: nn.Module) -> nn.Module:
        return model

    def noise(self, parameter: Tensor) -> Tensor:
        return super().noise(parameter) * (distributed.get_rank() == 0)

    def mean(self, noisy_sum: Tensor) -> Tensor:
        distributed.all_reduce(noisy_sum)
        return noisy_sum / self.joint_batch_size


class NoiseOfEachRank(OverRanks):
    """Each rank adds noise before the reduction."""

    def noise(self, parameter: Tensor) -> Tensor:
        return torch.randn_like(parameter)


class NoiseAfterReduction(OverRanks):
    """Each rank adds noise after the reduction."""

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
    """The sums of ranks are averaged."""

    def mean(self, noisy_sum: Tensor) -> Tensor:
        return super().mean(noisy_sum) / distributed.get_world_size()


class ThresholdOfRank(OverRanks):
    """Clips to C / number of ranks."""

    def clip(self, gradients: Gradients) -> Gradients:
        ranks = distributed.get_world_size()
        scaled = super().clip({name: g * ranks for name, g in gradients.items()})
        return {name: g / ranks for name, g in scaled.items()}


class OneNotReduced(OverRanks):
    def mean(self, noisy_sum: Tensor) -> Tensor:
        if noisy_sum.shape == self.trained["head.weight"].shape:
            return noisy_sum / self.joint_batch_size
        return super().mean(noisy_sum)


class SharesOfOneSeed(FusedTrainer):
    """Each rank draws noise for its part of a buffer, all from one seed."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, kernels=False, **options)
        self.generator = torch.Generator().manual_seed(int(torch.randint(2**60, ())))


class ShardsOfOneSeed(SharesOfOneSeed):
    """Each rank draws noise for its shards, all from one seed."""


class ShardsOfDefaultGenerator(FusedTrainer):
    """Each rank draws noise for its shards from PyTorch's default generator."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, kernels=False, **options)
        self.generator = None


class FusedShardsOfOneSeed(FusedTrainer):
    """Shards of all ranks have the buffer numbers of the first rank's."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.stream.rows[:, 4] %= len(self.stream.rows)


class FirstPassKept(DPGhostClippingTrainer):
    """FSDP2 does not reduce in the pass for norms, whose gradients then remain."""

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
