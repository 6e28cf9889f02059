"""Trainers for `dpbench.verify` that train by `make_private`."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from dpbench import Batch, TrainerBase, make_private
from dpbench.workloads.base import examples_in


class ByStep(TrainerBase):
    """Takes each step by `Private.step`."""

    labels = MappingProxyType({"clips": "flat"})

    def __init__(self, model: nn.Module, *, batch_size: int, **options: Any) -> None:
        super().__init__(model, batch_size=batch_size, **options)
        self.private = make_private(
            self.model,
            self.plain_optimizer,
            range(10 * self.joint_batch_size),
            batch_size=self.joint_batch_size,
            max_grad_norm=self.max_grad_norm,
            noise_multiplier=self.noise_multiplier,
            physical_batch_size=self.part_size,
            seed=self.seed,
        )

    def distribute(self, model: nn.Module) -> nn.Module:
        return model

    def train_step(self, batch: Batch) -> Tensor:
        self.private._sampler.unused = [examples_in(batch)]  # it stands for a drawn batch
        return self.step(batch)

    def step(self, batch: Batch) -> Tensor:
        return self.private.step(batch, self.example_losses)


class ByLoop(ByStep):
    """Takes each step by a forward and backward for each part of a batch."""

    def step(self, batch: Batch) -> Tensor:
        losses = []
        for part in self.private.parts(batch):
            loss = self.example_losses(self.private.model, part)
            self.private.optimizer.zero_grad()
            loss.mean().backward()
            losses.append(loss.detach())
        self.private.optimizer.step()
        return torch.cat(losses).mean() if losses else torch.tensor(torch.nan)
