"""DP-SGD by its definition: a loop that clips and adds the gradient of one example after another.

The definition is from Abadi et al., "Deep Learning with Differential Privacy" (2016),
https://arxiv.org/abs/1607.00133. TensorFlow Privacy has this loop if its microbatches contain one
example each (McMahan et al., "A General Approach to Adding Differential Privacy to Iterative
Training Procedures", 2018, https://arxiv.org/abs/1812.06210).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpbench.training.base import Batch, mean_of
from dpbench.training.clipped_sums import ClippedSumTrainer
from dpbench.training.kernels import without_dropped
from dpbench.training.norms import GhostNorms
from dpbench.training.phases import phase
from dpbench.workloads.base import parts_of


class MicroBatchTrainer(ClippedSumTrainer):
    """Computes the gradient of each example separately, without rules for kinds of layers.

    Each example has its own forward and backward. The constructor has the arguments of
    `TrainerBase`.

    Raises:
        ConfigurationError: the trainer cannot clip a layer or parameter of the model.
    """

    compiles = True

    def train_step(self, batch: Batch) -> Tensor:
        self.begin_step()
        losses = [self.clip_each(part) for _, part in self.parts(batch)]
        self.update()
        return mean_of(losses, self.sizes)

    def clip_each(self, part: Batch) -> Tensor:
        """Add one example's clipped gradient after another, and return the examples' mean loss."""
        losses = []
        for example in parts_of(part, [1] * self.examples):
            with phase("forward"):
                loss = self.mean_loss(self.model, example)
            with phase("backward"):
                loss.backward()
            with phase("clip"):
                self.add_clipped()
            losses.append(loss.detach())
        return mean_of(losses)

    @torch.no_grad()
    def add_clipped(self) -> None:
        """Clip the gradients that the backward of one example has set, and add them to the sums."""
        gradients = {p: p.grad for p in self.trained if p.grad is not None}
        self.plain_optimizer.zero_grad(set_to_none=True)
        norms = GhostNorms()
        for parameter, gradient in gradients.items():
            norms.add_samples(gradient[None], parameter.dtype)
        factor = self.factors_for(norms.squared_norms())
        for parameter, each in gradients.items():
            gradient = without_dropped(each[None], factor, in_place=True)[0]
            # PyTorch would round a factor without dimensions to the gradient's dtype.
            self.sums.add_multiplied(parameter, gradient, factor.view([1] * gradient.dim()))
