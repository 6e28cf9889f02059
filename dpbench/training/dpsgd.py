"""DP-SGD with flat clipping: every per-sample gradient is materialised, then clipped.

The algorithm is that of Abadi et al., "Deep Learning with Differential Privacy" (2016),
https://arxiv.org/abs/1607.00133, as Opacus implements it with hooks.
"""

from __future__ import annotations

from typing import Any

from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn

from dpbench.training.base import Batch, TrainerBase, mean_cross_entropy
from dpbench.training.phases import in_phase, phase


def mark_phases(optimizer: DPOptimizer) -> None:
    """Let the parts of ``optimizer.step()`` say which phase they are.

    Opacus clips, adds noise and updates inside one call. Wrapping its own methods keeps that
    call, so that what is measured stays what Opacus does.
    """
    for method, name in (
        ("clip_and_accumulate", "clip"),  # flat clipping
        ("accumulate", "clip"),  # fast gradient clipping: sums gradients clipped before
        ("add_noise", "noise"),
        ("scale_grad", "noise"),
    ):
        if hasattr(optimizer, method):
            setattr(optimizer, method, in_phase(name, getattr(optimizer, method)))


class DPSGDTrainer(TrainerBase):
    """Opacus's ``GradSampleModule`` and ``DPOptimizer``; arguments as `TrainerBase`."""

    def __init__(self, model: nn.Module, *, batch_size: int, **options: Any) -> None:
        super().__init__(model, batch_size=batch_size, **options)
        self.grad_sample_module = GradSampleModule(self.model)
        self.optimizer = DPOptimizer(
            self.plain_optimizer,
            noise_multiplier=self.noise_multiplier,
            max_grad_norm=self.max_grad_norm,
            expected_batch_size=batch_size,
        )
        mark_phases(self.optimizer)

    def train_step(self, batch: Batch) -> Tensor:
        input_ids, labels = self.unpack(batch)
        with phase("forward"):
            loss = mean_cross_entropy(self.grad_sample_module(input_ids), labels)
        with phase("backward"):
            loss.backward()
        with phase("optimizer"):
            self.optimizer.step()  # clip and noise inside: see mark_phases
            self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()
