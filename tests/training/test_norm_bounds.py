"""No example adds more than the threshold, whatever its numbers are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpbench import TRAINERS, Batch, Workload
from dpbench.core.errors import ConfigurationError
from dpbench.training import kernels
from dpbench.training.norm_bounds import (
    GramSums,
    clipping_factors,
    gram_bound,
    squared_bias_norms,
    squared_gradient_norms,
    squared_product_norms,
    squared_sample_norms,
)

OURS = (
    "ghost_lean",
    "mixed_ghost",
    "book_keeping",
    "fused",
    "lean",
    "micro_batch",
    "micro_batch:vmap=true",
)
TYPES = (torch.float32, torch.bfloat16, torch.float64)
PRIVATE: dict[str, Any] = {"noise_multiplier": 0.0, "learning_rate": 1.0}


class Weighted(Workload):
    """Of each example the gradient of what the model returns is given with it."""

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        self._model, self._batch = model, batch

    def model(self) -> nn.Module:
        return self._model

    def batches(self, batch_size: int) -> list[Batch]:
        return [self._batch]

    def losses(self, model: Callable[..., Any], batch: Any) -> Tensor:
        given, gradient = batch
        return (model(given) * gradient).flatten(1).sum(1)  # type: ignore[no-any-return]


def update_of(trainer: str, layer: nn.Module, batch: Batch, **options: Any) -> Tensor:
    """What a step takes off parameters that are zero before it, in float64."""
    model = nn.Sequential(layer)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    examples = len(batch[0])
    made = TRAINERS[trainer](
        model, batch_size=examples, workload=Weighted(model, batch), **(PRIVATE | options)
    )
    made.train_step(batch)
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def alike(
    seed: int, tokens: int, width: int, height: int, offset: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """One example of tokens that share an offset, with gradients that sum to about zero."""
    x = numbers(seed, 1, tokens, width) + offset
    g = numbers(seed + 1, 1, tokens, height)
    if offset:
        g = g - g.mean(1, keepdim=True)
    return x.to(dtype), g.to(dtype)


@pytest.mark.parametrize("trainer", OURS)
@pytest.mark.parametrize(
    ("tokens", "width", "offset", "dtype"),
    [
        (128, 32, 100, torch.bfloat16),
        (128, 64, 30, torch.bfloat16),
        (128, 32, 1e4, torch.float32),
        (16, 256, 1e4, torch.float32),
        (64, 64, 1e4, torch.float32),
        (16, 256, 1e4, torch.float64),
        (16, 256, 1e7, torch.float64),
    ],
)
def test_tokens_that_are_alike_are_clipped(
    trainer: str, tokens: int, width: int, offset: float, dtype: torch.dtype
) -> None:
    batch = alike(0, tokens, width, width, offset, dtype)
    assert update_of(trainer, nn.Linear(width, width).to(dtype), batch).norm() <= 1 + 1e-6


@pytest.mark.parametrize("trainer", OURS)
@settings(deadline=None)
@given(
    st.integers(0, 2**31),
    st.integers(2, 512),
    st.integers(4, 512),
    st.integers(4, 512),
    st.one_of(st.just(0.0), st.floats(0, 4).map(lambda power: 10**power)),
    st.sampled_from(TYPES),
    st.booleans(),
)
def test_no_linear_layer_moves_further_than_the_threshold(
    trainer: str,
    seed: int,
    tokens: int,
    width: int,
    height: int,
    offset: float,
    dtype: torch.dtype,
    bias: bool,
) -> None:
    batch = alike(seed, tokens, width, height, offset, dtype)
    layer = nn.Linear(width, height, bias=bias).to(dtype)
    assert update_of(trainer, layer, batch).norm() <= 1 + 1e-6


@pytest.mark.parametrize("trainer", OURS)
@settings(deadline=None)
@given(
    st.integers(0, 2**31),
    st.integers(2, 512),
    st.integers(4, 512),
    st.integers(1, 20),
    st.sampled_from(TYPES),
)
def test_no_embedding_moves_further_than_the_threshold(
    trainer: str, seed: int, tokens: int, width: int, rows: int, dtype: torch.dtype
) -> None:
    rows_named = torch.randint(rows, (1, tokens), generator=torch.Generator().manual_seed(seed))
    _, g = alike(seed, tokens, 4, width, 1.0, dtype)
    layer = nn.Embedding(rows, width).to(dtype)
    assert update_of(trainer, layer, (rows_named, 1e3 * g)).norm() <= 1 + 1e-6


@pytest.mark.parametrize("trainer", OURS)
@settings(deadline=None)
@given(
    st.integers(0, 2**31),
    st.integers(4, 64),
    st.integers(4, 32),
    st.integers(4, 64),
    st.floats(0, 1e4),
    st.sampled_from(TYPES),
    st.booleans(),
    st.booleans(),
)
def test_no_convolution_moves_further_than_the_threshold(
    trainer: str,
    seed: int,
    length: int,
    channels: int,
    height: int,
    offset: float,
    dtype: torch.dtype,
    bias: bool,
    flat: bool,
) -> None:
    kind, shape = (nn.Conv1d, (length,)) if flat else (nn.Conv2d, (length // 4 + 3, 5))
    layer = kind(channels, height, 3, bias=bias).to(dtype)
    x = (numbers(seed, 1, channels, *shape) + offset).to(dtype)
    g = numbers(seed + 1, *layer(x).shape)
    g = g - g.flatten(2).mean(2).view(1, height, *[1] * len(shape))
    assert update_of(trainer, layer, (x, g.to(dtype))).norm() <= 1 + 1e-6


@pytest.mark.parametrize("trainer", OURS)
@settings(deadline=None)
@given(
    st.integers(0, 2**31),
    st.integers(2, 64),
    st.integers(4, 64),
    st.floats(0, 1e4),
    st.sampled_from(TYPES),
)
def test_no_layer_norm_moves_further_than_the_threshold(
    trainer: str, seed: int, tokens: int, width: int, offset: float, dtype: torch.dtype
) -> None:
    x, g = alike(seed, tokens, width, width, 1.0, dtype)
    layer = nn.LayerNorm(width).to(dtype)
    if "ghost" not in trainer:  # whose two passes normalize each for itself
        x = x + offset
    assert update_of(trainer, layer, (x, g * (1 + offset))).norm() <= 1 + 1e-6


# --- bounds --------------------------------------------------------------------------------------


def exact_norms(x: Tensor, g: Tensor) -> Tensor:
    return torch.linalg.vector_norm(g.double().mT @ x.double(), dim=(1, 2))


@settings(deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from([2, 16, 100]),
    st.sampled_from([4, 64, 300]),
    st.one_of(st.just(0.0), st.floats(0, 4).map(lambda power: 10**power)),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(1, 3),
)
def test_a_norm_by_products_in_float32_is_an_upper_bound_and_near_if_tokens_differ(
    seed: int, tokens: int, width: int, offset: float, dtype: torch.dtype, repeated: int
) -> None:
    x, g = alike(seed, tokens, width, 64, offset, dtype)
    x, g = x.repeat(2, repeated, 1), g.repeat(2, repeated, 1)
    exact = exact_norms(x, g)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "SMALL", 0)
        for norms in (squared_product_norms(x, g), squared_gradient_norms(x, g)):
            assert norms.dtype == torch.float32
            assert (norms.double().sqrt() >= exact * (1 - 1e-12)).all()
            if not offset:
                near = 1e-3 if dtype == torch.float32 else 0.02
                assert (norms.double().sqrt() <= exact * (1 + near)).all()


def test_small_products_are_so_exact_that_bounds_do_not_show() -> None:
    x, g = numbers(0, 3, 40, 16).float(), numbers(1, 3, 40, 64).float()
    exact = exact_norms(x, g)
    for norms in (squared_product_norms(x, g), squared_gradient_norms(x, g)):
        torch.testing.assert_close(norms.double().sqrt(), exact, rtol=5e-6, atol=0)
    bias = squared_bias_norms(g).double().sqrt()
    torch.testing.assert_close(bias, g.double().sum(1).norm(dim=1), rtol=5e-6, atol=0)


@pytest.mark.parametrize("tokens", [256, 1024])
@pytest.mark.parametrize(("width", "height"), [(2048, 2048), (2048, 8192), (8192, 2048)])
@pytest.mark.parametrize(
    ("dtype", "numbers_off"), [(torch.float32, 1.0), (torch.bfloat16, 2 / 3)], ids=str
)
def test_bounds_of_independent_tokens_lower_a_factor_by_less_than_two_percent(
    tokens: int, width: int, height: int, dtype: torch.dtype, numbers_off: float
) -> None:
    """What the sums are of independent tokens is known: no product need be made."""
    pairs = tokens * (tokens - 1.0)
    ones = torch.ones(1)
    sums = GramSums(
        ones * tokens * width * height,
        ones * tokens * width * height,
        ones * tokens * width,
        ones * tokens * height,
        ones * pairs * width,
        ones * pairs * height,
    )
    a, b = (numbers_off * each * 2.0**-24 for each in (width, height))
    bound = gram_bound(sums, tokens, (a, b), dtype)
    assert 1 < (bound / sums.squared_norm).sqrt().item() < 1 / 0.98


def test_a_norm_of_a_large_matrix_is_not_too_small() -> None:
    large = torch.full((1, 4096, 1024), 1 / 2048)
    assert 1 <= squared_sample_norms(large).item() < 1.001


@given(st.floats(0, 1e30), st.floats(1e-30, 1e30), st.sampled_from([1, 3, 8]))
def test_a_factor_times_its_norm_is_at_most_the_threshold(
    squared: float, threshold: float, divisor: int
) -> None:
    squares = torch.tensor([squared])
    factor = clipping_factors(squares, threshold, divisor)
    assert factor.dtype == torch.float32
    assert float(factor) * float(squares.double().sqrt()) * divisor <= threshold * (1 + 1e-15)
    assert float(factor) * divisor <= 1


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("trainer", OURS)
def test_a_norm_that_is_no_number_makes_the_update_none(trainer: str) -> None:
    x, g = numbers(0, 2, 4, 8).float(), numbers(1, 2, 4, 8).float()
    for wrong in (math.nan, math.inf):
        spoilt = x.clone()
        spoilt[1, 2, 3] = wrong
        assert not update_of(trainer, nn.Linear(8, 8), (spoilt, g)).isfinite().all()


@pytest.mark.parametrize("trainer", OURS)
def test_a_gradient_whose_squared_norm_is_infinite_is_not_left_unclipped(trainer: str) -> None:
    x, g = 1e15 * numbers(0, 1, 4, 8).float(), 1e15 * numbers(1, 1, 4, 8).float()
    update = update_of(trainer, nn.Linear(8, 8, bias=False), (x, g))
    assert not update.norm() > 1 + 1e-6


@pytest.mark.parametrize("trainer", [*TRAINERS])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_grad_norm": value}, f"max_grad_norm is {value}, and must be finite and above 0")
        for value in (0.0, -1.0, math.nan, math.inf)
    ]
    + [
        ({"noise_multiplier": value}, f"noise_multiplier is {value}, and must be finite and not b")
        for value in (-1.0, math.nan, math.inf)
    ]
    + [
        ({"micro_batches": parts}, f"micro_batches is {parts}, and must divide the batch size, 4")
        for parts in (3, 0, -2, 8)
    ],
    ids=str,
)
def test_numbers_that_are_not_private_are_refused(
    trainer: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        TRAINERS[trainer](nn.Linear(2, 2), batch_size=4, **options)
