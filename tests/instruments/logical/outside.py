"""Outside trainers that are counted in their own process, which imports little else."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from dpbench import phase
from dpbench.training.base import Batch
from dpbench.training.standard import StandardTrainer


class Crashes(StandardTrainer):
    def train_step(self, batch: Batch) -> Tensor:
        print("about to", end="", flush=True)
        ctypes.string_at(0)
        return super().train_step(batch)


class CountsTokens(StandardTrainer):
    def train_step(self, batch: Batch) -> Tensor:
        tokens, _ = batch
        with phase("noise"):
            torch.unique(tokens, return_inverse=True, return_counts=True)
            torch.unique(tokens, dim=0)
            torch.unique_consecutive(tokens.flatten())
            (tokens > 3).nonzero()
            tokens.masked_select(tokens > 3)
            tokens[tokens > 3]
        return super().train_step(batch)
