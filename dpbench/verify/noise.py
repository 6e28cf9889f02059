"""Whether noise is normal, of its deviation, and drawn anew for each element, parameter and step.

Each check compares a bound on the chance that right noise does so badly with its part of
`FALSE_ALARM`; the bounds hold for any number of elements, and are added up (Bonferroni):

- the mean square q of n standard normals: exp(-n/2 (q - 1 - ln q)) on either side (Chernoff);
- the correlation r of n of them with any other vector: (1 - r²)^((n-1)/2) on both sides, which is
  never below the share of a sphere that lies so far from its equator;
- the largest distance d of their distribution from the normal one: 2 exp(-2 n d²) (Massart, "The
  Tight Constant in the Dvoretzky-Kiefer-Wolfowitz Inequality", 1990).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dpbench.verify.check import NOT_JUDGED, Check
from dpbench.verify.reference import Gradients

FALSE_ALARM = 1e-6
"""The largest chance that any of the checks of right noise fails."""

CHECKS = 6
"""Among which it is divided."""

SAMPLE = 4096
"""Elements of each parameter, from its first, in which parameters are compared."""

NONE = 1e-6
"""A mean square of less than this is that of gradients."""

MOST = 2**20
"""Elements whose distribution is looked at."""


def check_noise(
    draws: Sequence[Gradients], deviation: float, dtype: torch.dtype, runs: str, ranks: int = 1
) -> Iterator[Check]:
    """What is wrong with noise.

    Args:
        draws: the noise of several steps, in several runs, each float64; those that have not all
            parameters are looked at for their deviation alone.
        deviation: what it should be.
        dtype: of the parameters, to which the noise is rounded.
        runs: in words, of what there are draws.
        ranks: which may each have drawn a part of every step's.
    """
    judged = _deviation(draws, deviation)
    yield judged
    full = [draw for draw in draws if len(draw) == len(draws[0])]
    if judged.passed:
        yield _distribution(full, deviation, dtype)
    else:
        yield Check("noise: distribution", NOT_JUDGED, "", "", ["its deviation is another"])
    yield _judged("noise: elements", [*_neighbours(full)])
    yield _judged(f"noise: {runs}", [*_draws(full)])
    yield _judged("noise: parameters", [*_parameters(full)])
    if ranks > 1:
        elements = sum(noise.numel() for noise in full[0].values())
        yield _judged("noise: ranks", [*_distances(full)], 2 * elements * len(full))


def chance_of_mean_square(q: float, n: int) -> float:
    """Of n standard normals, to be so far from 1 on either side: a bound on its logarithm."""
    return math.log(2) - n / 2 * (q - 1 - math.log(q)) if 0 < q < math.inf else -math.inf


def chance_of_correlation(r: float, n: int) -> float:
    """Of n standard normals with any other vector, to be so large: a bound on its logarithm."""
    return (n - 1) / 2 * math.log1p(-min(r * r, 1 - 1e-12)) if n > 1 else 0.0


def surprising(usual: float, comparisons: int) -> bool:
    """Whether a chance, as its logarithm, is less than its part of `FALSE_ALARM`."""
    return usual < math.log(FALSE_ALARM / CHECKS / max(comparisons, 1))


def _deviation(draws: Sequence[Gradients], deviation: float) -> Check:
    wrong, worst = [], (math.inf, "", 1.0)
    for name in draws[0]:
        values = torch.cat([draw[name].flatten() for draw in draws if name in draw]) / deviation
        q, n = float(values.square().mean()), values.numel()
        usual = chance_of_mean_square(q, n)
        worst = min(worst, (usual, name, math.sqrt(q)))
        if surprising(usual, len(draws[0])):
            what = "no noise" if q < NONE else f"{math.sqrt(q):.4g} times the deviation σC/B"
            wrong.append(f"{name}: {what}")
    return Check.of("noise: deviation", wrong, worst[1], f"{worst[2]:.4g} σC/B")


def _distribution(draws: Sequence[Gradients], deviation: float, dtype: torch.dtype) -> Check:
    every = torch.cat([g.flatten() for draw in draws for g in draw.values()]) / deviation
    values = every[:: -(-every.numel() // MOST)].sort().values
    n = values.numel()
    normal = torch.special.ndtr(values)
    ranks = torch.arange(n + 1, dtype=normal.dtype, device=normal.device) / n
    far = float(torch.maximum(ranks[1:] - normal, normal - ranks[:-1]).max())
    # Rounding moves a value by half of eps: |x| φ(x) is at most 0.242; it is rounded twice.
    beyond = max(far - torch.finfo(dtype).eps / 4, 0.0)
    failed = surprising(math.log(2) - 2 * n * beyond**2, 1)
    words = [f"its distribution is off the normal one by {far:.2g}"] if failed else []
    return Check.of("noise: distribution", words, "", f"{far:.2g}")


Correlation = tuple[str, str, float, int]
"""A parameter, what it would mean if the two correlated, how much they do, of how many elements."""


def _neighbours(draws: Sequence[Gradients]) -> Iterator[Correlation]:
    """Even and odd elements along each dimension."""
    for draw in draws:
        for name, noise in draw.items():
            for dim in range(noise.dim()):
                half = noise.shape[dim] // 2
                even, odd = noise.narrow(dim, 0, 2 * half).unflatten(dim, (half, 2)).unbind(dim + 1)
                yield name, f"repeats along dimension {dim}", *_correlation(even, odd)


def _draws(draws: Sequence[Gradients]) -> Iterator[Correlation]:
    """Each parameter's noise in two steps."""
    for (i, one), (j, other) in combinations(enumerate(draws, 1), 2):
        for name, noise in one.items():
            yield name, f"is in step {j} that of step {i}", *_correlation(noise, other[name])


def _parameters(draws: Sequence[Gradients]) -> Iterator[Correlation]:
    """Each parameter's noise with that of each other, in the same steps and in others."""
    named = [(name, noise.flatten()[:SAMPLE]) for draw in draws for name, noise in draw.items()]
    rows = pad_sequence([noise for _, noise in named], batch_first=True)
    sizes = torch.tensor([noise.numel() for _, noise in named], device=rows.device)
    there = (torch.arange(rows.shape[1], device=rows.device) < sizes[:, None]).to(rows.dtype)
    squares = rows.square() @ there.T  # of each row, over the elements that the other has too
    r = (rows @ rows.T / (squares * squares.T).sqrt()).nan_to_num().tolist()
    n = torch.minimum(sizes[:, None], sizes).tolist()
    for (i, (name, _)), (j, (other, _)) in combinations(enumerate(named), 2):
        if name != other:
            yield name, f"repeats that of {other}", r[i][j], n[i][j]


def _distances(draws: Sequence[Gradients]) -> Iterator[Correlation]:
    """The autocorrelation of each step's noise, at the distance at which it is largest.

    It is large where ranks draw the same for their shards, or for their parts of a flat buffer.
    """
    for draw in draws:
        noise = torch.cat([each.flatten() for each in draw.values()])
        spectrum = torch.fft.rfft(noise, 2 * len(noise)).abs().square()
        repeats = torch.fft.irfft(spectrum)[1 : len(noise)].abs()
        far = int(repeats.argmax()) + 1
        one, other = noise[:-far], noise[far:]
        products = torch.cat([one * other, noise.new_zeros(far)])
        of_each = products.split([each.numel() for each in draw.values()])
        name = max(zip(of_each, draw, strict=True), key=lambda pair: abs(float(pair[0].sum())))[1]
        odd = torch.arange(len(one), device=noise.device) // far % 2 == 1
        for some in (odd, ~odd):  # in neither is an element in two pairs
            words = f"repeats {far} elements further on"
            yield name, words, *_correlation(one[some], other[some])


def _correlation(a: Tensor, b: Tensor) -> tuple[float, int]:
    size = float(a.norm() * b.norm())
    return float((a * b).sum()) / size if size else 0.0, a.numel()


def _judged(check: str, found: list[Correlation], comparisons: int = 0) -> Check:
    """A check of correlations; of each parameter what was found first is said.

    Those found may be the largest of more comparisons.
    """
    wrong: dict[str, str] = {}
    worst = (0.0, "", 0.0, 0)
    for name, what, r, n in found:
        usual = chance_of_correlation(r, n)
        worst = min(worst, (usual, name, r, n))
        if surprising(usual, comparisons or len(found)):
            wrong.setdefault(name, f"{name}: its noise {what} (r = {r:.3g}, {n} elements)")
    return Check.of(check, [*wrong.values()], worst[1], f"r = {worst[2]:.2g} of {worst[3]}")
