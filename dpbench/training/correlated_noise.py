"""Noise that is correlated over steps: its weights.

The noise of a step is ``w[0] × z + w[1] × (z of the step before) + …``. Each z is a new normal
sample. So later steps cancel part of the noise of earlier steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dpbench.core.errors import ConfigurationError, unknown

Numbers: TypeAlias = NDArray[np.float64]

INDEPENDENT = (1.0,)
"""The weights of noise that is independent in each step."""

NOISES = ("independent", "banded", "blt")


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
    padded = np.zeros(steps)
    padded[: len(weights)] = weights[:steps]
    found: list[float] = _inverse(padded).tolist()
    return found


def _inverse(series: Numbers) -> Numbers:
    """The first coefficients of 1 / a power series, by Newton's method, which doubles them."""
    found = 1 / series[:1]
    while len(found) < len(series):
        length, size = min(2 * len(found), len(series)), 4 * len(found)
        of_found = np.fft.rfft(found, size)
        product = of_found * (2 - np.fft.rfft(series[:length], size) * of_found)
        found = np.fft.irfft(product, size)[:length]
    return found


@cache
def _best_buffers(buffers: int, steps: int) -> tuple[list[float], list[float], list[float]]:
    """Minimize sensitivity × maximum error of ``blt`` over its shares and decays.

    Returns the coefficients of the strategy matrix, 1 and sums of share × decay^(k - 1); the
    shares; and the decays. The search starts at a quadrature of 1 / √(1 - x).
    """
    from scipy.optimize import minimize
    from scipy.signal import fftconvolve
    from scipy.special import expit, logit

    width = math.log(steps + 2) / buffers
    rates = width * (np.arange(buffers) + 0.5)
    decays = -np.expm1(-rates)
    shares = width / math.pi * np.exp(-rates / 2) * np.sqrt(decays)
    exponents = np.arange(steps - 1)

    def loss(chosen: Numbers) -> tuple[float, Numbers]:
        """The logarithm of the square, and its gradient by log shares and logits of decays."""
        decays = expit(chosen[buffers:])
        terms = np.exp(chosen[:buffers])[:, None] * decays[:, None] ** exponents
        strategy = np.concatenate([[1.0], terms.sum(0)])
        inverse = _inverse(strategy)
        errors = inverse.cumsum()
        moved, lost = strategy @ strategy, errors @ errors
        by_inverse = 2 * errors[::-1].cumsum() / lost  # from the last to the first
        square = fftconvolve(inverse, inverse)[:steps]
        by_strategy = 2 * strategy / moved - fftconvolve(by_inverse, square)[:steps][::-1]
        by_share = terms @ by_strategy[1:]
        by_decay = (terms * exponents) @ by_strategy[1:] * (1 - decays)
        return math.log(moved) + math.log(lost), np.concatenate([by_share, by_decay])

    start = np.concatenate([np.log(shares), logit(decays)])
    exactly = {"ftol": 1e-12, "gtol": 1e-7, "maxiter": 1000}
    best = minimize(loss, start, jac=True, method="L-BFGS-B", options=exactly).x
    shares, decays = np.exp(best[:buffers]), expit(best[buffers:])
    strategy = np.concatenate([[1.0], shares @ decays[:, None] ** exponents])
    return strategy.tolist(), shares.tolist(), decays.tolist()
