"""Noise that is correlated over steps: its weights, and what it costs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpbench import StandardTrainer
from dpbench.core.errors import ConfigurationError
from dpbench.training.correlated_noise import (
    INDEPENDENT,
    CorrelatedNoise,
    weights_of,
    whitening,
)
from tests.instruments.logical.cases import count, moved, parameters, tiny


@given(bands=st.integers(1, 40), steps=st.integers(1, 200))
def test_weights_are_those_of_a_square_root_of_differences(bands: int, steps: int) -> None:
    weights = np.array(weights_of("banded", bands, steps))
    weights /= weights[0]
    twice = np.convolve(weights, weights)[:bands]
    np.testing.assert_allclose(twice, [1.0, -1.0, *[0.0] * bands][:bands], atol=1e-12)


@given(bands=st.integers(1, 32), steps=st.integers(1, 200))
def test_an_example_of_one_step_moves_whitened_noise_by_no_more_than_independent_noise(
    bands: int, steps: int
) -> None:
    weights = weights_of("banded", bands, steps)
    assert math.isclose(math.hypot(*whitening(weights, steps)), 1.0, rel_tol=1e-9)


def test_one_band_is_independent_noise() -> None:
    assert weights_of("banded", 1) == weights_of("independent") == INDEPENDENT


@pytest.mark.parametrize(("bands", "steps"), [(2, 10), (8, 1000), (32, 1000)])
def test_weights_are_those_of_jax_privacy(bands: int, steps: int) -> None:
    toeplitz = pytest.importorskip("jax_privacy.matrix_factorization.toeplitz")
    noising = toeplitz.optimal_max_error_noising_coefs(bands)
    sensitivity = toeplitz.sensitivity_squared(toeplitz.inverse_coef(noising, steps)) ** 0.5
    expected = np.asarray(noising * sensitivity)
    weights = weights_of("banded", bands, steps)
    np.testing.assert_allclose(weights, expected, atol=1e-6)


@pytest.mark.repeats
def test_noise_drawn_again_moves_weights_alone() -> None:
    bands = 3

    def bytes_of(trainer: str, noise: str = "") -> float:
        return sum(moved(count(tiny(trainer + noise)), "step"))

    banded = f":noise=banded,bands={bands}"
    buffers = len(parameters(tiny()))
    assert 0 < bytes_of("fused", banded) - bytes_of("fused") <= 12 * bands * 5 * buffers


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"noise": "pink"}, "unknown noise 'pink'; choose from independent, banded"),
        ({"noise": "banded", "bands": 0}, "bands is 0, and must be a whole number, at least 1"),
        ({"noise": "banded", "bands": 2, "noise_steps": 0}, "noise_steps is 0"),
        ({"bands": 3}, "bands has no meaning without noise=banded"),
        ({"noise": "banded", "bands": 2}, "StandardTrainer adds no banded noise"),
    ],
)
def test_what_no_noise_can_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        StandardTrainer(torch.nn.Linear(2, 2), batch_size=2, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_noise_is_the_weighted_sum_of_the_last_samples(dtype: torch.dtype) -> None:
    weights, wide = (1.0, -0.5, 0.25), torch.promote_types(dtype, torch.float32)
    correlated, generator = CorrelatedNoise(weights, 5), torch.Generator().manual_seed(0)
    again, drawn = torch.Generator().manual_seed(0), list[torch.Tensor]()
    for _ in range(5):
        noise = correlated.draw(torch.ones(3, 5, dtype=dtype), 2.0, "one", generator)
        drawn.insert(0, torch.empty(3, 5, dtype=wide).normal_(std=2.0, generator=again))
        expected = sum(w * z for w, z in zip(weights, drawn, strict=False))
        torch.testing.assert_close(noise, expected)


def test_tensors_have_noise_of_their_own() -> None:
    correlated = CorrelatedNoise(weights_of("banded", 3), 1000)
    for _ in range(4):
        noises = [correlated.draw(torch.zeros(10), 1.0, key) for key in range(2)]
    assert len({*torch.cat(noises).tolist()}) == 20
