"""A workload of one's own, and what can be wrong with one."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from dpbench import DPSGDTrainer, ModelSize, SimpleBigModel, StandardTrainer, Workload


class Digits(Workload):
    """Images and their classes, through two linear layers."""

    def __init__(self, *, image_size: int = 28, hidden: int = 16) -> None:
        self.image_size, self.hidden = image_size, hidden

    def model(self):
        layers = nn.Linear(self.image_size**2, self.hidden), nn.Tanh(), nn.Linear(self.hidden, 10)
        return nn.Sequential(nn.Flatten(), *layers)

    def batches(self, batch_size):
        images = torch.randn(batch_size, 1, self.image_size, self.image_size)
        return [{"image": images, "label": torch.randint(10, (batch_size,))}]

    def losses(self, model, batch):
        return F.cross_entropy(model(batch["image"]), batch["label"], reduction="none")


def digits(size: int = 28) -> Digits:
    """Images of that size."""
    return Digits(image_size=size)


class OwnTrainer(DPSGDTrainer):
    """Trains as DP-SGD does."""


class MeanLoss(Digits):
    def losses(self, model, batch):
        return super().losses(model, batch).mean()


class NoExamples(Digits):
    def batches(self, batch_size):
        return [(torch.randn(batch_size, 3), torch.tensor(1.0))]


class OtherSize(Digits):
    def batches(self, batch_size):
        return super().batches(batch_size + 1)


class NoTensors(Digits):
    def batches(self, batch_size):
        return [{"text": ["a"] * batch_size}]


class NoBatch(Digits):
    def batches(self, batch_size):
        return []


class NoReturn(Digits):
    def batches(self, batch_size):
        pass


class NoModel(Digits):
    def model(self):
        pass


class Failing(Digits):
    def losses(self, model, batch):
        return model(batch["picture"])


class Misshapen(Digits):
    def losses(self, model, batch):
        return super().losses(model, batch) @ torch.eye(3)


class Normalised(Digits):
    def model(self):
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(self.image_size**2), super().model())


class NoWorkload:
    pass


class FixedTrainer(StandardTrainer):
    """A trainer as it was written before there were workloads."""

    def __init__(self, model, *, batch_size, learning_rate=1e-3):
        super().__init__(model, batch_size=batch_size, learning_rate=learning_rate)


class WideModel(SimpleBigModel):
    """A model of the transformer's with dimensions of its own."""

    def __init__(self, size, **options):
        super().__init__(ModelSize(100, 48, 1, 2), **options)
