"""A trainer that spoils its own process in the first step."""

from __future__ import annotations

import time

from torch import Tensor

from dpbench.training.base import Batch
from dpbench.training.standard import StandardTrainer


class Hangs(StandardTrainer):
    def train_step(self, batch: Batch) -> Tensor:
        time.sleep(600)
        raise AssertionError
