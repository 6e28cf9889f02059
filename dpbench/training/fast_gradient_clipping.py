"""DP-SGD that clips through a second backward pass, with or without ghost norms.

The first backward pass finds each example's gradient norm, the second runs on the loss
weighted by the clipping factors, so per-sample gradients need not be kept (Lee and Kifer,
https://arxiv.org/abs/2009.03106). Ghost clipping finds the norms of Linear and Embedding
layers without per-sample gradients at all (Li et al., https://arxiv.org/abs/2110.05679).
"""

from __future__ import annotations

from typing import Any, ClassVar

from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from torch import Tensor, nn

from dpbench.training.base import Batch, TrainerBase, mean_of
from dpbench.training.dpsgd import hooked, mark_phases, step_or_accumulate
from dpbench.training.phases import phase


class DPFastGradientClippingTrainer(TrainerBase):
    """Fast gradient clipping: norms from per-sample gradients, one layer at a time.

    Arguments as `TrainerBase`. Both backward passes count as the phase ``backward``: Opacus
    runs them, and the clipping factors between them, in one call.
    """

    use_ghost_clipping: ClassVar[bool] = False

    def __init__(self, model: nn.Module, *, batch_size: int, **options: Any) -> None:
        super().__init__(model, batch_size=batch_size, **options)
        self.grad_sample_module = hooked(
            GradSampleModuleFastGradientClipping,
            self,
            max_grad_norm=self.max_grad_norm,
            use_ghost_clipping=self.use_ghost_clipping,
        )
        self.optimizer = DPOptimizerFastGradientClipping(
            self.plain_optimizer,
            noise_multiplier=self.noise_multiplier,
            max_grad_norm=self.max_grad_norm,
            expected_batch_size=batch_size,
        )
        mark_phases(self.optimizer)

    def train_step(self, batch: Batch) -> Tensor:
        losses = []
        for last, part in self.parts(batch):
            with phase("forward"):
                by_example = self.example_losses(self.grad_sample_module, part)
                loss = DPTensorFastGradientClipping(
                    self.grad_sample_module, self.optimizer, by_example
                )
            with phase("backward"):
                loss.backward()  # two passes: norms, then the weighted loss
            with phase("optimizer"):
                step_or_accumulate(self.optimizer, last)
                losses.append(loss.detach())
        return mean_of(losses)


class DPGhostClippingTrainer(DPFastGradientClippingTrainer):
    """Ghost clipping: norms of Linear and Embedding layers without per-sample gradients."""

    use_ghost_clipping = True
