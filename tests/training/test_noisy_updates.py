"""Operators that draw noise where they use it: their noise, and the formulas of their updates."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dpbench.training.noise_stream import NoiseStream
from dpbench.training.noisy_updates import Scalars, noisy_mean, noisy_update

RULES = {"plain": 0, "momentum": 1, "nesterov": 1, "adam": 2}
"""Each rule's number of moving averages."""


def normal(length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(1)).to(dtype)


def stream_of(seed: int, device: str = "cpu") -> Tensor:
    """The first step's numbers of a buffer."""
    return NoiseStream(1, torch.device(device), seed).next_step()[0]


def drawn(length: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The noise of a step of plain SGD."""
    moved = torch.zeros(length, dtype=dtype)
    numbers = Scalars(1.0, 1.0, rate=-1.0)
    noisy_update(moved, [], torch.zeros_like(moved), stream_of(seed), "plain", numbers)
    return moved


def test_noise_is_normal_and_new_for_each_seed() -> None:
    length = 200_000
    first = drawn(length, 1)
    # Five standard errors each: a false alarm has a chance of less than 6e-7.
    assert abs(first.std() - 1) < 5 / (2 * length) ** 0.5
    assert abs(first.mean()) < 5 / length**0.5
    assert torch.equal(first, drawn(length, 1))
    for other in (drawn(length, 2), first.roll(1)):
        assert abs(torch.corrcoef(torch.stack([first, other]))[0, 1]) < 5 / length**0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_mean_has_the_noise_of_an_update(dtype: torch.dtype) -> None:
    gradient = normal(1000, dtype)
    expected = 0.25 * (gradient + 3 * drawn(1000, 7, dtype))
    noisy_mean(gradient, stream_of(7), 3.0, 0.25)
    torch.testing.assert_close(gradient, expected)


def test_noise_of_float64_is_drawn_in_float64() -> None:
    noise = drawn(1000, 1, torch.float64)
    assert (noise != noise.float()).sum() > 900


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_update_is_as_exact_as_its_parameters(dtype: torch.dtype) -> None:
    values, gradient = normal(1000, dtype), normal(1000, dtype).sin()
    expected = values.double() - 0.3 * gradient.double()
    noisy_update(values, [], gradient, stream_of(1), "plain", Scalars(0.0, 1.0, rate=0.3))
    error = torch.finfo(dtype).eps * expected.abs().max()
    torch.testing.assert_close(values.double(), expected, rtol=0, atol=float(error))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("rule", RULES)
def test_operators_change_what_they_say_and_nothing_without_data(
    rule: str, dtype: torch.dtype
) -> None:
    values, gradient, stream = normal(5, dtype), normal(5, dtype), stream_of(1)
    moments = [normal(5, dtype).abs() for _ in range(RULES[rule])]
    tests = ("test_schema", "test_faketensor")
    update = torch.ops.dpbench.noisy_update.default
    given = (values, moments, gradient, stream, rule, [*Scalars(1.0, 1.0, rate=0.1)])
    torch.library.opcheck(update, given, test_utils=tests)
    mean = torch.ops.dpbench.noisy_mean.default
    torch.library.opcheck(mean, (gradient, stream, 1.0, 1.0), test_utils=tests)


@settings(deadline=None)
@given(
    rule=st.sampled_from([*RULES]),
    numbers=st.tuples(*[st.floats(0.1, 0.9)] * 10),
    seed=st.integers(0, 2**62),
)
def test_an_update_computes_its_formulas(rule: str, numbers: tuple[float, ...], seed: int) -> None:
    n = Scalars(0.0, *numbers)
    p, gradient = normal(9, torch.float64), normal(9, torch.float64).cos()
    moments = [normal(9, torch.float64).square() for _ in range(RULES[rule])]
    g = n.scale * gradient + n.decay * p
    means = [n.beta1 * m + n.alpha1 * g for m in moments[:1]]
    squares = [n.beta2 * v + n.alpha2 * g**2 for v in moments[1:]]
    change = {
        "plain": lambda: g,
        "momentum": lambda: means[0],
        "nesterov": lambda: g + n.beta1 * means[0],
        "adam": lambda: means[0] / (squares[0].sqrt() * n.correction + n.eps),
    }[rule]()
    expected = n.shrink * p - n.rate * change
    noisy_update(p, moments, gradient, stream_of(seed), rule, n)
    torch.testing.assert_close([p, *moments], [expected, *means, *squares])
