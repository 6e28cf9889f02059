"""A trainer that clips the per-sample gradients of BackPACK (https://backpack.pt).

BackPACK has rules for linear, embedding, convolutional, recurrent and batch norm layers. The rule
for layer norms in this file follows BackPACK's documentation. BackPACK only computes
per-sample gradients. dpbench clips these gradients, adds noise and updates the parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from backpack import backpack, extend
from backpack.extensions import BatchGrad
from backpack.extensions.firstorder.base import FirstOrderModuleExtension
from torch import Tensor, nn
from torch.nn import functional as F

from dpbench.core.errors import ConfigurationError
from dpbench.training.base import Batch, mean_of
from dpbench.training.clipped_sums import ClippedSumTrainer
from dpbench.training.norms import squared_sample_norms
from dpbench.training.phases import phase


class LayerNormGradients(FirstOrderModuleExtension):
    """BackPACK's rule for the per-sample gradients of a layer norm's parameters, ``[B, …]``."""

    def __init__(self) -> None:
        super().__init__(params=["weight", "bias"])

    def weight(self, extension: Any, layer: Any, g_in: Any, g_out: Any, below: Any) -> Tensor:
        normal = F.layer_norm(layer.input0, layer.normalized_shape, eps=layer.eps)
        return by_example(normal * g_out[0], layer)

    def bias(self, extension: Any, layer: Any, g_in: Any, g_out: Any, below: Any) -> Tensor:
        return by_example(g_out[0], layer)


def by_example(g: Tensor, layer: Any) -> Tensor:
    """Sum ``[B, …, *normalized_shape]`` over all dimensions except B and the normalized shape."""
    return g.reshape(len(g), -1, *layer.normalized_shape).sum(1)


class BackPACKTrainer(ClippedSumTrainer):
    """DP-SGD with flat clipping of the per-sample gradients that BackPACK stores in ``grad_batch``.

    The constructor has the arguments of `TrainerBase`.

    Raises:
        ConfigurationError: BackPACK has no rule for a layer. The message names a parameter of the
            layer.
    """

    def __init__(self, model: nn.Module, *, batch_size: int, **options: Any) -> None:
        super().__init__(model, batch_size=batch_size, **options)
        for layer in model.modules():  # extending the model would replace a layer `output`
            if any(True for _ in layer.parameters(recurse=False)):
                extend(layer)
        self.per_sample = BatchGrad()
        self.per_sample.set_module_extension(nn.LayerNorm, LayerNormGradients())

    def train_step(self, batch: Batch) -> Tensor:
        losses = []
        for _, part in self.parts(batch):
            with phase("forward"):
                loss = self.mean_loss(self.model, part)
            with phase("backward"), backpack(self.per_sample):
                (loss * self.part_size).backward()  # mean_loss divided by part_size
            losses.append(loss.detach())
            with phase("clip"), torch.no_grad():
                self.clip()
        self.update()
        return mean_of(losses)

    def clip(self) -> None:
        """Clip this micro-batch's gradients, and add them to the sums of earlier micro-batches."""
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and not hasattr(parameter, "grad_batch"):
                raise ConfigurationError(f"BackPACK has no per-sample gradients of {name}")
        factors = self.factors_for([squared_sample_norms(p.grad_batch) for p in self.trained])
        for parameter in self.trained:
            total = torch.einsum("b...,b->...", parameter.grad_batch, factors)
            self.sums.add(parameter, total)
            del parameter.grad_batch
        self.plain_optimizer.zero_grad(set_to_none=True)
