"""Trainers that spoil their own process in the first step."""

from __future__ import annotations

import os
import time

from torch import Tensor

from dpbench.training.base import Batch
from dpbench.training.standard import StandardTrainer


class Idle(StandardTrainer):
    """A trainer that is not built in, so that it is counted in a process of its own."""


class Exits(StandardTrainer):
    def train_step(self, batch: Batch) -> Tensor:
        os._exit(3)


class Hangs(StandardTrainer):
    def train_step(self, batch: Batch) -> Tensor:
        time.sleep(600)
        raise AssertionError
