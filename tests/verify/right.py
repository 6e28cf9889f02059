"""More right trainers like `Looped`, and workloads with unusual losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dpbench import Batch
from tests.verify.faulty import Gradients, Looped, OnlyFloat32


class RefusesNaN(Looped):
    """Raises an error for gradients that are not finite."""

    def clip(self, gradients: Gradients) -> Gradients:
        if not all(bool(g.isfinite().all()) for g in gradients.values()):
            raise FloatingPointError("a gradient is not finite")
        return super().clip(gradients)


class LeavesNaNOut(Looped):
    """Leaves out examples whose gradient is not finite."""

    def clip(self, gradients: Gradients) -> Gradients:
        finite = all(bool(g.isfinite().all()) for g in gradients.values())
        zeros = {name: torch.zeros_like(g) for name, g in gradients.items()}
        return super().clip(gradients) if finite else zeros


class MeanOfNoisyParameters(Looped):
    """Keeps a buffer that is computed from private parameters only."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        first = next(iter(self.trained.values()))
        model.register_buffer("average", first.detach().clone())

    def train_step(self, batch: Batch) -> Tensor:
        loss = super().train_step(batch)
        average: Any = self.model.average
        average.lerp_(next(iter(self.trained.values())).detach(), 0.1)
        return loss


class Penalty(OnlyFloat32):
    """The loss contains the gradient of the model with respect to the example."""

    def losses(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        given = batch.clone().requires_grad_()
        returned = model(given).tanh().sum(1)
        (slope,) = torch.autograd.grad(returned.sum(), given, create_graph=True)
        return returned + (slope.norm(dim=1) - 1).square()


class ByHand(OnlyFloat32):
    """Uses a layer's weight without calling the layer; if ``unused``, does not use it at all."""

    def __init__(self, *, unused: bool = False) -> None:
        self.unused = unused

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 6))

    def losses(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        first, second = getattr(model, "_module", model)
        hidden = first(batch).tanh()
        return (hidden if self.unused else hidden @ second.weight.T + second.bias).sum(1)
