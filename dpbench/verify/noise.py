"""Whether noise is standard normal once divided by σC/B, and drawn anew for each element and step.

Each check compares a bound on the chance that right noise does so badly with its part of
`FALSE_ALARM`. The bounds hold for any number of elements, and are added up (Bonferroni):

- the mean square q of n standard normals: exp(-n/2 (q - 1 - ln q)) on either side (Chernoff);
- the correlation r of n of them with any other vector: (1 - r²)^((n-1)/2) on both sides, which is
  never below the share of a sphere that lies so far from its equator;
- the largest distance d of their distribution from the normal one: 2 exp(-2 n d²) (Massart, "The
  Tight Constant in the Dvoretzky-Kiefer-Wolfowitz Inequality", 1990);
- k of n events of chance p: exp(-n KL(k/n, p)) on either side (Chernoff). It also holds for events
  that are negatively associated (Dubhashi and Ranjan, "Balls and bins", 1998), as narrow gaps
  between sorted values are.

What these cannot see: noise that repeats after more steps than are trained; with 16-bit parameters,
elements that come again in another order; and mixtures of fewer elements than `worst_repeat` needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dpbench.verify.check import NOT_JUDGED, Check
from dpbench.verify.reference import Gradients

FALSE_ALARM = 1e-6
"""The largest chance that any of the checks of right noise fails."""

CHECKS = 12
"""Among which it is divided: six of the workload's noise, and six of a layer's."""

SAMPLE = 4096
"""Elements of each parameter, from its first, in which parameters are compared."""

NONE = 1e-6
"""A mean square of less than this is that of gradients."""

MOST = 2**20
"""Elements whose distribution is looked at."""

IN_A_ROW = 2**23
"""Elements of all steps in a row that are searched for repetitions."""

FEWEST = 8
"""Elements whose correlation a Fourier transform gives without much rounding."""

TAILS = (2.0, 3.0, 3.5, 4.0, 4.5, 5.0)
"""Standard deviations beyond which elements are counted."""

CLOSE = 2**-20
"""Relative distance of two numbers that are one, rounded to float32 after other sums. Values are
compared by their rank in the normal distribution, which is at most `STEEPEST` times as far."""
STEEPEST = 0.484

EXACT = 1e-6
"""A larger slack, as a norm, hides which numbers are the same."""
NEAR = 0.1
"""A larger one hides more than the deviation."""


@dataclass(frozen=True)
class Draw:
    """The noise of a step, divided by what its deviation should be.

    Attributes:
        run: in words, of which trainer and with which σ and C.
        step: its number in the run.
        noise: of each parameter, flat; of late steps, small parameters alone.
        along: of each parameter, and of all as ``""``, the noise along the clipped gradient.
        slack: by how much the noise may be off, as a norm: what is not known of the gradient.
    """

    run: str
    step: int
    noise: Gradients
    along: Mapping[str, float] = field(default_factory=dict)
    slack: float = 0.0

    @property
    def words(self) -> str:
        """Which step of which run."""
        return f"step {self.step} ({self.run})"


@dataclass(frozen=True)
class Finding:
    """The least likely of the values that one check compares; ``chance`` is a logarithm."""

    chance: float
    name: str
    words: str
    far: str = ""


def check_noise(draws: Sequence[Draw], dtype: torch.dtype, runs: str) -> Iterator[Check]:
    """What is wrong with noise.

    Args:
        draws: of several steps, in several runs.
        dtype: of the parameters, to which the noise is rounded.
        runs: in words, of what there are draws.
    """
    whole = [draw for draw in draws if len(draw.noise) == len(draws[0].noise)]
    full = [draw for draw in whole if draw.slack < NEAR]
    deviation = _judged("noise: deviation", *_deviations(draws))
    yield deviation
    distribution = Check("noise: distribution", NOT_JUDGED, "", "", ["its deviation is another"])
    if deviation.passed:
        distribution = _judged("noise: distribution", *_distributions(full, torch.finfo(dtype).eps))
    yield distribution
    values = Check("noise: values", NOT_JUDGED, "", "", ["its distribution is another"])
    if distribution.passed:
        exact = [draw for draw in full if draw.slack < EXACT and dtype.itemsize >= 4]
        values = _judged("noise: values", *_repeated_values(exact))
    yield values
    yield _judged("noise: elements", *_repeats(full))
    yield _judged(f"noise: {runs}", *_pairs(full))
    yield _judged("noise beside gradients", *_along(draws))


def chance_of_mean_square(q: float, n: int) -> float:
    """Of n standard normals, to be so far from 1 on either side: a bound on its logarithm."""
    return math.log(2) - n / 2 * (q - 1 - math.log(q)) if 0 < q < math.inf else -math.inf


def chance_of_correlation(r: Tensor, n: Tensor) -> Tensor:
    """Of n standard normals with any other vector, to be so large: a bound on its logarithm."""
    return (n - 1).clamp(min=0) / 2 * torch.log1p(-(r * r).clamp(max=1 - 1e-12))


def chance_of_count(k: int, n: int, least: float, most: float) -> float:
    """Of n events to see k, if each has a chance from least to most: a bound on its logarithm."""
    seen = k / n
    p = min(max(seen, least), most)
    if p == seen:
        return 0.0
    if not 0 < p < 1:
        return -math.inf
    of_each = sum(a * math.log(a / b) for a, b in ((seen, p), (1 - seen, 1 - p)) if a)
    return math.log(2) - n * of_each


def surprising(chance: float, comparisons: int) -> bool:
    """Whether a chance, as its logarithm, is less than its part of `FALSE_ALARM`."""
    return not chance >= math.log(FALSE_ALARM / CHECKS / max(comparisons, 1))


Found = tuple[list[Finding], int]
"""What is to be judged, and of how many comparisons it is the worst."""


def _judged(check: str, found: Sequence[Finding], comparisons: int) -> Check:
    """One that fails for what surprises; of each parameter what was found first is said."""
    wrong: dict[str, str] = {}
    for each in found:
        if surprising(each.chance, comparisons) and (each.name or not wrong):
            name = each.name or "all parameters"
            wrong.setdefault(name, f"{name}: {each.words}")
    worst = min(found, key=lambda each: each.chance, default=Finding(0.0, "", ""))
    return Check.of(check, [*wrong.values()], worst.name, worst.far)


def _groups(draws: Sequence[Draw]) -> dict[tuple[str, str], list[Draw]]:
    """Draws by run and parameter, by parameter, by run, and all: ``""`` stands for every one."""
    runs = ["", *dict.fromkeys(draw.run for draw in draws)]
    names = ["", *(name for draw in draws[:1] for name in draw.noise)]
    keys = sorted(product(runs, names), key=lambda key: (key[1] == "", key[0] == ""))
    return {
        (run, name): [d for d in draws if run in ("", d.run) and (not name or name in d.noise)]
        for run, name in keys
    }


def _values(draws: Sequence[Draw], name: str) -> Tensor:
    """The noise of one parameter, or of all, in a row."""
    parts = [noise for draw in draws for each, noise in draw.noise.items() if name in ("", each)]
    return torch.cat(parts).double()


def _deviations(draws: Sequence[Draw]) -> Found:
    found = []
    for (run, name), group in _groups(draws).items():
        values = _values(group, name)
        n = values.numel()
        norm, wanted = float(values.norm()), n**0.5
        slack = sum(draw.slack**2 for draw in group) ** 0.5
        inside = min(max(norm, wanted - slack), wanted + slack)  # what slack explains is right
        chance = chance_of_mean_square(((wanted + norm - inside) / wanted) ** 2, n)
        times = norm / wanted
        words = "no noise"
        if not times**2 < NONE:
            words = f"{times:.4g} times the deviation σC/B" + f" ({run})" * bool(run)
        found.append(Finding(chance, name, words, f"{times:.4g} σC/B"))
    return found, len(found)


def _distributions(draws: Sequence[Draw], eps: float) -> Found:
    found = []
    for (run, name), group in _groups(draws).items():
        if run and name:
            continue
        values = _values(group, name)
        far, chance = _distance(values[:: -(-values.numel() // MOST)], eps)
        where = f" ({run})" * bool(run)
        words = f"its distribution is off the normal one by {far:.2g}{where}"
        found.append(Finding(chance, name, words, f"{far:.2g}"))
        sizes, n = values.abs(), values.numel()
        for beyond in TAILS:
            k = int((sizes > beyond).sum())
            least, most = (math.erfc(beyond * (1 + off) / 2**0.5) for off in (eps, -eps))
            chance = chance_of_count(k, n, least, most)
            words = f"{k} of {n} elements are beyond {beyond:g} σ{where}, not {n * most:.3g}"
            found.append(Finding(chance, name, words, f"{k} beyond {beyond:g} σ"))
    return found, len(found)


def _distance(values: Tensor, eps: float) -> tuple[float, float]:
    """How far the distribution of values is from the normal one, and the chance of that."""
    n = values.numel()
    normal = torch.special.ndtr(values.sort().values)
    ranks = torch.arange(n + 1, dtype=normal.dtype, device=normal.device) / n
    far = float(torch.maximum(ranks[1:] - normal, normal - ranks[:-1]).max())
    # Rounding moves a value by half of eps: |x| φ(x) is at most 0.242; it is rounded twice.
    beyond = max(far - eps / 4, 0.0)
    return far, math.log(2) - 2 * n * beyond**2


def _repeated_values(draws: Sequence[Draw]) -> Found:
    """Values that come again in any order and with any sign, by the gaps between sorted ones."""
    groups = [(name, draws, "") for draw in draws[:1] for name in ("", *draw.noise)]
    groups += [("", [draw], f" in {draw.words}") for draw in draws]
    found, gap = [], STEEPEST * CLOSE
    for name, group, where in groups:
        ranks = torch.erf(_values(group, name).abs() / 2**0.5).sort().values
        n = len(ranks) - 1
        if n > 0:
            close = int((ranks.diff() <= gap).sum())
            chance = chance_of_count(close, n, 0.0, min(1.02 * (n + 1) * gap, 1.0))
            words = f"of {n + 1} values {close} come again{where}, in another place or step"
            found.append(Finding(chance, name, words, f"{close} of {n + 1} close"))
    return found, len(found)


def _repeats(draws: Sequence[Draw]) -> Found:
    """Parameters and steps, of each run the first, and all steps in a row, however moved."""
    firsts = [draw for draw in draws if draw.step == 1]
    pieces = [(name, noise.double(), d.words) for d in firsts for name, noise in d.noise.items()]
    pieces += [("", _values([draw], ""), draw.words) for draw in firsts]
    if draws:
        pieces.append(("", _values(draws, "")[:IN_A_ROW], "all steps in a row"))
    found = []
    for name, piece, where in pieces:
        for words, r, n in worst_repeat(piece):
            chance = float(chance_of_correlation(torch.tensor(r).double(), torch.tensor(n)))
            of = f"r = {r:.2g} of {n}"
            words = f"its noise repeats {words} in {where} ({of})"
            found.append(Finding(chance, name, words, of))
    return found, 4 * sum(len(piece) for _, piece, _ in pieces)


def worst_repeat(noise: Tensor) -> Iterator[tuple[str, float, int]]:
    """Where a vector is most like itself, moved by some distance or mirrored: its correlation.

    Correlations at all distances come from one Fourier transform. A vector's elements beyond a
    distance L are no independent pairs with those before; in every second stretch of L they are.

    Yields:
        In words where it repeats, the correlation, and of how many elements.
    """
    size = len(noise)
    if size < 2 * FEWEST or not noise.isfinite().all():
        return
    squares = torch.cat([noise.new_zeros(1), noise.square().cumsum(0)])
    spectrum = torch.fft.rfft(noise, 2 ** (2 * size - 1).bit_length())
    first = torch.arange(size, device=noise.device)

    def largest(products: Tensor, a: Tensor, b: Tensor, n: Tensor) -> int:
        """The index with the least chance; a and b are where the two stretches of n begin."""
        energy = (squares[a + n] - squares[a]) * (squares[b + n] - squares[b])
        r = products / energy.clamp(min=1e-300).sqrt()
        return int(chance_of_correlation(r * (n >= FEWEST), n).argmin())

    moved = torch.fft.irfft(spectrum.abs().square())[:size]
    moved[0] = 0
    far = largest(moved, first, torch.zeros_like(first), size - first)
    if far:
        one, other = noise[:-far], noise[far:]
        odd = first[: len(one)] // far % 2 == 1
        for some in (odd, ~odd):
            yield f"{far} elements further on", *_correlation(one[some], other[some])
    total = torch.arange(2 * size - 1, device=noise.device)  # of both indices
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


def _pairs(draws: Sequence[Draw]) -> Found:
    """Each parameter's noise with that in any other step, and with that of any other parameter."""
    named = [(name, d.words, noise[:SAMPLE]) for d in draws for name, noise in d.noise.items()]
    if not named:
        return [], 0
    rows = pad_sequence([noise.double() for *_, noise in named], batch_first=True)
    sizes = torch.tensor([len(noise) for *_, noise in named], device=rows.device)
    there = (torch.arange(rows.shape[1], device=rows.device) < sizes[:, None]).to(rows.dtype)
    squares = rows.square() @ there.T  # of each row, over the elements that the other has too
    r = (rows @ rows.T / (squares * squares.T).sqrt()).nan_to_num().tril(-1)
    n = torch.minimum(sizes[:, None], sizes)
    worst, others = chance_of_correlation(r, n).min(1)
    found = []
    for i, j in enumerate(others.tolist()):
        (name, where, _), (other, there_too, _) = named[i], named[j]
        which = "that" if other == name else f"that of {other}"
        of = f"r = {float(r[i, j]):.2g} of {int(n[i, j])}"
        words = f"its noise in {where} is {which} in {there_too} ({of})"
        found.append(Finding(float(worst[i]), name, words, of))
    return found, len(named) ** 2 // 2


def _along(draws: Sequence[Draw]) -> Found:
    """Noise along the clipped gradient, of which none is left once the gradient is taken off."""
    found = []
    for (run, name), group in _groups(draws).items():
        if run and (known := [draw for draw in group if name in draw.along]):
            count = len(known) ** 0.5
            far = sum(draw.along[name] for draw in known) / count
            slack = sum(draw.slack for draw in known) / count
            beyond = max(abs(far) - slack, 0.0) if math.isfinite(far) else math.inf
            words = f"beside noise, the clipped gradient is off by {far:.3g} deviations ({run})"
            found.append(Finding(math.log(2) - beyond**2 / 2, name, words, f"{far:.2g} deviations"))
    return found, len(found)
