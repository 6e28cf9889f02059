"""Bounds on what right noise does: never too low, and low enough to find what is wrong."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from dpbench.verify.noise import chance_of_correlation, chance_of_mean_square, check_noise

COUNTS = [2, 3, 4, 10, 64, 1000, 10**6]


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("r", [0.0, 1e-3, 0.01, 0.1, 0.5, 0.9, 0.99])
def test_a_correlation_is_never_likelier_than_its_bound(r: float, n: int) -> None:
    exact = stats.beta.logsf(r * r, 0.5, (n - 1) / 2)
    bound = float(chance_of_correlation(torch.tensor(r).double(), torch.tensor(n)))
    assert exact <= bound + 1e-9
    if exact > -700:
        assert bound < exact + 0.5 * math.log(10 * n)  # it finds nearly what could be found


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("q", [0.01, 0.25, 0.9, 0.999, 1.0, 1.001, 1.1, 4.0])
def test_a_mean_square_is_never_likelier_than_its_bound(q: float, n: int) -> None:
    side = stats.chi2.logcdf(q * n, n) if q < 1 else stats.chi2.logsf(q * n, n)
    assert side <= chance_of_mean_square(q, n)


@pytest.mark.parametrize(("q", "n"), [(0.25, 128), (4.0, 128), (0.98, 10**6)])
def test_half_the_deviation_and_twice_of_128_elements_are_beyond_a_chance_of_1e9(
    q: float, n: int
) -> None:
    assert chance_of_mean_square(q, n) < math.log(1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_right_noise_passes_whatever_is_drawn(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"scalar": (), "bias": (5,), "weight": (9, 8), "kernel": (4, 3, 3, 3)}
    for _ in range(50):
        draws = [
            {
                name: (3 * torch.randn(shape, generator=generator)).to(dtype).double()
                for name, shape in shapes.items()
            }
            for _ in range(4)
        ]
        assert all(check.passed for check in check_noise(draws, 3.0, dtype, "steps, runs"))
