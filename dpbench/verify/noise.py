"""Tests that noise, divided by σC/B, is standard normal and independent of other noise.

σ is the noise multiplier, C the clipping threshold and B the batch size. A test makes one or more
comparisons. Each comparison has an upper bound on the probability that correct noise gives a result
at least as extreme. The probability `FALSE_ALARM` is divided equally among the tests, and each
test's share equally among the test's comparisons (Bonferroni). A test fails if the bound of any of
its comparisons is below the share of that comparison.

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
- A largest distance d of the distribution of n values from the normal one: 2 exp(-2 n d²) (Massart,
  "The Tight Constant in the Dvoretzky-Kiefer-Wolfowitz Inequality", 1990).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dpbench.verify.check_result import NOT_JUDGED, Check
from dpbench.verify.reference import Gradients

FALSE_ALARM = 1e-6
"""Largest probability that correct noise fails any of the tests."""

TESTS = 14
"""Number of tests that share `FALSE_ALARM`: six on the workload and six on a linear layer, and on
both that of what steps leave behind (see `Verification.left_behind`)."""

NO_NOISE = 1e-6
"""Mean square, in units of (σC/B)², below which noise counts as missing. It is not 0, because
gradients without noise still have rounding errors."""

DISTRIBUTION_ELEMENTS, VALUES = 2**20, 2**17
"""Largest numbers of elements that `_distributions` and `_repeated_values` sort."""

TAILS = (2.0, 3.0, 3.5, 4.0, 4.5, 5.0)
"""Distances from zero, in standard deviations, beyond which elements are counted."""

SAME_VALUE = 2**-20
"""Largest relative difference between two float32 roundings of the same drawn value."""
SAME_RANK = 0.484 * SAME_VALUE
"""Largest difference between the ranks of two roundings of the same drawn value. The rank
of x is erf(|x|/√2). The slope of the rank times |x| is at most 0.484, so a relative difference of
`SAME_VALUE` changes the rank by at most 0.484 `SAME_VALUE`."""

EXACT_SLACK = 1e-6
"""Values of a draw are searched for repeats only if `Draw.slack` is below this number."""
KNOWN_SLACK = 0.1
"""The distribution and the independence of noise are tested only with draws whose `Draw.slack` is
below this number. The standard deviation, and the component along the clipped gradient, are tested
with all draws."""

PAIR_ELEMENTS, PAIR_ROWS = 4096, 4096
"""Largest number of leading elements of each parameter that `pair_correlations` compares, and
largest number of parameters, each counted in every step."""
STEP_ELEMENTS = 2**20
"""Largest number of leading elements of a whole step that `pair_correlations` compares, and of all
steps in a row that `shift_correlations` searches."""
FEWEST_CORRELATED = 8
"""Smallest number of correlated pairs that `worst_shift` considers."""


@dataclass(frozen=True)
class Draw:
    """The noise of one step, divided by σC/B.

    Attributes:
        run: the run's name for messages, such as ``σ = 1e+04, C = 0.7 in 2 parts``. It may be
            empty.
        step: the step's number in its run, from 1.
        noise: the flat noise of each parameter. Steps may have different parameters.
        along: the component of the noise along the clipped gradient, by parameter. The key ``""``,
            if present, means all parameters together.
        slack: a bound on the norm of the error that the gradient's rounding causes in ``noise``.
    """

    run: str
    step: int
    noise: Gradients
    along: Mapping[str, float] = field(default_factory=dict)
    slack: float = 0.0

    @classmethod
    def beside(
        cls, clipped: Gradients, run: str, step: int, noise: Gradients, slack: float
    ) -> Draw:
        """Make a draw whose `along` is computed from the clipped gradient of the step."""
        norms = {name: float(clipped[name].norm()) or 1.0 for name in noise}
        along = {n: float(z @ clipped[n].flatten().double()) / norms[n] for n, z in noise.items()}
        if len(noise) == len(clipped):
            whole = sum(norm**2 for norm in norms.values()) ** 0.5
            along[""] = sum(norms[name] * far for name, far in along.items()) / whole
        return cls(run, step, noise, along, slack)

    @property
    def step_name(self) -> str:
        """The step and its run, for messages."""
        return f"step {self.step}" + f" ({self.run})" * bool(self.run)


@dataclass(frozen=True)
class Comparison:
    """One comparison of a noise test.

    Attributes:
        log_chance: the natural logarithm of the bound on the probability.
        name: the parameter; empty for all parameters together.
        message: a description of the result, to print after the parameter's name.
        error_text: the result in a few characters, for a table.
        limits: returns which results pass, as text, if ``log_chance`` must be at least its
            argument. None if ``error_text`` says what is expected.
    """

    log_chance: float
    name: str
    message: str
    error_text: str
    limits: Callable[[float], str] | None = None


Comparisons = tuple[list[Comparison], int]
"""Some comparisons of a test, including the least likely, and the number of all its comparisons."""


def check_noise(draws: Sequence[Draw], dtype: torch.dtype, runs: str) -> Iterator[Check]:
    """Yield the results of the noise tests that apply to the draws.

    Any number of steps and parameters is judged. Without draws, the noise is not judged, which does
    not pass. The test beside gradients applies to draws that have `Draw.along`, and the test of
    values to draws with 32 bits and a small `Draw.slack`.

    Args:
        draws: the noise of the steps of one or more runs.
        dtype: the parameters' dtype, to which noise is rounded.
        runs: a list of what is compared, such as "parameters, steps, runs", for the name of a
            check.
    """
    if not draws:
        yield Check("noise", NOT_JUDGED, "", "", ["no step with noise was seen"])
        return
    known = [draw for draw in draws if draw.slack < KNOWN_SLACK]
    exact = [draw for draw in known if draw.slack < EXACT_SLACK and dtype.itemsize >= 4]
    deviation = _check("noise: deviation", *_deviations(draws))
    distribution = Check("noise: distribution", NOT_JUDGED, "", "", ["the deviation is wrong"])
    values = Check("noise: values", NOT_JUDGED, "", "", ["the distribution is wrong"])
    if deviation.passed:
        distribution = _check(distribution.name, *_distributions(known, torch.finfo(dtype).eps))
    if not exact:
        values = Check(values.name, NOT_JUDGED, "", "rounding hides whether values repeat")
    elif distribution.passed:
        values = _check(values.name, *_repeated_values(exact))
    yield from (deviation, distribution, values)
    yield _check("noise: elements", *shift_correlations(known))
    yield _check(f"noise: {runs}", *pair_correlations(known))
    if any(draw.along for draw in draws):
        yield _check("noise beside gradients", *_along_gradients(draws))


def _check(name: str, found: Sequence[Comparison], number: int) -> Check:
    """Make a check that fails if any comparison is too unlikely.

    ``number`` is the number of the test's comparisons. The check names each wrong parameter once. A
    failure of all parameters together is named only if it is the first failure. A check that passes
    shows the result of all parameters together, if there is one. A check that fails shows the least
    likely result, and a bound on the probability that any of so many comparisons is as extreme.
    """
    if not found:
        why = "too few elements of noise that rounding does not hide"
        return Check(name, NOT_JUDGED, "", "", [why])
    limit = math.log(FALSE_ALARM / TESTS / max(number, 1))
    wrong: dict[str, str] = {}
    for each in found:
        if not each.log_chance >= limit and (each.name or not wrong):
            parameter = each.name or "all parameters"
            wrong.setdefault(parameter, f"{parameter}: {each.message}")
    together = [each for each in found if not (each.name or wrong)]
    shown = min(together or found, key=lambda each: each.log_chance)
    chance = math.exp(min(shown.log_chance + math.log(max(number, 1)), 0.0))
    how = f"; chance {chance:.1g} if noise is correct (≥ {FALSE_ALARM / TESTS:.1g})" * bool(wrong)
    limits = f" ({shown.limits(limit)})" if shown.limits else ""
    error_text = shown.error_text + limits + how
    return Check.judged(name, [*wrong.values()], shown.name, error_text)


# --- the noise of one element --------------------------------------------------------------------


def _deviations(draws: Sequence[Draw]) -> Comparisons:
    """Test the deviation of each run, of all runs, and of each step, jointly and by parameter."""
    groups = defaultdict[tuple[str, str], list[tuple[float, int, float]]](list)
    for draw in draws:
        norms = {n: torch.linalg.vector_norm(z.double()) for n, z in draw.noise.items()}
        squares = {name: float(norm) ** 2 for name, norm in norms.items()}
        sizes = {name: z.numel() for name, z in draw.noise.items()}
        squares[""], sizes[""] = sum(squares.values()), sum(sizes.values())
        for where in {draw.run, "", draw.step_name}:
            for name, square in squares.items():
                groups[where, name].append((square, sizes[name], draw.slack**2))
    found = []
    for (where, name), group in groups.items():
        square, n, slack_square = map(sum, zip(*group, strict=True))
        norm, expected, slack = square**0.5, n**0.5, slack_square**0.5
        explained = min(max(norm, expected - slack), expected + slack)
        chance = log_chance_of_mean_square(((expected + norm - explained) / expected) ** 2, n)
        times = norm / expected
        missing = times**2 < NO_NOISE
        message = "no noise" if missing else f"{times:.4g} times the deviation σC/B"
        message += f" ({where})" * bool(where)
        limits = partial(_limits_of_deviation, n, slack / expected)
        comparison = Comparison(chance, name, message, f"{times:.4g} σC/B", limits)
        found.append((not name, not where, chance, comparison))
    # A message names the least likely run or step; all runs together come last.
    return [each for *_, each in sorted(found, key=lambda each: each[:3])], len(found)


def log_chance_of_mean_square(q: float, n: int) -> float:
    """Return a bound on ln P(the mean square of n standard normals is at least as extreme as q)."""
    return math.log(2) - n / 2 * (q - 1 - math.log(q)) if 0 < q < math.inf else -math.inf


def _limits_of_deviation(n: int, slack: float, least: float) -> str:
    """Return the smallest and the largest deviation of n elements that pass, to 1e-4."""

    def farthest(sign: int, most: int) -> float:
        def unlikely(far: int) -> float:
            return -log_chance_of_mean_square((1 + sign * far / 10_000) ** 2, n)

        far = bisect_right(range(most), -least, key=unlikely) - 1
        return max(1 + sign * (far / 10_000 + slack), 0.0)

    return f"{farthest(-1, 10_000):.4g} to {farthest(1, 10**6):.4g}"


def _distributions(draws: Sequence[Draw], eps: float) -> Comparisons:
    """Test the distribution of each parameter in all runs, and of all parameters in each run."""
    groups = [(name, "") for name in {n: None for draw in draws for n in draw.noise}]
    groups += [("", run) for run in {draw.run: None for draw in draws} | {"": None}]
    found = []
    for name, run in groups if draws else ():
        values = joined_noise([draw for draw in draws if run in ("", draw.run)], name)
        thinned = _thinned(values, DISTRIBUTION_ELEMENTS)
        distance, chance = _distance(thinned, eps)
        sizes, n, where = values.abs(), values.numel(), f" ({run})" * bool(run)
        message = f"the distribution differs from the normal one by {distance:.2g}{where}"
        limits = partial(_limit_of_distance, thinned.numel(), eps)
        text = f"off by {distance:.2g} from normal"
        found.append(Comparison(chance, name, message, text, limits))
        for beyond in TAILS:
            k = int(torch.count_nonzero(sizes > beyond))
            least, most = (math.erfc(beyond * (1 + off) / 2**0.5) for off in (eps, -eps))
            chance = log_chance_of_count(k, n, least, most)
            message = f"{k} of {n} elements are beyond {beyond:g} σ, expected {n * most:.3g}{where}"
            expected = f"{k} beyond {beyond:g} σ, expected {n * most:.3g}"
            found.append(Comparison(chance, name, message, expected))
    return found, len(found)


def _distance(values: Tensor, eps: float) -> tuple[float, float]:
    """Return the largest distance from the normal distribution, and a bound on its ln P."""
    n = values.numel()
    normal = torch.special.ndtr(_sorted(values))
    ranks = torch.arange(n + 1, dtype=normal.dtype, device=normal.device) / n
    distance = float(torch.maximum(ranks[1:] - normal, normal - ranks[:-1]).max())
    # A value x is rounded twice, each time by at most eps/2 · |x|. This changes its normal
    # probability by at most eps · |x| φ(x), where φ is the normal density. |x| φ(x) is at most
    # 0.242, so the change is less than eps/4.
    beyond_rounding = max(distance - eps / 4, 0.0)
    return distance, math.log(2) - 2 * n * beyond_rounding**2


def _limit_of_distance(n: int, eps: float, least: float) -> str:
    return f"≤ {((math.log(2) - least) / (2 * n)) ** 0.5 + eps / 4:.2g}"


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


def _repeated_values(draws: Sequence[Draw]) -> Comparisons:
    """Find noise of too few different values, such as 16-bit noise, by gaps of sorted ranks."""
    values = _thinned(joined_noise(draws, "").abs(), VALUES)
    n = len(values) - 1
    if not n:
        return [], 0
    close = int((torch.erf(_sorted(values) / 2**0.5).diff() <= SAME_RANK).sum())
    share = min(1.02 * (n + 1) * SAME_RANK, 1.0)
    chance = log_chance_of_count(close, n, 0.0, share)
    message = f"{close} of {n + 1} values repeat, expected about {n * share:.0f}"
    return [Comparison(chance, "", message, message, partial(_limit_of_repeats, n, share))], 1


def _limit_of_repeats(n: int, share: float, least: float) -> str:
    more = bisect_right(range(n + 1), -least, key=lambda k: -log_chance_of_count(k, n, 0.0, share))
    return f"≤ {more - 1}"


def joined_noise(draws: Sequence[Draw], name: str) -> Tensor:
    """Join the noise of a parameter in several steps. ``""`` joins the noise of all parameters."""
    found = [noise for draw in draws for each, noise in draw.noise.items() if name in ("", each)]
    return torch.cat(found).double()


def _thinned(values: Tensor, most: int) -> Tensor:
    """Return every second, third or later value, so that there are at most ``most``."""
    return values[:: -(-values.numel() // most)]


def _sorted(values: Tensor) -> Tensor:
    """Sort a vector. NumPy sorts ten times as fast as PyTorch's CPU code."""
    return values.sort().values if values.is_cuda else torch.from_numpy(np.sort(values.numpy()))


# --- noise and other noise -----------------------------------------------------------------------


def shift_correlations(draws: Sequence[Draw]) -> Comparisons:
    """Correlate noise with shifted copies of the same noise.

    The noise of each run's first step is correlated with its own copies, and so is the sequence of
    the noise of all steps. In the first step of the first run, each parameter is also correlated
    alone, so that a fault in a single parameter is easier to find.
    """
    if not draws:
        return [], 0
    first = draws[0]
    vectors = [(name, noise.double(), first.step_name) for name, noise in first.noise.items()]
    for draw in {draw.run: draw for draw in reversed(draws)}.values():
        vectors.append(("", joined_noise([draw], ""), draw.step_name))
    vectors.append(("", joined_noise(draws, "")[:STEP_ELEMENTS], "all steps in a row"))
    found = []
    for name, vector, where in vectors:
        shift, correlations = worst_shift(vector)
        for r, n in correlations:
            chance = float(log_chance_of_correlation(torch.tensor(r).double(), torch.tensor(n)))
            size = f"correlation {r:.2g} of {n} pairs"
            message = f"the noise repeats after {shift} elements in {where} ({size})"
            found.append(Comparison(chance, name, message, size, partial(_limit_of_correlation, n)))
    return found, 2 * sum(len(vector) for _, vector, _ in vectors)


def worst_shift(noise: Tensor) -> tuple[int, list[tuple[float, int]]]:
    """Find the shift at which a vector's correlation with its shifted copy is least likely.

    A Fourier transform gives the correlations at all shifts. The bound on the probability needs
    pairs that share no element. At a shift of L, the pairs are (i, i + L). So the vector is cut
    into stretches of L elements. Pairs whose i is in an odd stretch are correlated separately from
    pairs whose i is in an even stretch.

    Returns:
        The shift, and for each half of the pairs, the correlation and the number of pairs. No
        correlations are returned for a short vector, or for values that are not finite.
    """
    size = len(noise)
    if size < 2 * FEWEST_CORRELATED or not noise.isfinite().all():
        return 0, []
    unit = 2 ** ((2 * size - 1).bit_length() - 3)  # a transform's length has only small factors
    spectrum = torch.fft.rfft(noise, -(-(2 * size - 1) // unit) * unit)
    products = torch.fft.irfft(spectrum.abs().square())[1 : size - FEWEST_CORRELATED + 1]
    # [n - 1]: the sums of squares of the first and of the last n elements
    before, after = noise.square().cumsum(0), noise.flip(0).square().cumsum(0)
    n = torch.arange(size - 1, size - 1 - len(products), -1, device=noise.device)
    squared = products.square() / (before[n - 1] * after[n - 1]).clamp(min=1e-300)
    shift = 1 + int((torch.log1p(-squared.clamp(max=1 - 1e-12)) * (n - 1)).argmin())
    one, other = noise[:-shift], noise[shift:]
    odd = torch.arange(len(one), device=noise.device) // shift % 2 == 1
    halves = [(one[half], other[half]) for half in (odd, ~odd)]
    norms = [float(a.norm() * b.norm()) or 1.0 for a, b in halves]
    return shift, [
        (float(a @ b) / norm, len(a)) for (a, b), norm in zip(halves, norms, strict=True)
    ]


def log_chance_of_correlation(r: Tensor, n: Tensor) -> Tensor:
    """Return a bound on ln P(n standard normals correlate with another vector by at least ±r)."""
    return (n - 1).clamp(min=0) / 2 * torch.log1p(-(r * r).clamp(max=1 - 1e-12))


def _limit_of_correlation(n: int, least: float) -> str:
    return f"within ±{(-math.expm1(2 * least / max(n - 1, 1e-9))) ** 0.5:.2g}"


def pair_correlations(draws: Sequence[Draw]) -> Comparisons:
    """Correlate each parameter's noise with the noise of other parameters and other steps.

    Also correlate the joint noise of all parameters between steps. With so many elements, even a
    small correlation is visible, for example if a trainer of correlated noise leaves out a weight.
    """
    of_parameters = [
        (name, d.step_name, each[:PAIR_ELEMENTS]) for d in draws for name, each in d.noise.items()
    ]
    of_steps = [("", d.step_name, joined_noise([d], "")[:STEP_ELEMENTS]) for d in draws]
    found, number = _correlations(of_parameters[:PAIR_ROWS])
    more, other_number = _correlations(of_steps)
    return found + more, number + other_number


def _correlations(named: Sequence[tuple[str, str, Tensor]]) -> Comparisons:
    """Find, for each vector, the earlier vector with the least likely correlation.

    Each entry of ``named`` contains the name of a parameter, the name of a step and a vector.
    """
    if not named:
        return [], 0
    rows = pad_sequence([noise.double() for *_, noise in named], batch_first=True)
    sizes = torch.tensor([len(noise) for *_, noise in named], device=rows.device)
    present = (torch.arange(rows.shape[1], device=rows.device) < sizes[:, None]).to(rows.dtype)
    squares = rows.square() @ present.T  # [i, j]: squares of row i up to the length of row j
    r = (rows @ rows.T / (squares * squares.T).sqrt()).nan_to_num().tril(-1)
    n = torch.minimum(sizes[:, None], sizes)
    worst, others = log_chance_of_correlation(r, n).min(1)
    found = []
    for i, j in enumerate(others.tolist()):
        (name, where, _), (other, other_step, _) = named[i], named[j]
        which = "that" if other == name else f"that of {other}"
        size = f"correlation {float(r[i, j]):.2g} of {(pairs := int(n[i, j]))} pairs"
        limits = partial(_limit_of_correlation, pairs)
        message = f"its noise in {where} correlates with {which} in {other_step} ({size})"
        found.append(Comparison(float(worst[i]), name, message, size, limits))
    return found, len(named) ** 2 // 2


def _along_gradients(draws: Sequence[Draw]) -> Comparisons:
    """Test that the noise has no improbably large component along the clipped gradient."""
    groups = defaultdict[tuple[str, str], list[Draw]](list)
    for draw in draws:
        for name in draw.along:
            groups[name, draw.run].append(draw)
    found = []
    for (name, run), group in sorted(groups.items(), key=lambda each: not each[0][0]):
        count = len(group) ** 0.5
        far = sum(draw.along[name] for draw in group) / count
        slack = sum(draw.slack for draw in group) / count
        beyond = max(abs(far) - slack, 0.0) if math.isfinite(far) else math.inf
        message = f"the clipped gradient is off by {far:.3g} noise deviations"
        message += f" ({run})" * bool(run)
        chance = math.log(2) - beyond**2 / 2
        text = f"{far:.2g} deviations along the gradient"
        found.append(Comparison(chance, name, message, text, partial(_limit_along, slack)))
    return found, len(found)


def _limit_along(slack: float, least: float) -> str:
    return f"within ±{(2 * (math.log(2) - least)) ** 0.5 + slack:.2g}"
