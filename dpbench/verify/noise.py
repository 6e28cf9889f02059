"""Tests that noise, divided by σC/B, is standard normal and independent of other noise.

σ is the noise multiplier, C the clipping threshold and B the batch size. A test makes one or more
comparisons. Each comparison bounds the probability that correct noise gives a result at least as
extreme (see `noise_bounds`). The probability `FALSE_ALARM` is divided equally among the tests, and
each test's share equally among the test's comparisons (Bonferroni). A test fails if the bound of
any of its comparisons is below the share of that comparison.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product

import torch
from torch import Tensor

from dpbench.verify.check_result import NOT_JUDGED, Check
from dpbench.verify.noise_bounds import (
    Comparison,
    Comparisons,
    log_chance_of_count,
    log_chance_of_mean_square,
)
from dpbench.verify.noise_draw import Draw, joined_noise, sorted_values
from dpbench.verify.noise_repeats import pair_correlations, repeated_values, shift_correlations

FALSE_ALARM = 1e-6
"""Largest probability that correct noise fails any of the tests."""

TESTS = 14
"""Number of tests that share `FALSE_ALARM`: six on the workload and six on a linear layer, and on
both that of what steps leave behind (see `dpbench.verify.left_behind`)."""

NO_NOISE = 1e-6
"""Mean square, in units of (σC/B)², below which noise counts as missing. It is not 0, because
gradients without noise still have rounding errors."""

DISTRIBUTION_ELEMENTS = 2**20
"""Largest number of elements that `_distance` compares with the normal distribution."""

TAILS = (2.0, 3.0, 3.5, 4.0, 4.5, 5.0)
"""Distances from zero, in standard deviations, beyond which elements are counted."""

EXACT_SLACK = 1e-6
"""Values of a draw are searched for repeats only if `Draw.slack` is below this number."""
KNOWN_SLACK = 0.1
"""The distribution and the independence of noise are tested only with draws whose `Draw.slack` is
below this number. The standard deviation, and the component along the clipped gradient, are tested
with all draws."""


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
    full = [draw for draw in draws if draw.slack < KNOWN_SLACK]
    deviation = _check("noise: deviation", *_deviations(draws))
    yield deviation
    distribution = Check("noise: distribution", NOT_JUDGED, "", "", ["the deviation is wrong"])
    if deviation.passed:
        distribution = _check("noise: distribution", *_distributions(full, torch.finfo(dtype).eps))
    yield distribution
    values = Check("noise: values", NOT_JUDGED, "", "", ["the distribution is wrong"])
    exact = [draw for draw in full if draw.slack < EXACT_SLACK and dtype.itemsize >= 4]
    if not exact:
        values = Check("noise: values", NOT_JUDGED, "", "rounding hides whether values repeat")
    elif distribution.passed:
        values = _check("noise: values", *repeated_values(exact))
    yield values
    yield _check("noise: elements", *shift_correlations(full))
    yield _check(f"noise: {runs}", *pair_correlations(full))
    if any(draw.along for draw in draws):
        yield _check("noise beside gradients", *_along_gradients(draws))


def _check(name: str, found: Sequence[Comparison], number: int) -> Check:
    """Make a check that fails if any comparison is too unlikely.

    ``number`` is the number of the test's comparisons. The check names each wrong parameter once. A
    failure of all parameters together is named only if it is the first failure. The result includes
    a bound on the chance that any of so many comparisons is as extreme, and its limit.
    """
    if not found:
        return Check(
            name, NOT_JUDGED, "", "", ["too few elements of noise that rounding does not hide"]
        )
    limit = math.log(FALSE_ALARM / TESTS / max(number, 1))
    wrong: dict[str, str] = {}
    for each in found:
        if not each.log_chance >= limit and (each.name or not wrong):
            parameter = each.name or "all parameters"
            wrong.setdefault(parameter, f"{parameter}: {each.message}")
    worst = min(found, key=lambda each: each.log_chance)
    chance = math.exp(min(worst.log_chance + math.log(max(number, 1)), 0.0))
    how = f"{worst.error_text}, chance {chance:.2g} (≥ {FALSE_ALARM / TESTS:.1g})"
    return Check.judged(name, [*wrong.values()], worst.name, how)


def _groups(draws: Sequence[Draw]) -> dict[tuple[str, str], list[Draw]]:
    """Group draws by (run, parameter). ``""`` stands for all runs, or for all parameters."""
    runs = ["", *dict.fromkeys(draw.run for draw in draws)]
    names = ["", *dict.fromkeys(name for draw in draws for name in draw.noise)]
    keys = sorted(product(runs, names), key=lambda key: (key[1] == "", key[0] == ""))
    groups = {
        (run, name): [d for d in draws if run in ("", d.run) and (not name or name in d.noise)]
        for run, name in keys
    }
    return {key: group for key, group in groups.items() if group}


def _deviations(draws: Sequence[Draw]) -> Comparisons:
    """Test the deviation of each run, of all runs, and of each step, jointly and by parameter."""
    groups = defaultdict[tuple[str, str], list[tuple[float, int, float]]](list)
    for draw in draws:
        of_names = [
            (name, float(torch.linalg.vector_norm(z, dtype=torch.float64)) ** 2, z.numel())
            for name, z in draw.noise.items()
        ]
        of_names.append(
            ("", sum(square for _, square, _ in of_names), sum(n for *_, n in of_names))
        )
        for where in {draw.run: 0, "": 0, draw.step_name: 0}:
            for name, square, n in of_names:
                groups[where, name].append((square, n, draw.slack**2))
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
        comparison = Comparison(chance, name, message, f"{times:.4g} σC/B")
        found.append((not name, not where, chance, comparison))
    # A message names the least likely run or step; all runs together come last.
    return [each for *_, each in sorted(found, key=lambda each: each[:3])], len(found)


def _distributions(draws: Sequence[Draw], eps: float) -> Comparisons:
    found = []
    for (run, name), group in _groups(draws).items():
        if run and name:
            continue
        values = joined_noise(group, name)
        distance, chance = _distance(values[:: -(-values.numel() // DISTRIBUTION_ELEMENTS)], eps)
        where = f" ({run})" * bool(run)
        message = f"the distribution differs from the normal one by {distance:.2g}{where}"
        found.append(Comparison(chance, name, message, f"{distance:.2g}"))
        sizes, n = values.abs(), values.numel()
        for beyond in TAILS:
            k = int(torch.count_nonzero(sizes > beyond))
            least, most = (math.erfc(beyond * (1 + off) / 2**0.5) for off in (eps, -eps))
            chance = log_chance_of_count(k, n, least, most)
            message = f"{k} of {n} elements are beyond {beyond:g} σ, expected {n * most:.3g}{where}"
            found.append(Comparison(chance, name, message, f"{k} beyond {beyond:g} σ"))
    return found, len(found)


def _distance(values: Tensor, eps: float) -> tuple[float, float]:
    """Return the largest distance d from the normal distribution, and a bound on ln P(d or more).

    The bound on the probability, for n values, is 2 exp(-2 n d²) (Massart, "The Tight Constant in
    the Dvoretzky-Kiefer-Wolfowitz Inequality", 1990).
    """
    n = values.numel()
    normal = torch.special.ndtr(sorted_values(values))
    ranks = torch.arange(n + 1, dtype=normal.dtype, device=normal.device) / n
    distance = float(torch.maximum(ranks[1:] - normal, normal - ranks[:-1]).max())
    # A value x is rounded twice, each time by at most eps/2 · |x|. This changes its normal
    # probability by at most eps · |x| φ(x), where φ is the normal density. |x| φ(x) is at most
    # 0.242, so the change is less than eps/4.
    beyond_rounding = max(distance - eps / 4, 0.0)
    return distance, math.log(2) - 2 * n * beyond_rounding**2


def _along_gradients(draws: Sequence[Draw]) -> Comparisons:
    """Test that the noise has no improbably large component along the clipped gradient."""
    found = []
    for (run, name), group in _groups(draws).items():
        if run and (known := [draw for draw in group if name in draw.along]):
            count = len(known) ** 0.5
            far = sum(draw.along[name] for draw in known) / count
            slack = sum(draw.slack for draw in known) / count
            beyond = max(abs(far) - slack, 0.0) if math.isfinite(far) else math.inf
            message = f"the clipped gradient is off by {far:.3g} noise deviations ({run})"
            chance = math.log(2) - beyond**2 / 2
            found.append(Comparison(chance, name, message, f"{far:.2g} deviations"))
    return found, len(found)
