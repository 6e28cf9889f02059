"""Probability bounds of the noise tests: valid for right noise, and tight enough to find faults."""

from __future__ import annotations

import math
import re

import pytest
import torch
from scipy import stats
from torch import Tensor

from dpbench.verify.check_result import NOT_JUDGED
from dpbench.verify.noise import _along_gradients, _deviations, check_noise
from dpbench.verify.noise_bounds import (
    log_chance_of_correlation,
    log_chance_of_count,
    log_chance_of_mean_square,
)
from dpbench.verify.noise_draw import Draw
from dpbench.verify.noise_repeats import pair_correlations, shift_correlations, worst_repeat

COUNTS = [2, 3, 4, 10, 64, 1000, 10**6]


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("r", [0.0, 1e-3, 0.01, 0.1, 0.5, 0.9, 0.99])
def test_a_correlation_is_never_likelier_than_its_bound(r: float, n: int) -> None:
    exact = stats.beta.logsf(r * r, 0.5, (n - 1) / 2)
    bound = float(log_chance_of_correlation(torch.tensor(r).double(), torch.tensor(n)))
    assert exact <= bound + 1e-9
    if exact > -700:
        assert bound < exact + 0.5 * math.log(10 * n)  # the bound is nearly tight


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("q", [0.01, 0.25, 0.9, 0.999, 1.0, 1.001, 1.1, 4.0])
def test_a_mean_square_is_never_likelier_than_its_bound(q: float, n: int) -> None:
    side = stats.chi2.logcdf(q * n, n) if q < 1 else stats.chi2.logsf(q * n, n)
    assert side <= log_chance_of_mean_square(q, n)


@pytest.mark.parametrize(("q", "n"), [(0.25, 128), (4.0, 128), (0.98, 10**6)])
def test_half_the_deviation_and_twice_of_128_elements_are_beyond_a_chance_of_1e9(
    q: float, n: int
) -> None:
    assert log_chance_of_mean_square(q, n) < math.log(1e-9)


@pytest.mark.parametrize("n", [10, 1000, 10**6])
@pytest.mark.parametrize("p", [1e-6, 6.3e-5, 0.01, 0.3])
@pytest.mark.parametrize("times", [0.0, 0.5, 0.9, 1.1, 2.0, 10.0])
def test_a_count_is_never_likelier_than_its_bound(n: int, p: float, times: float) -> None:
    k = min(round(times * n * p), n)
    side = stats.binom.logcdf(k, n, p) if k < n * p else stats.binom.logsf(k - 1, n, p)
    assert side <= log_chance_of_count(k, n, p, p) + 1e-9


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
    for _ in range(50):
        assert all(check.passed for check in check_noise(drawn(dtype, generator), dtype, "steps"))


def test_nothing_of_right_noise_is_nearly_as_surprising_as_what_fails() -> None:
    # The rarest of 200 draws has a probability of about 1/200, and bounds are larger.
    generator = torch.Generator().manual_seed(1)
    for judge in (_deviations, pair_correlations, shift_correlations, _along_gradients):
        rarest = 0.0
        for _ in range(200):
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
    ] == ["c: its noise in step 5 correlates with that of a in step 4 (r = 1 of 200)"]


def test_every_number_of_a_noise_test_shows_its_limit() -> None:
    for check in check_noise(
        drawn(torch.float32, torch.Generator().manual_seed(5)), torch.float32, ""
    ):
        assert check.error_text.endswith(" (≥ 7e-08)")


@pytest.mark.parametrize("size", [16, 17, 100, 1001])
def test_the_worst_repeat_is_found_at_any_distance_and_mirrored(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    noise = torch.randn(size, generator=generator).double()
    far = size // 2
    again = noise.clone()
    again[far : 2 * far] = -noise[:far]
    moved = {words: (r, n) for words, r, n in worst_repeat(again)}
    assert (-1.0, far) in [(round(r, 9), n) for r, n in moved.values()]
    again[far : 2 * far] = noise[:far].flip(0)
    *_, (words, r, n) = worst_repeat(again)
    assert words == f"mirrored around element {far - 0.5:g}"
    assert (round(r, 9), n) == (1.0, far)


def test_worst_repeat_says_what_a_search_over_all_distances_says() -> None:
    noise = torch.randn(60, generator=torch.Generator().manual_seed(3)).double()

    def chance(a: Tensor, b: Tensor) -> float:
        r = (a @ b) / (a.norm() * b.norm())
        return float(log_chance_of_correlation(r, torch.tensor(len(a))))

    mirrored = {}
    for total in range(2 * len(noise) - 1):
        pairs = [(i, total - i) for i in range(total) if i < total - i < len(noise)]
        if len(pairs) >= 8:
            one, other = zip(*pairs, strict=True)
            mirrored[total] = chance(noise[list(one)], noise[list(other)])
    at = min(mirrored, key=lambda total: mirrored[total])
    *_, (words, _, _) = worst_repeat(noise)
    assert words == f"mirrored around element {at / 2:g}"
