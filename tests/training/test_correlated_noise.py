"""Noise that is correlated over steps: its weights, and what it costs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dpbench import StandardTrainer
from dpbench.core.errors import ConfigurationError
from dpbench.training.correlated_noise import (
    INDEPENDENT,
    Mechanism,
    mechanism,
    whitening,
)
from tests.instruments.logical.cases import count, moved, parameters, tiny


@given(bands=st.integers(1, 40), steps=st.integers(1, 200))
def test_weights_are_those_of_a_square_root_of_differences(bands: int, steps: int) -> None:
    weights = np.array(mechanism("banded", bands, steps=steps).weights)
    weights /= weights[0]
    twice = np.convolve(weights, weights)[:bands]
    np.testing.assert_allclose(twice, [1.0, -1.0, *[0.0] * bands][:bands], atol=1e-12)


NUMBERS = [("banded", 1), ("banded", 2), ("banded", 32), ("blt", 1), ("blt", 4)]


@pytest.mark.parametrize("steps", [1, 2, 57, 200])
@pytest.mark.parametrize(("noise", "number"), NUMBERS)
def test_an_example_of_one_step_moves_whitened_noise_by_no_more_than_independent_noise(
    noise: str, number: int, steps: int
) -> None:
    chosen = {"bands" if noise == "banded" else "buffers": number}
    weights = mechanism(noise, steps=steps, **chosen).weights
    assert math.isclose(math.hypot(*whitening(weights, steps)), 1.0, rel_tol=1e-9)


def loss(mechanism: Mechanism, steps: int) -> float:
    """The largest deviation of a sum of noise over steps, in units of σC."""
    weights = np.zeros(steps)
    weights[: len(mechanism.weights)] = mechanism.weights
    return math.hypot(*np.cumsum(weights))


@pytest.mark.parametrize("steps", [1, 2, 10, 100, 1000])
def test_four_buffers_are_nearly_as_good_as_any_number_of_bands(steps: int) -> None:
    best = loss(mechanism("banded", steps, steps=steps), steps)
    assert 1 - 1e-6 < loss(mechanism("blt", buffers=4, steps=steps), steps) / best < 1.0002


def test_eight_bands_have_2_8_times_the_error_of_four_buffers() -> None:
    bands, buffers = mechanism("banded", 8), mechanism("blt", buffers=4)
    assert round(loss(bands, 1000) / loss(buffers, 1000), 1) == 2.8


@pytest.mark.parametrize(("buffers", "steps"), [(1, 1000), (4, 100), (4, 1000)])
def test_buffers_are_as_good_as_those_of_jax_privacy(buffers: int, steps: int) -> None:
    jax = pytest.importorskip("jax")
    toeplitz = pytest.importorskip("jax_privacy.matrix_factorization.buffered_toeplitz")
    with jax.enable_x64(True):
        best = toeplitz.optimize(n=steps, min_buffers=buffers, max_buffers=buffers)
        theirs = float(toeplitz.max_loss(best, steps)) ** 0.5
    assert loss(mechanism("blt", buffers=buffers, steps=steps), steps) == pytest.approx(
        theirs, 1e-6
    )


def test_one_band_is_independent_noise() -> None:
    assert mechanism("banded", 1).weights == mechanism("independent").weights == INDEPENDENT


@pytest.mark.parametrize(("bands", "steps"), [(2, 10), (8, 1000), (32, 1000)])
def test_weights_are_those_of_jax_privacy(bands: int, steps: int) -> None:
    toeplitz = pytest.importorskip("jax_privacy.matrix_factorization.toeplitz")
    noising = toeplitz.optimal_max_error_noising_coefs(bands)
    sensitivity = toeplitz.sensitivity_squared(toeplitz.inverse_coef(noising, steps)) ** 0.5
    expected = np.asarray(noising * sensitivity)
    weights = mechanism("banded", bands, steps=steps).weights
    np.testing.assert_allclose(weights, expected, atol=1e-6)


@pytest.mark.repeats
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
        ({"noise": "pink"}, "unknown noise 'pink'; choose from independent, banded, blt"),
        ({"noise": "blt"}, "buffers is 0, and must be a whole number, at least 1"),
        ({"buffers": 3}, "buffers has no meaning without noise=blt"),
        ({"noise": "blt", "buffers": 2, "bands": 2}, "bands has no meaning without noise=banded"),
        (
            {"noise": "blt", "buffers": 2},
            "StandardTrainer adds no blt noise; use noise=independent",
        ),
        ({"noise": "banded", "bands": 0}, "bands is 0, and must be a whole number, at least 1"),
        ({"noise": "banded", "bands": 2, "noise_steps": 0}, "noise_steps is 0"),
        ({"bands": 3}, "bands has no meaning without noise=banded"),
        ({"noise": "banded", "bands": 2}, "StandardTrainer adds no banded noise"),
    ],
)
def test_what_no_noise_can_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        StandardTrainer(resolve_model(), batch_size=2, **options)


@pytest.mark.parametrize(("noise", "number"), NUMBERS)
def test_weights_are_the_same_where_tensors_have_no_data(noise: str, number: int) -> None:
    chosen = {"bands" if noise == "banded" else "buffers": number}
    with FakeTensorMode():
        counted = mechanism(noise, steps=33, **chosen)
    assert counted == mechanism(noise, steps=33, **chosen)
    assert loss(counted, 33) <= loss(mechanism("independent"), 33) * (1 + 1e-9)
