"""Noise that is correlated over steps.

The noise of step t is ``w[0] × z[t] + w[1] × z[t - 1] + …``, where z[t] is a normal sample that is
drawn in step t. Negative weights let later steps cancel part of the noise of earlier steps.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Hashable, Sequence

import numpy as np
import torch
from torch import Tensor

from dpbench.core.errors import ConfigurationError, unknown

INDEPENDENT = (1.0,)
"""Weights of noise that is independent in each step."""

NOISES = ("independent", "banded")
"""Kinds of noise, see `weights_of`."""


def weights_of(noise: str, bands: int = 1, steps: int = 1000) -> tuple[float, ...]:
    """Return the weights of the samples of this step, the step before, and so on.

    The samples have standard deviation σC. The weights of ``banded`` noise are the first
    coefficients of √(1 - x). This is the banded inverse square root of Kalinin et al., "Back to
    Square Roots" (2025), https://arxiv.org/abs/2505.12128. The noise with two weights is close to
    the noise of DP-λCGD, https://arxiv.org/abs/2601.22334, which cancels a chosen fraction of the
    preceding step's noise.

    The weights of correlated noise are multiplied by the sensitivity, which bounds the effect of
    one example on a training with ``steps`` steps. Each example may take part in only one of these
    steps. Then the training is as private as one Gaussian mechanism with noise multiplier σ.

    Args:
        noise: one of `NOISES`.
        bands: number of weights of ``banded`` noise, at least 1. With one weight, the noise is
            independent.
        steps: number of steps of the whole training.

    Raises:
        ConfigurationError: ``noise`` is unknown, an argument is too small, or an argument has no
            meaning for this noise.
    """
    if noise not in NOISES:
        raise unknown("noise", noise, NOISES)
    for name, number in {"bands": bands, "noise_steps": steps}.items():
        if not isinstance(number, int) or number < 1:
            raise ConfigurationError(f"{name} is {number}, and must be a whole number, at least 1")
    if noise == "independent":
        if bands != 1:
            raise ConfigurationError("bands has no meaning without noise=banded")
        return INDEPENDENT
    # Coefficient k of √(1 - x) is coefficient k - 1 times (2k - 3) / 2k.
    weights = [math.prod((2 * k - 3) / (2 * k) for k in range(1, n + 1)) for n in range(bands)]
    sensitivity = math.hypot(*whitening(weights, steps))
    return tuple(sensitivity * weight for weight in weights)


def whitening(weights: Sequence[float], steps: int) -> list[float]:
    """Return the coefficients c that give ``z[t] = c[0] × noise[t] + c[1] × noise[t - 1] + …``.

    The matrix that turns z into noise is lower triangular and Toeplitz, and its first column
    contains the weights. The coefficients are the first column of its inverse.
    """
    others, found = np.array(weights[1:steps]), np.zeros(steps)
    for t in range(steps):
        before = found[max(0, t - len(others)) : t][::-1]
        found[t] = ((t == 0) - others[: len(before)] @ before) / weights[0]
    coefficients: list[float] = found.tolist()
    return coefficients


def check_step(before: int, steps: int) -> None:
    """Raise if ``before`` steps were taken, and the sensitivity is that of no more steps."""
    if before >= steps:
        raise ConfigurationError(
            f"step {before + 1} has too little correlated noise, which was scaled for {steps} "
            f"steps; set noise_steps to the number of steps of the whole training"
        )


class CorrelatedNoise:
    """Draws noise that is correlated over steps, and keeps the samples of earlier steps in memory.

    The samples are kept in float32 or wider, because in bf16 sums would lose small terms.

    Args:
        weights: the weights from `weights_of`, at least two.
        steps: the argument ``steps`` of `weights_of`.
    """

    def __init__(self, weights: Sequence[float], steps: int) -> None:
        self._weights, self._steps = weights, steps
        self._drawn = Counter[Hashable]()
        self._earlier: dict[Hashable, deque[Tensor]] = {}

    def draw(
        self,
        like: Tensor,
        deviation: float,
        key: Hashable,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return the noise of this step, contiguous, and in float32 or wider.

        Args:
            like: a tensor with the shape and device of the noise.
            deviation: standard deviation of the normal sample z that this step draws.
            key: identifies the noise. Later steps must pass the same key for the same noise.
            generator: draws z; None for PyTorch's default generator.

        Raises:
            ConfigurationError: this step is one too many, see `check_step`.
        """
        check_step(self._drawn[key], self._steps)
        self._drawn[key] += 1
        wide = torch.promote_types(like.dtype, torch.float32)
        z = torch.empty(like.shape, dtype=wide, device=like.device)
        z.normal_(std=deviation, generator=generator)
        newest, *others = self._weights
        earlier = self._earlier.setdefault(key, deque(maxlen=len(others)))
        noise = newest * z
        for weight, sample in zip(others, earlier, strict=False):
            noise.add_(sample, alpha=weight)
        earlier.appendleft(z)
        return noise
