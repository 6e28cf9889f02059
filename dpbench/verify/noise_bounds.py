"""Upper bounds on the probability that correct noise gives a result at least as extreme.

The bounds hold for any number of elements n:

- A mean square q of n standard normals: exp(-n/2 (q - 1 - ln q)), for q > 1 and for q < 1
  (Chernoff).
- A correlation r of n standard normals with a vector that does not depend on them:
  (1 - r²)^((n-1)/2) for both signs together. This bounds the share of a unit sphere that is at
  least |r| away from the equatorial plane.
- The number k of events that occur, of n events with probability p each: exp(-n KL(k/n, p)), for
  k > np and for k < np (Chernoff). KL is the Kullback-Leibler divergence. This bound also holds
  for negatively associated events (Dubhashi and Ranjan, "Balls and bins", 1998), such as narrow
  gaps between sorted values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Comparison:
    """One comparison of a noise test.

    Attributes:
        log_chance: the natural logarithm of the bound on the probability.
        name: the parameter; empty for all parameters together.
        message: a description of the result, to print after the parameter's name.
        error_text: the result in a few characters, for a table.
    """

    log_chance: float
    name: str
    message: str
    error_text: str = ""


Comparisons = tuple[list[Comparison], int]
"""Some comparisons of a test, including the least likely, and the number of all its comparisons."""


def log_chance_of_mean_square(q: float, n: int) -> float:
    """Return a bound on ln P(the mean square of n standard normals is at least as extreme as q)."""
    return math.log(2) - n / 2 * (q - 1 - math.log(q)) if 0 < q < math.inf else -math.inf


def log_chance_of_correlation(r: Tensor, n: Tensor) -> Tensor:
    """Return a bound on ln P(n standard normals correlate with another vector by at least ±r)."""
    return (n - 1).clamp(min=0) / 2 * torch.log1p(-(r * r).clamp(max=1 - 1e-12))


def log_chance_of_count(k: int, n: int, least: float, most: float) -> float:
    """Return a bound on ln P(the number of events is at least as extreme as k).

    Each of the n events has a probability between ``least`` and ``most``.
    """
    share = k / n
    p = min(max(share, least), most)
    if p == share:
        return 0.0
    if not 0 < p < 1:
        return -math.inf
    divergence = sum(a * math.log(a / b) for a, b in ((share, p), (1 - share, 1 - p)) if a)
    return math.log(2) - n * divergence
