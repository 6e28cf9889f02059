"""A trainer that uses fastDP (https://github.com/awslabs/fast-differential-privacy).

fastDP's hooks clip when backward reaches the model's first layer. In the first micro-batch of a
step they also add the noise. The method is that of Bu et al., "Differentially Private Optimization
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
"""Values of the label ``clips``, by fastDP's clipping style."""


class FastDPTrainer(TrainerBase):
    """A trainer with fastDP's privacy engine. It clips and adds noise in ``backward``.

    Args:
        clipping_mode: ``MixOpt``, ``MixGhostClip`` or ``ghost`` of fastDP.
        clipping_style: ``all-layer`` or ``param-wise`` of fastDP.
        clipping_fn: ``Abadi`` clips. fastDP's default, ``automatic``, divides each gradient by its
            norm and uses 1 as the threshold.
        origin_params: text that parameters' names contain. Only these parameters get an ordinary
            gradient. By default all parameters do. If an embedding gets none, it is not trained.
        options: options of `TrainerBase`.
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
