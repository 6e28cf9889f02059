"""DP-SGD that clips through a second backward pass, with or without ghost norms.

The first backward pass finds each example's gradient norm, the second runs on the loss
weighted by the clipping factors, so per-sample gradients need not be kept (Lee and Kifer,
https://arxiv.org/abs/2009.03106). Ghost clipping finds the norms of Linear and Embedding
layers without per-sample gradients at all (Li et al., https://arxiv.org/abs/2110.05679).
"""

from __future__ import annotations

from typing import ClassVar

from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from torch import nn

from dpbench.training.base import Batch
from dpbench.training.dpsgd import OpacusTrainer


class DPFastGradientClippingTrainer(OpacusTrainer):
    """Fast gradient clipping: norms from per-sample gradients, one layer at a time.

    Arguments as `TrainerBase`. Both backward passes count as the phase ``backward``: Opacus
    runs them, and the clipping factors between them, in one call.
    """

    use_ghost_clipping: ClassVar[bool] = False
    module_class = GradSampleModuleFastGradientClipping
    optimizer_class = DPOptimizerFastGradientClipping
    loss_reduction = "mean"

    def wrapped(self) -> nn.Module:
        model: nn.Module = self.module_class(
            self.model,
            loss_reduction=self.loss_reduction,
            max_grad_norm=self.max_grad_norm,
            use_ghost_clipping=self.use_ghost_clipping,
        )
        return model

    def private_loss(self, batch: Batch) -> DPTensorFastGradientClipping:
        """Its ``backward()`` is two passes: norms, then the weighted loss."""
        losses = self.example_losses(self.grad_sample_module, batch)
        return DPTensorFastGradientClipping(self.grad_sample_module, self.optimizer, losses)


class DPGhostClippingTrainer(DPFastGradientClippingTrainer):
    """Ghost clipping: norms of Linear and Embedding layers without per-sample gradients."""

    use_ghost_clipping = True
