"""Weights of noise that is correlated over steps.

The noise of step t is ``w[0] × z[t] + w[1] × z[t - 1] + …``, where z[t] is a normal sample that is
drawn in step t. Negative weights let later steps cancel part of the noise of earlier steps.
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
"""Weights of noise that is independent in each step."""

NOISES = ("independent", "banded", "blt")
"""Kinds of noise, see `mechanism`."""


class Mechanism(NamedTuple):
    """Numbers that say how the noise of a step depends on the samples of earlier steps.

    Attributes:
        weights: weights of the samples z of this step, the step before, and so on. The samples have
            standard deviation σC. ``blt`` noise has a weight for each step of the training.
        decays: the factor of each buffer of ``blt`` noise, by which each step multiplies the
            buffer; empty for other noise.
        shares: the coefficient of each buffer of ``blt`` noise; empty for other noise. Each step
            subtracts the sum of coefficient × buffer from the sample z that it draws.
    """

    weights: tuple[float, ...] = INDEPENDENT
    decays: tuple[float, ...] = ()
    shares: tuple[float, ...] = ()


def mechanism(noise: str, bands: int = 1, buffers: int = 0, steps: int = 1000) -> Mechanism:
    """Return the mechanism for a kind of noise.

    The weights of ``banded`` noise are the first coefficients of √(1 - x). This is the banded
    inverse square root of Kalinin et al., "Back to Square Roots" (2025),
    https://arxiv.org/abs/2505.12128. The noise with two weights is close to the noise of DP-λCGD,
    https://arxiv.org/abs/2601.22334, which cancels a chosen fraction of the preceding step's noise.

    ``blt`` noise is the noise of the buffered linear Toeplitz mechanism of Dvijotham et al. (2024),
    https://arxiv.org/abs/2404.16706. Its shares and decays minimize sensitivity × maximum error.
    The error of a step is the standard deviation of the sum of the noise of all steps so far.

    The weights of correlated noise are multiplied by the sensitivity, which bounds the effect of
    one example on a training with ``steps`` steps. Each example may take part in only one of these
    steps. Then the training is as private as one Gaussian mechanism with noise multiplier σ.

    Args:
        noise: one of `NOISES`.
        bands: number of weights of ``banded`` noise, at least 1. With one weight, the noise is
            independent.
        buffers: number of buffers of ``blt`` noise, at least 1.
        steps: number of steps of the whole training.

    Raises:
        ConfigurationError: ``noise`` is unknown, an argument is too small, or an argument has no
            meaning for this noise.
    """
    if noise not in NOISES:
        raise unknown("noise", noise, NOISES)
    of_noise = {"banded": {"bands": bands}, "blt": {"buffers": buffers}}.get(noise, {})
    for name, number in {**of_noise, "noise_steps": steps}.items():
        if not isinstance(number, int) or number < 1:
            raise ConfigurationError(f"{name} is {number}, and must be a whole number, at least 1")
    for name, number, usual, of in (("bands", bands, 1, "banded"), ("buffers", buffers, 0, "blt")):
        if noise != of and number != usual:
            raise ConfigurationError(f"{name} has no meaning without noise={of}")
    if noise == "independent":
        return Mechanism()
    if noise == "banded":
        # Coefficient k of √(1 - x) is coefficient k - 1 times (2k - 3) / 2k.
        weights = [math.prod((2 * k - 3) / (2 * k) for k in range(1, n + 1)) for n in range(bands)]
        sensitivity = math.hypot(*whitening(weights, steps))
        return Mechanism(tuple(sensitivity * weight for weight in weights))
    strategy, shares, decays = _best_buffers(buffers, steps)
    sensitivity = math.hypot(*strategy)
    weights = [sensitivity * weight for weight in whitening(strategy, steps)]
    return Mechanism(tuple(weights), tuple(decays), tuple(shares))


def whitening(weights: Sequence[float], steps: int) -> list[float]:
    """Return the coefficients c that give ``z[t] = c[0] × noise[t] + c[1] × noise[t - 1] + …``.

    The matrix that turns z into noise is lower triangular and Toeplitz, and its first column
    contains the weights. The coefficients are the first column of its inverse.
    """
    padded = np.zeros(steps)
    padded[: len(weights)] = weights[:steps]
    found: list[float] = _inverse(padded).tolist()
    return found


def _inverse(series: Numbers) -> Numbers:
    """Return the first coefficients of the reciprocal of a power series.

    Each step of Newton's method doubles the number of coefficients.
    """
    found = 1 / series[:1]
    while len(found) < len(series):
        length, size = min(2 * len(found), len(series)), 4 * len(found)
        of_found = np.fft.rfft(found, size)
        product = of_found * (2 - np.fft.rfft(series[:length], size) * of_found)
        found = np.fft.irfft(product, size)[:length]
    return found


@cache
def _best_buffers(buffers: int, steps: int) -> tuple[list[float], list[float], list[float]]:
    """Find the shares and decays of ``blt`` noise that minimize sensitivity × maximum error.

    The search starts at shares and decays that approximate 1 / √(1 - x).

    Returns:
        The coefficients of the strategy matrix, the shares, and the decays. Coefficient 0 is 1, and
        coefficient k > 0 is the sum over buffers of share × decay^(k - 1).
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
        """Return 2 log(sensitivity × maximum error), and its gradient at ``chosen``.

        ``chosen`` contains the logarithms of the shares, and then the logits of the decays.
        """
        decays = expit(chosen[buffers:])
        terms = np.exp(chosen[:buffers])[:, None] * decays[:, None] ** exponents
        strategy = np.concatenate([[1.0], terms.sum(0)])
        inverse = _inverse(strategy)
        errors = inverse.cumsum()
        moved, lost = strategy @ strategy, errors @ errors
        by_inverse = 2 * errors[::-1].cumsum() / lost  # in reverse order
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
