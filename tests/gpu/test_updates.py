"""Noise and updates by kernels: held to PyTorch's formulas and optimizers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dpbench.training.noise_stream import normal_numbers
from dpbench.training.noisy_updates import Scalars, noisy_mean, noisy_update
from tests.training.test_noisy_updates import RULES, stream_of
from tests.training.test_noisy_updates import drawn as drawn_on_cpu
from tests.training.test_updates import MERGED, Twins

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("alone_on_the_gpu")]


CLOSE = 3e-5
"""Largest difference of normal numbers from equal words. Fast sines are off by up to 2^-20."""


def drawn(length: int, seed: int) -> Tensor:
    """The noise of a step of plain SGD."""
    moved = torch.zeros(length, device="cuda")
    numbers = Scalars(1.0, 1.0, rate=-1.0)
    noisy_update(moved, [], torch.zeros_like(moved), stream_of(seed, "cuda"), "plain", numbers)
    return moved


@pytest.mark.parametrize(
    ("dtype", "off"), [(torch.bfloat16, 8e-3), (torch.float32, 2e-6), (torch.float64, 1e-14)]
)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("length", [1, 4097, 10_000])
def test_an_update_is_as_exact_as_its_parameters(
    length: int, rule: str, dtype: torch.dtype, off: float
) -> None:
    n = Scalars(0.0, 0.7, 0.3, 0.2, 0.9, 0.8, 0.4, 0.6, 0.5, 1.1, 0.1)
    first, second, *moments = (
        torch.rand(length, dtype=torch.float64, device="cuda").to(dtype)
        for _ in range(2 + RULES[rule])
    )
    on_cpu = [each.double().cpu() for each in (first, *moments)]
    noisy_update(on_cpu[0], on_cpu[1:], second.double().cpu(), stream_of(1), rule, n)
    noisy_update(first, moments, second, stream_of(1, "cuda"), rule, n)
    for ours, theirs in zip((first, *moments), on_cpu, strict=True):
        torch.testing.assert_close(ours.double().cpu(), theirs, rtol=off, atol=off)


def test_the_update_draws_normal_noise_anew_for_each_seed() -> None:
    length = 3_000_001
    first, second = drawn(length, 2**40), drawn(length, 2**40 + 1)
    assert torch.equal(first, drawn(length, 2**40))
    assert abs(first.std() - 1) < 5 / (2 * length) ** 0.5
    assert abs(first.mean()) < 5 / length**0.5
    for lag in (1, 2, 3, 4, 256, 1024, 4096):
        together = torch.stack([first, first.roll(lag)])
        assert abs(torch.corrcoef(together)[0, 1]) < 5 / length**0.5
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 5 / length**0.5


@pytest.mark.parametrize("length", [1, 4095, 4096, 300_000])
def test_a_gpu_draws_the_noise_of_a_cpu(length: int) -> None:
    ours, theirs = drawn(length, 3).cpu(), drawn_on_cpu(length, 3)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("rule", RULES)
def test_all_rules_draw_the_noise_that_a_mean_draws(rule: str) -> None:
    length = 10_000
    mean = torch.zeros(length, device="cuda")
    noisy_mean(mean, stream_of(7, "cuda"), 3.0, 0.5)
    torch.testing.assert_close(mean, 1.5 * drawn(length, 7))
    moments = [torch.zeros_like(mean) for _ in range(RULES[rule])]
    values = torch.zeros_like(mean)
    noisy_update(
        values, moments, torch.zeros_like(mean), stream_of(7, "cuda"), rule, Scalars(3.0, 0.5, 1.0)
    )
    for each in moments[:1] or [-values]:
        torch.testing.assert_close(each, mean)


@pytest.mark.parametrize("rule", RULES)
def test_noise_of_several_steps_is_their_weighted_sum(rule: str) -> None:
    length, weights = 10_000, torch.tensor((1.0, -0.5, 0.25), device="cuda")
    stream = stream_of(7, "cuda")
    stream[5] = 2**32 + 1  # the words of earlier steps differ in both halves of the step
    ages = enumerate(weights.tolist())
    expected = sum((w * normal_numbers(stream, length, torch.float32, a) for a, w in ages), 0.0)
    values = torch.zeros(length, device="cuda")
    moments = [torch.zeros_like(values) for _ in range(RULES[rule])]
    numbers = Scalars(1.0, 1.0, 1.0)
    noisy_update(values, moments, torch.zeros_like(values), stream, rule, numbers, weights)
    for each in moments[:1] or [-values]:
        torch.testing.assert_close(each, expected, rtol=0, atol=CLOSE)


def test_one_number_of_two_million_is_further_out_than_five_deviations() -> None:
    """As it should be, and some are further than 5.7, where Triton's own normal numbers end."""
    length, beyond, largest = 2**28, 0, 0.0
    for seed in range(8):
        moved = drawn(length, seed)
        beyond += int((moved.abs() > 5).sum())
        largest = max(largest, float(moved.abs().max()))
    expected = 8 * length * math.erfc(5 / 2**0.5)
    assert abs(beyond - expected) < 6 * expected**0.5
    assert 5.7 < largest < 7


@pytest.mark.parametrize("deviation", [0.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MERGED)
def test_several_steps_are_those_of_pytorch_after_the_same_noise(
    name: str, dtype: torch.dtype, deviation: float
) -> None:
    twins = Twins(MERGED[name], dtype, device="cuda")
    for _ in range(4):
        twins.step(deviation)
    exact = dtype == torch.float64
    twins.check(rtol=1e-9 if exact else 1e-3, atol=1e-9 if exact else 1e-4)
