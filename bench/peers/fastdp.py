"""A trainer that uses fastDP (https://github.com/awslabs/fast-differential-privacy).

fastDP's hooks clip when backward reaches the model's first layer. In the first micro-batch of a
step these hooks also add noise. The method is from Bu et al., "Differentially Private Optimization
on Large Foundation Models" (2022), https://arxiv.org/abs/2210.00038.
"""

from __future__ import annotations

from contextlib import redirect_stdout
from typing import Any

from fastDP import PrivacyEngine
from torch import Tensor, nn

from dpbench.core.errors import unknown
from dpbench.training.base import Batch, TrainerBase, mean_of
from dpbench.training.phases import phase

CLIPS = {"all-layer": "flat", "param-wise": "per layer"}
"""Text of the trainer's label ``clips``, by fastDP's clipping style."""


class FastDPTrainer(TrainerBase):
    """A trainer with fastDP's privacy engine, which clips and adds noise in phase ``backward``.

    Args:
        clipping_mode: fastDP's way to compute norms: ``MixOpt``, ``MixGhostClip`` or ``ghost``.
        clipping_style: ``all-layer`` for flat clipping, ``param-wise`` for per-layer clipping.
        clipping_fn: ``Abadi`` scales down gradients whose norm exceeds the threshold. fastDP's
            default, ``automatic``, divides each gradient by its norm, and its threshold is 1.
        origin_params: a text. Only parameters whose names contain this text get an ordinary
            gradient; by default all do. An embedding without an ordinary gradient is not trained.
        options: further arguments of `TrainerBase`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        batch_size: int,
        clipping_mode: str = "MixOpt",
        clipping_style: str = "all-layer",
        clipping_fn: str = "Abadi",
        origin_params: str = "",
        **options: Any,
    ) -> None:
        super().__init__(model, batch_size=batch_size, **options)
        if clipping_style not in CLIPS:
            raise unknown("clipping_style", clipping_style, CLIPS)
        self.labels = {"clips": CLIPS[clipping_style], "noise": "in backward"}
        with redirect_stdout(None):  # the engine prints its settings
            engine = PrivacyEngine(
                model,
                batch_size=batch_size,
                sample_size=batch_size,  # only the accountant uses this and the number of steps
                num_steps=1,
                noise_multiplier=self.noise_multiplier,
                max_grad_norm=self.max_grad_norm,
                clipping_mode=clipping_mode,
                clipping_style=clipping_style,
                clipping_fn=clipping_fn,
                origin_params=[origin_params] if origin_params else None,
            )
        engine.attach(self.plain_optimizer)

    def train_step(self, batch: Batch) -> Tensor:
        losses = []
        for _, part in self.parts(batch):
            with phase("forward"):
                loss = self.mean_loss(self.model, part)
            with phase("backward"):
                loss.backward()
            losses.append(loss.detach())
        with phase("optimizer"):
            self.plain_optimizer.step()
            self.plain_optimizer.zero_grad(set_to_none=True)
        return mean_of(losses)
