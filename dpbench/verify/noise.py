"""Tests that noise, divided by σC/B, is standard normal and independent of all other noise.

Each test computes an upper bound of the probability that correct noise looks as bad. It fails if
the bound is below its share of `FALSE_ALARM`. The bounds hold for any number of elements n, and are
summed over comparisons (Bonferroni):

- mean square q of n standard normals: exp(-n/2 (q - 1 - ln q)) on either side (Chernoff);
- correlation r with any other vector: (1 - r²)^((n-1)/2) for both sides together, a bound of the
  share of a sphere that lies so far from its equator;
- largest distance d of the empirical from the normal distribution: 2 exp(-2 n d²) (Massart, "The
  Tight Constant in the Dvoretzky-Kiefer-Wolfowitz Inequality", 1990);
- k of n events of probability p: exp(-n KL(k/n, p)) on either side (Chernoff). This also holds for
  negatively associated events (Dubhashi and Ranjan, "Balls and bins", 1998), such as narrow gaps
  between sorted values.

The tests cannot find noise that repeats only after the last step; elements that return in another
order, with 16-bit parameters; and sums of noise from fewer elements than `worst_repeat` needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dpbench.verify.check_result import NOT_JUDGED, Check
from dpbench.verify.reference import Gradients

FALSE_ALARM = 1e-6
"""Largest probability that correct noise fails any of the tests."""

TESTS = 12
"""Number of tests that share `FALSE_ALARM`: six on the workload and six on a linear layer."""

PAIR_ELEMENTS = 4096
"""Number of leading elements of each parameter that `_pairs` compares."""

NO_NOISE = 1e-6
"""Below this mean square there is no noise, only rounding error of the gradient."""

STEP_ELEMENTS = 2**20
"""Number of leading elements of all parameters together that `_pairs` compares."""

DISTRIBUTION_ELEMENTS = 2**20
"""Largest number of elements whose distribution is compared with the normal one."""

SEQUENCE_ELEMENTS = 2**20
"""Largest number of elements, of all steps in a row, that are searched for repeats."""

FEWEST_CORRELATED = 8
"""Smallest number of elements whose correlation a Fourier transform gives accurately."""

TAILS = (2.0, 3.0, 3.5, 4.0, 4.5, 5.0)
"""Standard deviations beyond which elements are counted."""

SAME_VALUE = 2**-20
"""Largest relative distance of two float32 roundings of one drawn value."""
SAME_RANK = 0.484 * SAME_VALUE
"""The same distance, for ranks erf(|x|/√2): |x| times their slope is at most 0.484."""

EXACT_SLACK = 1e-6
"""Largest `Draw.slack` with which equal values are recognised."""
KNOWN_SLACK = 0.1
"""Largest `Draw.slack` with which more than the standard deviation is judged."""


@dataclass(frozen=True)
class Draw:
    """The noise of one step, divided by the deviation that it should have.

    Attributes:
        run: the run's name: batching, σ and C.
        step: the step's number in its run, from 1.
        noise: the flat noise of each parameter. Late steps have small parameters only.
        along: the component of the noise along the clipped gradient, by parameter; ``""`` stands
            for all parameters together.
        slack: a bound of the norm of the gradient's error, in the unit of the noise.
    """

    run: str
    step: int
    noise: Gradients
    along: Mapping[str, float] = field(default_factory=dict)
    slack: float = 0.0

    @property
    def words(self) -> str:
        """The step and its run, for messages."""
        return f"step {self.step} ({self.run})"


@dataclass(frozen=True)
class NoiseTest:
    """One comparison of a test: the log probability of its result, and a message about it.

    ``name`` is the parameter; it is empty for all parameters together.
    """

    log_chance: float
    name: str
    words: str
    error_text: str = ""


def check_noise(draws: Sequence[Draw], dtype: torch.dtype, runs: str) -> Iterator[Check]:
    """Yield the six tests of noise.

    Args:
        draws: the noise of several steps in several runs.
        dtype: the parameters' dtype, to which noise is rounded.
        runs: in what the draws differ, for a test's name, such as "parameters, steps, runs".
    """
    whole = [draw for draw in draws if len(draw.noise) == len(draws[0].noise)]
    full = [draw for draw in whole if draw.slack < KNOWN_SLACK]
    deviation = _test("noise: deviation", *_deviations(draws))
    yield deviation
    distribution = Check("noise: distribution", NOT_JUDGED, "", "", ["the deviation is wrong"])
    if deviation.passed:
        distribution = _test("noise: distribution", *_distributions(full, torch.finfo(dtype).eps))
    yield distribution
    values = Check("noise: values", NOT_JUDGED, "", "", ["the distribution is wrong"])
    if distribution.passed:
        exact = [draw for draw in full if draw.slack < EXACT_SLACK and dtype.itemsize >= 4]
        values = _test("noise: values", *_repeated_values(exact))
    yield values
    yield _test("noise: elements", *_repeats(full))
    yield _test(f"noise: {runs}", *_pairs(full))
    yield _test("noise beside gradients", *_along(draws))


def log_chance_of_mean_square(q: float, n: int) -> float:
    """Bound of ln P(the mean square of n standard normals is as far from 1 as q), either side."""
    return math.log(2) - n / 2 * (q - 1 - math.log(q)) if 0 < q < math.inf else -math.inf


def log_chance_of_correlation(r: Tensor, n: Tensor) -> Tensor:
    """Bound of ln P(n standard normals correlate with another vector at least as strongly as r)."""
    return (n - 1).clamp(min=0) / 2 * torch.log1p(-(r * r).clamp(max=1 - 1e-12))


def log_chance_of_count(k: int, n: int, least: float, most: float) -> float:
    """Bound of ln P(k of n events happen), if each has a probability from ``least`` to ``most``."""
    share = k / n
    p = min(max(share, least), most)
    if p == share:
        return 0.0
    if not 0 < p < 1:
        return -math.inf
    divergence = sum(a * math.log(a / b) for a, b in ((share, p), (1 - share, 1 - p)) if a)
    return math.log(2) - n * divergence


Comparisons = tuple[list[NoiseTest], int]
"""The findings of a test, and how many comparisons it made."""


def _test(check: str, findings: Sequence[NoiseTest], comparisons: int) -> Check:
    """Make a check that fails if any finding is too unlikely; it names each parameter once."""
    limit = math.log(FALSE_ALARM / TESTS / max(comparisons, 1))
    wrong: dict[str, str] = {}
    for each in findings:
        if not each.log_chance >= limit and (each.name or not wrong):
            name = each.name or "all parameters"
            wrong.setdefault(name, f"{name}: {each.words}")
    worst = min(findings, key=lambda each: each.log_chance, default=NoiseTest(0.0, "", ""))
    return Check.judged(check, [*wrong.values()], worst.name, worst.error_text)


def _groups(draws: Sequence[Draw]) -> dict[tuple[str, str], list[Draw]]:
    """Group draws by (run, parameter); ``""`` stands for all runs or all parameters."""
    runs = ["", *dict.fromkeys(draw.run for draw in draws)]
    names = ["", *(name for draw in draws[:1] for name in draw.noise)]
    keys = sorted(product(runs, names), key=lambda key: (key[1] == "", key[0] == ""))
    return {
        (run, name): [d for d in draws if run in ("", d.run) and (not name or name in d.noise)]
        for run, name in keys
    }


def _values(draws: Sequence[Draw], name: str) -> Tensor:
    """Join the noise of one parameter, or of all if ``""``, into one float64 vector."""
    parts = [noise for draw in draws for each, noise in draw.noise.items() if name in ("", each)]
    return torch.cat(parts).double()


def _deviations(draws: Sequence[Draw]) -> Comparisons:
    found = []
    for (run, name), group in _groups(draws).items():
        values = _values(group, name)
        n = values.numel()
        norm, wanted = float(values.norm()), n**0.5
        slack = sum(draw.slack**2 for draw in group) ** 0.5
        explained = min(max(norm, wanted - slack), wanted + slack)
        chance = log_chance_of_mean_square(((wanted + norm - explained) / wanted) ** 2, n)
        times = norm / wanted
        words = "no noise"
        if not times**2 < NO_NOISE:
            words = f"{times:.4g} times the deviation σC/B" + f" ({run})" * bool(run)
        found.append(NoiseTest(chance, name, words, f"{times:.4g} σC/B"))
    return found, len(found)


def _distributions(draws: Sequence[Draw], eps: float) -> Comparisons:
    found = []
    for (run, name), group in _groups(draws).items():
        if run and name:
            continue
        values = _values(group, name)
        far, chance = _distance(values[:: -(-values.numel() // DISTRIBUTION_ELEMENTS)], eps)
        where = f" ({run})" * bool(run)
        words = f"its distribution is off the normal one by {far:.2g}{where}"
        found.append(NoiseTest(chance, name, words, f"{far:.2g}"))
        sizes, n = values.abs(), values.numel()
        for beyond in TAILS:
            k = int((sizes > beyond).sum())
            least, most = (math.erfc(beyond * (1 + off) / 2**0.5) for off in (eps, -eps))
            chance = log_chance_of_count(k, n, least, most)
            words = f"{k} of {n} elements are beyond {beyond:g} σ{where}, not {n * most:.3g}"
            found.append(NoiseTest(chance, name, words, f"{k} beyond {beyond:g} σ"))
    return found, len(found)


def _distance(values: Tensor, eps: float) -> tuple[float, float]:
    """The largest distance of the values' distribution from the normal one, and its ln P."""
    n = values.numel()
    normal = torch.special.ndtr(values.sort().values)
    ranks = torch.arange(n + 1, dtype=normal.dtype, device=normal.device) / n
    far = float(torch.maximum(ranks[1:] - normal, normal - ranks[:-1]).max())
    # Values are rounded twice, by eps/2 each time, and |x| φ(x) is at most 0.242.
    beyond = max(far - eps / 4, 0.0)
    return far, math.log(2) - 2 * n * beyond**2


def _repeated_values(draws: Sequence[Draw]) -> Comparisons:
    """Find values that repeat, in any order and with any sign, by tiny gaps after sorting."""
    groups = [(name, draws, "") for draw in draws[:1] for name in ("", *draw.noise)]
    groups += [("", [draw], f" in {draw.words}") for draw in draws]
    found = []
    for name, group, where in groups:
        ranks = torch.erf(_values(group, name).abs() / 2**0.5).sort().values
        n = len(ranks) - 1
        if n > 0:
            close = int((ranks.diff() <= SAME_RANK).sum())
            chance = log_chance_of_count(close, n, 0.0, min(1.02 * (n + 1) * SAME_RANK, 1.0))
            words = f"of {n + 1} values {close} repeat{where}, in another place or step"
            found.append(NoiseTest(chance, name, words, f"{close} of {n + 1} close"))
    return found, len(found)


def _repeats(draws: Sequence[Draw]) -> Comparisons:
    """Correlate the first step of each run, and all steps in a row, with shifts of themselves.

    In the first run each parameter is also searched by itself, a stronger test if only one is
    wrong.
    """
    firsts = [draw for draw in draws if draw.step == 1]
    pieces = [(n, each.double(), d.words) for d in firsts[:1] for n, each in d.noise.items()]
    pieces += [("", _values([draw], ""), draw.words) for draw in firsts]
    if draws:
        pieces.append(("", _values(draws, "")[:SEQUENCE_ELEMENTS], "all steps in a row"))
    found = []
    for name, piece, where in pieces:
        for words, r, n in worst_repeat(piece):
            chance = float(log_chance_of_correlation(torch.tensor(r).double(), torch.tensor(n)))
            of = f"r = {r:.2g} of {n}"
            words = f"its noise repeats {words} in {where} ({of})"
            found.append(NoiseTest(chance, name, words, of))
    return found, 4 * sum(len(piece) for _, piece, _ in pieces)


def worst_repeat(noise: Tensor) -> Iterator[tuple[str, float, int]]:
    """Find the shift at which a vector correlates most with itself, and with its mirror image.

    One Fourier transform gives the correlations at all distances L. The bound needs pairs
    (i, i + L) that share no element. So the vector is cut into stretches of L elements, and pairs
    whose i is in an odd or in an even stretch are correlated separately.

    Yields:
        A description of the repeat, the correlation, and the number of elements.
    """
    size = len(noise)
    if size < 2 * FEWEST_CORRELATED or not noise.isfinite().all():
        return
    squares = torch.cat([noise.new_zeros(1), noise.square().cumsum(0)])
    spectrum = torch.fft.rfft(noise, 2 ** (2 * size - 1).bit_length())
    first = torch.arange(size, device=noise.device)

    def largest(products: Tensor, a: Tensor, b: Tensor, n: Tensor) -> int:
        """The index of the least likely correlation; its two stretches of n begin at a and b."""
        energy = (squares[a + n] - squares[a]) * (squares[b + n] - squares[b])
        r = products / energy.clamp(min=1e-300).sqrt()
        return int(log_chance_of_correlation(r * (n >= FEWEST_CORRELATED), n).argmin())

    moved = torch.fft.irfft(spectrum.abs().square())[:size]
    moved[0] = 0
    far = largest(moved, first, torch.zeros_like(first), size - first)
    if far:
        one, other = noise[:-far], noise[far:]
        odd = first[: len(one)] // far % 2 == 1
        for some in (odd, ~odd):
            yield f"{far} elements further on", *_correlation(one[some], other[some])
    total = torch.arange(2 * size - 1, device=noise.device)  # i + j of mirrored elements
    mirrored = torch.fft.irfft(spectrum.square())[: len(total)]
    middle = (total % 2 == 0) * noise[total // 2].square()
    begin = (total - size + 1).clamp(min=0)
    n = (total + 1) // 2 - begin
    at = largest((mirrored - middle) / 2, begin, total - begin - n + 1, n)
    start, length = int(begin[at]), int(n[at])
    other = noise[at - start - length + 1 : at - start + 1].flip(0)
    yield f"mirrored at {at / 2:g}", *_correlation(noise[start : start + length], other)


def _correlation(a: Tensor, b: Tensor) -> tuple[float, int]:
    size = float(a.norm() * b.norm())
    return float((a * b).sum()) / size if size else 0.0, a.numel()


def _pairs(draws: Sequence[Draw]) -> Comparisons:
    """Correlate each parameter's noise with that of other parameters and other steps.

    Also correlate the noise of all parameters together between steps. With many elements even a
    small correlation is visible, such as that of a missing band.
    """
    parts = [(name, d.words, each[:PAIR_ELEMENTS]) for d in draws for name, each in d.noise.items()]
    steps = [("", d.words, _values([d], "")[:STEP_ELEMENTS]) for d in draws]
    found, comparisons = _correlations(parts)
    more, others = _correlations(steps)
    return found + more, comparisons + others


def _correlations(named: Sequence[tuple[str, str, Tensor]]) -> Comparisons:
    """Find for each (parameter, step, vector) the earlier vector with which it correlates most."""
    if not named:
        return [], 0
    rows = pad_sequence([noise.double() for *_, noise in named], batch_first=True)
    sizes = torch.tensor([len(noise) for *_, noise in named], device=rows.device)
    there = (torch.arange(rows.shape[1], device=rows.device) < sizes[:, None]).to(rows.dtype)
    squares = rows.square() @ there.T  # [i, j]: row i over the elements that row j has
    r = (rows @ rows.T / (squares * squares.T).sqrt()).nan_to_num().tril(-1)
    n = torch.minimum(sizes[:, None], sizes)
    worst, others = log_chance_of_correlation(r, n).min(1)
    found = []
    for i, j in enumerate(others.tolist()):
        (name, where, _), (other, there_too, _) = named[i], named[j]
        which = "that" if other == name else f"that of {other}"
        of = f"r = {float(r[i, j]):.2g} of {int(n[i, j])}"
        words = f"its noise in {where} correlates with {which} in {there_too} ({of})"
        found.append(NoiseTest(float(worst[i]), name, words, of))
    return found, len(named) ** 2 // 2


def _along(draws: Sequence[Draw]) -> Comparisons:
    """Test that the noise has no unusual component along the clipped gradient."""
    found = []
    for (run, name), group in _groups(draws).items():
        if run and (known := [draw for draw in group if name in draw.along]):
            count = len(known) ** 0.5
            far = sum(draw.along[name] for draw in known) / count
            slack = sum(draw.slack for draw in known) / count
            beyond = max(abs(far) - slack, 0.0) if math.isfinite(far) else math.inf
            words = f"beside noise, the clipped gradient is off by {far:.3g} deviations ({run})"
            found.append(
                NoiseTest(math.log(2) - beyond**2 / 2, name, words, f"{far:.2g} deviations")
            )
    return found, len(found)
