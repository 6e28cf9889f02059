"""Noise that is correlated over steps: its weights, and the memory of earlier steps' noise.

The noise of a step is ``w[0] × z + w[1] × (z of the step before) + …``. Each z is a new normal
sample. So later steps cancel part of the noise of earlier steps.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from dpbench.core.errors import ConfigurationError, unknown

INDEPENDENT = (1.0,)
"""The weights of noise that is independent in each step."""

NOISES = ("independent", "banded", "blt")

AT_ONCE = 2**21
"""So many numbers are made noisy together: they stay in a GPU's L2 cache meanwhile. cuBLAS fails on
matrices of 2³¹ numbers."""


class Mechanism(NamedTuple):
    """How noise is correlated over steps.

    Attributes:
        weights: of the newest z, the one before, and so on, in units of σC. The noise of ``blt``
            has one for each step of the training.
        decays: of each buffer of ``blt``; otherwise empty.
        shares: of each buffer in the next noise.
    """

    weights: tuple[float, ...] = INDEPENDENT
    decays: tuple[float, ...] = ()
    shares: tuple[float, ...] = ()


def mechanism(noise: str, bands: int = 1, buffers: int = 0, steps: int = 1000) -> Mechanism:
    """Choose how noise is correlated over steps.

    ``banded`` is the banded inverse square root of Kalinin et al., "Back to Square Roots" (2025),
    https://arxiv.org/abs/2505.12128: the first coefficients of √(1 - x). Two bands are close to
    DP-λCGD, https://arxiv.org/abs/2601.22334, which chooses the second weight.

    ``blt`` is the buffered linear Toeplitz mechanism of Dvijotham et al. (2024),
    https://arxiv.org/abs/2404.16706, with the least maximum error over all steps.

    The weights are multiplied by the sensitivity of ``steps`` steps, in which each example takes
    part once. So training is as private as one Gaussian mechanism with noise multiplier σ.

    Args:
        noise: one of `NOISES`.
        bands: of ``banded``, the number of weights, at least 1; with 1, noise is independent.
        buffers: of ``blt``, the number of buffers, at least 1.
        steps: the number of steps of the whole training.

    Raises:
        ConfigurationError: ``noise`` is unknown, or a number is too small or not for this noise.
    """
    if noise not in NOISES:
        raise unknown("noise", noise, NOISES)
    of_noise = {"banded": {"bands": bands}, "blt": {"buffers": buffers}}.get(noise, {})
    for name, number in {**of_noise, "noise_steps": steps}.items():
        if not isinstance(number, int) or number < 1:
            raise ConfigurationError(f"{name} is {number}, and must be a whole number from 1 on")
    for name, number, usual, of in (("bands", bands, 1, "banded"), ("buffers", buffers, 0, "blt")):
        if noise != of and number != usual:
            raise ConfigurationError(f"{name} has no meaning without noise={of}")
    if noise == "independent":
        return Mechanism()
    if noise == "banded":
        # The ratio of successive coefficients of √(1 - x) is (2k - 3) / 2k.
        weights = [math.prod((2 * k - 3) / (2 * k) for k in range(1, n + 1)) for n in range(bands)]
        sensitivity = math.hypot(*whitening(weights, steps))
        return Mechanism(tuple(sensitivity * weight for weight in weights))
    strategy, shares, decays = _best_buffers(buffers, steps)
    sensitivity = math.hypot(*strategy)
    weights = [sensitivity * weight for weight in whitening(strategy, steps)]
    return Mechanism(tuple(weights), tuple(decays), tuple(shares))


def whitening(weights: Sequence[float], steps: int) -> list[float]:
    """The coefficients whose weighted sum of successive steps' noise is the newest z.

    They form the inverse of the weights' lower triangular Toeplitz matrix.
    """
    padded = torch.zeros(steps, dtype=torch.float64)
    padded[: len(weights)] = torch.tensor(weights[:steps], dtype=torch.float64)
    found: list[float] = _inverse(padded).tolist()
    return found


def _inverse(series: Tensor) -> Tensor:
    """The first coefficients of 1 / a power series, by Newton's method, which doubles them."""
    found = 1 / series[:1]
    while len(found) < len(series):
        length, size = min(2 * len(found), len(series)), 4 * len(found)
        of_found = torch.fft.rfft(found, size)
        product = of_found * (2 - torch.fft.rfft(series[:length], size) * of_found)
        found = torch.fft.irfft(product, size)[:length]
    return found


@cache
def _best_buffers(buffers: int, steps: int) -> tuple[list[float], list[float], list[float]]:
    """Minimize sensitivity × maximum error of ``blt`` over its shares and decays.

    Returns the coefficients of the strategy matrix, 1 and sums of share × decay^(k - 1); the
    shares; and the decays. The search starts at a quadrature of 1 / √(1 - x).
    """
    width = math.log(steps + 2) / buffers
    rates = width * (torch.arange(buffers, dtype=torch.float64) + 0.5)
    decays = -torch.expm1(-rates)
    shares = width / math.pi * torch.exp(-rates / 2) * decays.sqrt()
    chosen = torch.stack([shares.log(), decays.logit()]).requires_grad_()
    exponents = torch.arange(steps - 1, dtype=torch.float64)

    def strategy() -> Tensor:
        sums = (chosen[0].exp()[:, None] * chosen[1].sigmoid()[:, None] ** exponents).sum(0)
        return torch.cat([torch.ones(1, dtype=torch.float64), sums])

    def loss() -> Tensor:
        search.zero_grad()
        found = strategy()
        error = _inverse(found).cumsum(0)
        lost = found.square().sum().log() + error.square().sum().log()
        lost.backward()
        return lost

    search = torch.optim.LBFGS([chosen], max_iter=100, line_search_fn="strong_wolfe")
    with torch.enable_grad():
        search.step(loss)
    return strategy().tolist(), chosen[0].exp().tolist(), chosen[1].sigmoid().tolist()


class KeptNoise:
    """Adds correlated noise to tensors, and keeps in memory what later steps need.

    ``banded`` keeps z of earlier steps, ``blt`` its buffers. They are kept in float32 or wider, as
    in jax-privacy: bf16 would round them away in the sum.

    Args:
        mechanism: of noise that is not independent.
    """

    def __init__(self, mechanism: Mechanism) -> None:
        self._weights, self._decays, self._shares = mechanism
        self._rows = len(self._decays) or len(self._weights) - 1
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
        step = self._steps.get(key, 0)
        self._steps[key] = step + 1
        wide = torch.promote_types(total.dtype, torch.float32)
        ages = [(step - row - 1) % self._rows + 1 for row in range(self._rows)]
        of_row = self._shares or [self._weights[age] for age in ages]
        weights = torch.tensor(of_row, dtype=wide).to(total.device)
        decays = torch.tensor(self._decays, dtype=wide).to(total.device)
        for number, part in enumerate(total.view(-1).split(AT_ONCE)):
            place = key, number
            if place not in self._kept:
                self._kept[place] = part.new_zeros(self._rows, part.numel(), dtype=wide)
            kept = self._kept[place]
            noise = kept.mT @ weights
            if self._decays:
                newest = torch.empty_like(noise).normal_(std=deviation, generator=generator)
                newest.sub_(noise)
                kept.mul_(decays[:, None]).add_(newest)
                part.add_(newest.mul_(self._weights[0]))
            else:
                newest = kept[step % self._rows]  # still the oldest z, which is used once more
                newest.normal_(std=deviation, generator=generator)
                part.add_(noise.add_(newest, alpha=self._weights[0]))
