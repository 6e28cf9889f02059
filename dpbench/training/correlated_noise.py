"""Noise that is correlated over steps: the weights of earlier noises, and how these are kept.

The noise of a step is ``w[0] × z + w[1] × (z of the step before) + …``, for as many steps as there
are bands; each z is a new normal sample. Later steps so cancel a part of the noise of earlier ones.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from dpbench.core.errors import ConfigurationError, unknown

INDEPENDENT = (1.0,)
"""The weights of noise that is drawn anew in each step."""

NOISES = ("independent", "banded")


def noise_weights(noise: str, bands: int, steps: int) -> tuple[float, ...]:
    """The weights of the newest noise, the one before, and so on, in units of σC.

    ``banded`` is the banded inverse square root of Kalinin et al., "Back to Square Roots" (2025),
    https://arxiv.org/abs/2505.12128: the first coefficients of √(1 - x). Two bands are close to
    DP-λCGD, https://arxiv.org/abs/2601.22334, which chooses the second weight.

    The weights are multiplied by the sensitivity of ``steps`` steps in which an example takes part
    once. So σ is the noise multiplier of the Gaussian mechanism that is as private.

    Args:
        noise: one of `NOISES`.
        bands: the number of weights, at least 1; with 1 noise is independent.
        steps: those of the whole training.

    Raises:
        ConfigurationError: no such noise, or a number below 1.
    """
    if noise not in NOISES:
        raise unknown("noise", noise, NOISES)
    for name, number in (("bands", bands), ("noise_steps", steps)):
        if not isinstance(number, int) or number < 1:
            raise ConfigurationError(f"{name} is {number}, and must be a whole number from 1 on")
    if noise == "independent":
        if bands > 1:
            raise ConfigurationError("bands has no meaning without noise=banded")
        return INDEPENDENT
    # The ratio of successive coefficients of √(1 - x) is (2k - 3) / 2k.
    weights = [math.prod((2 * k - 3) / (2 * k) for k in range(1, n + 1)) for n in range(bands)]
    sensitivity = math.hypot(*whitening(weights, steps))
    return tuple(sensitivity * weight for weight in weights)


def whitening(weights: Sequence[float], steps: int) -> list[float]:
    """The coefficients with which noises of successive steps add up to the newest z.

    They are those of the inverse of the lower triangular Toeplitz matrix of the weights.
    """
    found: list[float] = []
    for step in range(steps):
        before = zip(weights[1:], reversed(found), strict=False)
        found.append(((not step) - sum(w * c for w, c in before)) / weights[0])
    return found


class KeptNoise:
    """The noises of earlier steps, in memory, of tensors to which noise is added.

    They are kept in float32 at least, as by jax-privacy: a weighted sum in bf16 would lose them.

    Args:
        weights: see `noise_weights`, at least two.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights, self._before = weights, len(weights) - 1
        self._kept: dict[Hashable, Tensor] = {}
        self._steps: dict[Hashable, int] = {}

    def add_to(
        self,
        total: Tensor,
        deviation: float,
        key: Hashable,
        generator: torch.Generator | None = None,
    ) -> None:
        """Add the noise of this step, in place.

        Args:
            total: the sum of clipped gradients; contiguous.
            deviation: that of each z.
            key: names the tensor in all steps.
            generator: draws z; PyTorch's default one if None.
        """
        flat = total.view(-1)
        if key not in self._kept:
            wide = torch.promote_types(total.dtype, torch.float32)
            self._kept[key] = flat.new_zeros(self._before, flat.numel(), dtype=wide)
        kept, step = self._kept[key], self._steps.get(key, 0)
        self._steps[key] = step + 1
        ages = [(step - row - 1) % self._before + 1 for row in range(self._before)]
        weights = kept.new_tensor([self._weights[age] for age in ages])
        newest = kept[step % self._before]  # until now the oldest, which is used once more
        noise = kept.mT @ weights
        newest.normal_(std=deviation, generator=generator)
        flat.add_(noise.add_(newest, alpha=self._weights[0]))
