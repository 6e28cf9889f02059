"""Noise that is correlated over steps: its weights, and what it costs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dpbench import StandardTrainer
from dpbench.core.errors import ConfigurationError
from dpbench.training.correlated_noise import INDEPENDENT, KeptNoise, noise_weights, whitening
from tests.instruments.logical.cases import count, moved, parameters, tiny


@given(bands=st.integers(1, 40), steps=st.integers(1, 200))
def test_weights_are_those_of_a_square_root_of_differences(bands: int, steps: int) -> None:
    weights = (
        np.array(noise_weights("banded", bands, steps)) / noise_weights("banded", bands, steps)[0]
    )
    twice = np.convolve(weights, weights)[:bands]
    np.testing.assert_allclose(twice, [1.0, -1.0, *[0.0] * bands][:bands], atol=1e-12)


@given(bands=st.integers(1, 40), steps=st.integers(1, 200))
def test_an_example_of_one_step_moves_whitened_noise_by_no_more_than_independent_noise(
    bands: int, steps: int
) -> None:
    weights = noise_weights("banded", bands, steps)
    assert math.isclose(math.hypot(*whitening(weights, steps)), 1.0)


def test_one_band_is_independent_noise() -> None:
    assert noise_weights("banded", 1, 1000) == noise_weights("independent", 1, 1000) == INDEPENDENT


@pytest.mark.parametrize(("bands", "steps"), [(2, 10), (8, 1000), (32, 1000)])
def test_weights_are_those_of_jax_privacy(bands: int, steps: int) -> None:
    toeplitz = pytest.importorskip("jax_privacy.matrix_factorization.toeplitz")
    noising = toeplitz.optimal_max_error_noising_coefs(bands)
    sensitivity = toeplitz.sensitivity_squared(toeplitz.inverse_coef(noising, steps)) ** 0.5
    expected = np.asarray(noising * sensitivity)
    np.testing.assert_allclose(noise_weights("banded", bands, steps), expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_noise_adds_the_last_ones_with_their_weights(dtype: torch.dtype) -> None:
    weights = (1.0, -0.5, 0.25)
    kept, generator = KeptNoise(weights), torch.Generator().manual_seed(0)
    again = torch.Generator().manual_seed(0)
    drawn: list[Tensor] = []
    for _ in range(7):
        total = torch.ones(3, 5, dtype=dtype)
        kept.add_to(total, 2.0, "one", generator)
        drawn.insert(0, torch.empty(15).normal_(std=2.0, generator=again))
        noise = torch.zeros(15)
        for weight, each in zip(weights, drawn, strict=False):
            noise += weight * each
        torch.testing.assert_close(total, (1 + noise).to(dtype).view(3, 5))


@pytest.mark.parametrize("bands", [3, 5])
def test_noise_drawn_again_moves_seeds_alone_and_kept_noise_is_read_once(bands: int) -> None:
    def bytes_of(trainer: str, noise: str = "") -> float:
        return sum(moved(count(tiny(trainer + noise)), "step"))

    banded, elements = f":noise=banded,bands={bands}", sum(parameters(tiny()))
    buffers = len(parameters(tiny()))
    assert 0 < bytes_of("fused", banded) - bytes_of("fused") <= 12 * bands * 5 * buffers
    one_more = bytes_of("lean", banded) - bytes_of("lean", f":noise=banded,bands={bands - 1}")
    assert elements < one_more / 4 < 1.1 * elements


def resolve_model() -> nn.Module:
    from dpbench import SimpleBigModel
    from dpbench.core.model_size import ModelSize

    return SimpleBigModel(ModelSize(50, 64, 1, 2), max_seq_len=8)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"noise": "pink"}, "unknown noise 'pink'; choose from independent, banded"),
        ({"noise": "banded", "bands": 0}, "bands is 0, and must be a whole number from 1 on"),
        ({"noise": "banded", "bands": 2, "noise_steps": 0}, "noise_steps is 0"),
        ({"bands": 3}, "bands has no meaning without noise=banded"),
        ({"noise": "banded", "bands": 2}, "StandardTrainer adds no banded noise"),
    ],
)
def test_what_no_noise_can_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        StandardTrainer(resolve_model(), batch_size=2, **options)
