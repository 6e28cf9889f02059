"""Probability bounds of the noise tests: valid for right noise, and tight enough to find faults."""

from __future__ import annotations

import math
import re
from itertools import product

import pytest
import torch
from scipy import stats
from torch import Tensor

from dpbench.verify.check_result import NOT_JUDGED
from dpbench.verify.noise import (
    Draw,
    _along_gradients,
    _deviations,
    _limit_of_correlation,
    _limit_of_repeats,
    _limits_of_deviation,
    check_noise,
    log_chance_of_correlation,
    log_chance_of_count,
    log_chance_of_mean_square,
    pair_correlations,
    shift_correlations,
    worst_shift,
)

COUNTS = [2, 3, 4, 10, 64, 1000, 10**6]


def test_a_correlation_is_never_likelier_than_its_bound() -> None:
    for n, r in product(COUNTS, [0.0, 1e-3, 0.01, 0.1, 0.5, 0.9, 0.99]):
        exact = stats.beta.logsf(r * r, 0.5, (n - 1) / 2)
        bound = float(log_chance_of_correlation(torch.tensor(r).double(), torch.tensor(n)))
        assert exact <= bound + 1e-9
        if exact > -700:
            assert bound < exact + 0.5 * math.log(10 * n)  # the bound is nearly tight


def test_a_mean_square_is_never_likelier_than_its_bound() -> None:
    for n, q in product(COUNTS, [0.01, 0.25, 0.9, 0.999, 1.0, 1.001, 1.1, 4.0]):
        side = stats.chi2.logcdf(q * n, n) if q < 1 else stats.chi2.logsf(q * n, n)
        assert side <= log_chance_of_mean_square(q, n)
    # half the deviation and twice of 128 elements, and 1 % less of a million, are found
    for q, n in [(0.25, 128), (4.0, 128), (0.98, 10**6)]:
        assert log_chance_of_mean_square(q, n) < math.log(1e-9)


def test_a_count_is_never_likelier_than_its_bound() -> None:
    shares = product([10, 1000, 10**6], [1e-6, 6.3e-5, 0.01, 0.3], [0.0, 0.5, 0.9, 1.1, 2.0, 10.0])
    for n, p, times in shares:
        k = min(round(times * n * p), n)
        side = stats.binom.logcdf(k, n, p) if k < n * p else stats.binom.logsf(k - 1, n, p)
        assert side <= log_chance_of_count(k, n, p, p) + 1e-9


@pytest.mark.parametrize(("n", "share"), [(100, 0.3), (6929, 0.0033), (131071, 0.06)])
def test_the_limit_of_repeats_is_the_largest_number_that_passes(n: int, share: float) -> None:
    least = math.log(1e-7)
    most = int(_limit_of_repeats(n, share, least).removeprefix("≤ "))
    assert n * share < most < n
    assert log_chance_of_count(most, n, 0.0, share) >= least
    assert log_chance_of_count(most + 1, n, 0.0, share) < least


def test_no_element_beyond_4_sigma_of_half_a_million_is_beyond_chance() -> None:
    p = math.erfc(4 / 2**0.5)
    assert log_chance_of_count(0, 480_000, p, p) < math.log(1e-9)


SHAPES = {"scalar": 1, "bias": 5, "weight": 72, "kernel": 600}


def drawn(dtype: torch.dtype, generator: torch.Generator) -> list[Draw]:
    return [
        Draw(
            run, step, {n: torch.randn(k, generator=generator).to(dtype) for n, k in SHAPES.items()}
        )
        for run in ("one run", "another")
        for step in (1, 2, 3)
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_right_noise_passes_whatever_is_drawn(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        assert all(check.passed for check in check_noise(drawn(dtype, generator), dtype, "steps"))


def test_nothing_of_right_noise_is_nearly_as_surprising_as_what_fails() -> None:
    # The rarest of 100 draws has a probability of about 1/100, and bounds are larger.
    generator = torch.Generator().manual_seed(1)
    for judge in (_deviations, pair_correlations, shift_correlations, _along_gradients):
        rarest = 0.0
        for _ in range(100):
            found, comparisons = judge(drawn(torch.float32, generator))
            likeliest = min((each.log_chance for each in found), default=0.0)
            rarest = min(rarest, likeliest + math.log(max(comparisons, 1)))
        assert rarest > math.log(1e-4)


def test_one_step_in_a_hundred_with_less_noise_is_named_by_parameter() -> None:
    generator = torch.Generator().manual_seed(2)
    draws = [Draw("", step, {"bias": torch.randn(32, generator=generator)}) for step in range(240)]
    assert all(check.passed for check in check_noise(draws, torch.float32, "steps"))
    draws[50].noise["bias"].mul_(0.2)
    deviation, *_ = check_noise(draws, torch.float32, "steps")
    [line] = deviation.wrong
    assert re.fullmatch(r"bias: 0\.[12]\d* times the deviation σC/B \(step 50\)", line)


def test_noise_of_no_step_is_not_judged_and_no_pass() -> None:
    [check] = check_noise([], torch.float32, "steps")
    assert (check.verdict, check.passed) == (NOT_JUDGED, False)


def test_steps_may_have_different_parameters_and_runs_no_name() -> None:
    generator = torch.Generator().manual_seed(4)
    shapes: list[dict[str, int]] = [{"a": 300, "b": 3}, {"c": 200}, {"a": 300, "b": 3}]
    drawn = [{n: torch.randn(k, generator=generator) for n, k in each.items()} for each in shapes]
    draws = [Draw("", number, noise) for number, noise in enumerate(drawn, 4)]
    assert all(check.verdict == "ok" for check in check_noise(draws, torch.float32, "steps"))
    drawn[1]["c"].copy_(drawn[0]["a"][:200])
    assert [
        line
        for check in check_noise(draws, torch.float32, "steps")
        for line in check.wrong
        if check.name == "noise: steps" and line.startswith("c")
    ] == ["c: its noise in step 5 correlates with that of a in step 4 (correlation 1 of 200 pairs)"]


def test_a_noise_test_that_fails_shows_its_limit() -> None:
    draws = drawn(torch.float32, torch.Generator().manual_seed(5))
    assert not any("chance" in check.error_text for check in check_noise(draws, torch.float32, ""))
    for draw in draws:
        draw.noise.update({name: 2 * noise for name, noise in draw.noise.items()})
    deviation, *_ = check_noise(draws, torch.float32, "")
    assert deviation.error_text.endswith(" (≥ 7e-08)")


@pytest.mark.parametrize("n", [8, 128, 10**6])
def test_limits_that_are_printed_are_those_that_are_judged(n: int) -> None:
    least = -20.0
    limits = _limits_of_deviation(n, 0.0, least)
    low, high = map(float, limits.split(" to "))
    for inside, outside in ((low + 0.002, low - 0.002), (high - 0.002, high + 0.002)):
        assert log_chance_of_mean_square(inside**2, n) > least
        assert log_chance_of_mean_square(max(outside, 0) ** 2, n) < least
    r = float(_limit_of_correlation(n, least).removeprefix("within ±"))
    chance = log_chance_of_correlation(torch.tensor(r).double(), torch.tensor(n))
    assert float(chance) == pytest.approx(least, rel=0.1) or r == 1


@pytest.mark.parametrize("size", [100, 1001])
def test_the_worst_shift_is_what_a_search_over_all_shifts_finds(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    right = torch.randn(size, generator=generator).double()
    again = right.clone()
    again[size // 2 : size // 2 * 2] = right[: size // 2]
    for noise in (right, again):

        def chance(shift: int, noise: Tensor = noise) -> float:
            a, b = noise[:-shift], noise[shift:]
            r = (a @ b) / (a.norm() * b.norm())
            return float(log_chance_of_correlation(r, torch.tensor(len(a))))

        shift, _ = worst_shift(noise)
        assert shift == min(range(1, size - 7), key=chance)
    assert (shift, worst_shift(again)[1][1]) == (size // 2, (pytest.approx(1.0), size // 2))
