"""Noise that is correlated over steps: its weights, and the memory of earlier steps' noise.

The noise of a step is ``w[0] × z + w[1] × (z of the step before) + …``, with one term per band.
Each z is a new normal sample. So later steps cancel part of the noise of earlier steps.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from dpbench.core.errors import ConfigurationError, unknown

INDEPENDENT = (1.0,)
"""The weights of noise that is independent in each step."""

NOISES = ("independent", "banded")


def noise_weights(noise: str, bands: int, steps: int) -> tuple[float, ...]:
    """The weights of the newest noise, the one before, and so on, in units of σC.

    ``banded`` is the banded inverse square root of Kalinin et al., "Back to Square Roots" (2025),
    https://arxiv.org/abs/2505.12128: the first coefficients of √(1 - x). Two bands are close to
    DP-λCGD, https://arxiv.org/abs/2601.22334, which chooses the second weight.

    The weights are multiplied by the sensitivity of ``steps`` steps, in which each example takes
    part once. So training is as private as one Gaussian mechanism with noise multiplier σ.

    Args:
        noise: one of `NOISES`.
        bands: the number of weights, at least 1; with 1, noise is independent.
        steps: the number of steps of the whole training.

    Raises:
        ConfigurationError: ``noise`` is unknown, or ``bands`` or ``steps`` is below 1.
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
    """The coefficients whose weighted sum of successive steps' noise is the newest z.

    They form the inverse of the weights' lower triangular Toeplitz matrix.
    """
    found: list[float] = []
    for step in range(steps):
        before = zip(weights[1:], reversed(found), strict=False)
        found.append(((not step) - sum(w * c for w, c in before)) / weights[0])
    return found


class KeptNoise:
    """Adds correlated noise to tensors, and keeps each tensor's z of earlier steps in memory.

    They are kept in float32 or wider, as in jax-privacy: bf16 would round them away in the sum.

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
            deviation: the standard deviation of each z.
            key: identifies the tensor over steps.
            generator: draws z; PyTorch's default one if None.
        """
        # cuBLAS fails on matrices with 2^31 numbers or more.
        for number, part in enumerate(total.view(-1).split((2**31 - 1) // self._before)):
            self._add_to_part(part, deviation, (key, number), generator)

    def _add_to_part(
        self, flat: Tensor, deviation: float, key: Hashable, generator: torch.Generator | None
    ) -> None:
        if key not in self._kept:
            wide = torch.promote_types(flat.dtype, torch.float32)
            self._kept[key] = flat.new_zeros(self._before, flat.numel(), dtype=wide)
        kept, step = self._kept[key], self._steps.get(key, 0)
        self._steps[key] = step + 1
        ages = [(step - row - 1) % self._before + 1 for row in range(self._before)]
        weights = kept.new_tensor([self._weights[age] for age in ages])
        newest = kept[step % self._before]  # still the oldest z, which is used once more
        noise = kept.mT @ weights
        newest.normal_(std=deviation, generator=generator)
        flat.add_(noise.add_(newest, alpha=self._weights[0]))
