"""No example adds more than the threshold, whatever its numbers are."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dpbench import TRAINERS, Batch, SimpleBigModel, Workload, get_random_dataloader
from dpbench.core.case import ModelSize
from dpbench.core.errors import ConfigurationError
from dpbench.training import convolutions, kernels, per_layer
from dpbench.training.kernels import aligned, gram_sums, has_tf32
from dpbench.training.norms import (
    GRADIENT,
    KEPT,
    PRODUCTS,
    GhostNorms,
    ProductError,
    clipping_factors,
    gram_bound,
    total,
)

PLAIN = "fused:graphs=false,kernels=false"
OURS = (
    f"{PLAIN} by products",
    f"{PLAIN} by gradient",
    f"{PLAIN} by kept",
    "fused by products",
    "fused by kept",
    "micro_batch",
)
"""Trainers, and the way to norms that is forced upon their layers."""
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


@contextmanager
def forced(way: str) -> Iterator[None]:
    """A context in which layers' norms are found in one way, where a layer has it."""

    def cheapest(_: object, ways: Collection[str], **__: object) -> str:
        return way if way in ways else PRODUCTS

    def of_convolution(*_: object, **__: object) -> str:
        return KEPT if way == KEPT else PRODUCTS

    with pytest.MonkeyPatch.context() as patch:
        if way:
            patch.setattr(per_layer, "cheapest", cheapest)
            patch.setattr(convolutions, "cheapest_way", of_convolution)
        yield


def update_of(trainer: str, layer: nn.Module, batch: Batch, **options: Any) -> Tensor:
    """What a step takes off parameters that are zero before it, in float64."""
    model = nn.Sequential(layer)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    name, _, way = trainer.partition(" by ")
    made = TRAINERS[name](
        model, batch_size=len(batch[0]), workload=Weighted(model, batch), **(PRIVATE | options)
    )
    with forced(way):
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


ALIKE = [
    (128, 32, 100, torch.bfloat16),
    (128, 64, 30, torch.bfloat16),
    (128, 32, 1e4, torch.float32),
    (16, 256, 1e4, torch.float32),
    (64, 64, 1e4, torch.float32),
    (16, 256, 1e4, torch.float64),
    (16, 256, 1e7, torch.float64),
]
"""Tokens, width, offset and dtype."""


@pytest.mark.parametrize("trainer", OURS)
def test_tokens_that_are_alike_are_clipped(trainer: str) -> None:
    for tokens, width, offset, dtype in ALIKE:
        batch = alike(0, tokens, width, width, offset, dtype)
        assert update_of(trainer, nn.Linear(width, width).to(dtype), batch).norm() <= 1 + 1e-6


class Gains(nn.Module):
    """A layer that nobody knows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.shift, self.gain, x.sin())


OTHERS: list[Callable[[int], nn.Module]] = [
    lambda width: nn.GroupNorm(2, width),
    lambda width: nn.InstanceNorm1d(width, affine=True),
    lambda width: nn.LayerNorm((width, 12)),
    lambda width: nn.RMSNorm(12),
    lambda width: Gains(12),
]
"""Layers of 12 positions, whose gradients Opacus's samplers or functorch compute."""


@st.composite
def layers(draw: st.DrawFn) -> tuple[nn.Module, Batch]:
    """A layer of any kind, and an example whose gradient is far above the threshold."""
    kind = draw(st.sampled_from(["linear", "embedding", "convolution", "norm", "bias", "other"]))
    seed, dtype = draw(st.integers(0, 2**31)), draw(st.sampled_from(TYPES))
    tokens, width, height = (draw(st.integers(low, 512)) for low in (2, 4, 4))
    offset = draw(st.one_of(st.just(0.0), st.floats(0, 4).map(lambda power: 10**power)))
    bias = draw(st.booleans())
    if kind == "linear":
        batch = alike(seed, tokens, width, height, offset, dtype)
        return nn.Linear(width, height, bias=bias).to(dtype), batch
    if kind == "embedding":
        rows = draw(st.integers(1, 20))
        ids = torch.randint(rows, (1, tokens), generator=torch.Generator().manual_seed(seed))
        _, g = alike(seed, tokens, 4, width, 1.0, dtype)
        return nn.Embedding(rows, width).to(dtype), (ids, 1e3 * g)
    if kind == "convolution":
        channels, height, length = 4 + width % 29, 4 + height % 61, 4 + tokens % 61
        kinds = [(nn.Conv1d, (length,)), (nn.Conv2d, (length // 4 + 3, 5))]
        layer, shape = draw(st.sampled_from(kinds))
        made = layer(channels, height, 3, bias=bias).to(dtype)
        x = (numbers(seed, 1, channels, *shape) + offset).to(dtype)
        g = numbers(seed + 1, *made(x).shape)
        g = g - g.flatten(2).mean(2).view(1, height, *[1] * len(shape))
        return made, (x, g.to(dtype))
    if kind == "bias":  # the input is zero, and the output gradients sum to about zero
        _, g = alike(seed, tokens, 4, 8, 1.0, dtype)
        batch = torch.zeros(1, tokens, 4, dtype=dtype), draw(st.floats(0, 1e7)) * g
        return nn.Linear(4, 8).to(dtype), batch
    width = 2 * (2 + width % 31)
    if kind == "norm":
        x, g = alike(seed, 2 + tokens % 63, width, width, 1.0, dtype)
        return nn.LayerNorm(width).to(dtype), (x + offset, g * (1 + offset))
    x, g = alike(seed, width, 12, 12, offset, dtype)
    return draw(st.sampled_from(OTHERS))(width).to(dtype), (x, g * (1 + offset))


@pytest.mark.parametrize("trainer", OURS)
@settings(deadline=None, max_examples=5 * settings().max_examples)
@given(layers())
def test_no_layer_moves_further_than_the_threshold(
    trainer: str, made: tuple[nn.Module, Batch]
) -> None:
    layer, batch = made
    assert update_of(trainer, layer, batch).norm() <= 1 + 1e-6


# --- bounds --------------------------------------------------------------------------------------


def exact_norms(x: Tensor, g: Tensor, bias: bool = False) -> Tensor:
    norms = torch.linalg.vector_norm(g.double().mT @ x.double(), dim=(1, 2))
    return torch.hypot(norms, g.double().sum(1).norm(dim=1)) if bias else norms


def norms_of(x: Tensor, g: Tensor, way: str, bias: bool = False) -> Tensor:
    """What clips, by products or from gradients."""
    norms = GhostNorms()
    norms.add(x, g, way=way, bias=bias)
    return total(norms.squared_norms()).double().sqrt()


@pytest.mark.parametrize("way", [PRODUCTS, GRADIENT])
@settings(deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from([16, 100, 300]),
    st.sampled_from([4, 20]),
    st.one_of(st.just(0.0), st.floats(0, 4).map(lambda power: 10**power)),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(1, 3),
    st.booleans(),
)
def test_a_norm_in_float32_is_an_upper_bound_and_near_if_tokens_differ(
    way: str,
    seed: int,
    tokens: int,
    width: int,
    offset: float,
    dtype: torch.dtype,
    repeated: int,
    bias: bool,
) -> None:
    x, g = alike(seed, tokens, width, 16, offset, dtype)
    x, g = x.repeat(2, repeated, 1), g.repeat(2, repeated, 1)
    exact = exact_norms(x, g, bias)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "SMALL", 0)
        norms = norms_of(x, g, way, bias)
    assert (norms >= exact * (1 - 1e-12)).all()
    if not offset:
        near = 5e-3 if dtype == torch.float32 else 0.02
        assert (norms <= exact * (1 + near)).all()


@pytest.mark.parametrize("way", [PRODUCTS, GRADIENT])
def test_small_products_are_so_exact_that_bounds_do_not_show(way: str) -> None:
    x, g = numbers(0, 3, 40, 16).float(), numbers(1, 3, 40, 64).float()
    torch.testing.assert_close(
        norms_of(x, g, way, True), exact_norms(x, g, True), rtol=1e-5, atol=0
    )


def test_a_norm_of_layers_is_that_of_all_their_gradients() -> None:
    norms, squares = GhostNorms(), torch.zeros(3, dtype=torch.float64)
    for seed, (tokens, width, height) in enumerate([(4, 64, 32), (4, 64, 32), (40, 8, 8)] * 2):
        x, g = numbers(seed, 3, tokens, width), numbers(seed + 9, 3, tokens, height)
        way = PRODUCTS if tokens < 40 else GRADIENT
        norms.add(x, g, way=way, bias=seed != 3)
        squares += exact_norms(x, g).square()
        squares += g.sum(1).square().sum(1) * (seed != 3)
        norms.add_samples(x, x.dtype)
        squares += x.square().sum((1, 2))
    torch.testing.assert_close(total(norms.squared_norms()), squares, rtol=1e-9, atol=0)


@contextmanager
def with_tf32() -> Iterator[None]:
    """A context in which float32 products may use TF32, which a CPU does not have."""
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize(
    ("dtype", "units", "truncated", "most"),
    [
        (torch.float32, 1.0, 0.0, 2e-3),
        (torch.float32, 3.0, 2.0**-10, 0.01),  # with TF32, by the kernel
        (torch.bfloat16, 11 / 16, 0.0, 0.01),
    ],
    ids=str,
)
def test_bounds_of_independent_tokens_hardly_lower_a_factor(
    dtype: torch.dtype, units: float, truncated: float, most: float
) -> None:
    """What the sums are of independent tokens is known: no product need be made."""
    for tokens, width, height in product((256, 1024), (2048,), (2048, 8192, 32_000)):
        pairs = tokens * (tokens - 1.0)
        norm = float(tokens * width * height)
        squares = [tokens * size**2 + pairs * size for size in (width, height)]
        sums = torch.tensor([norm, norm, tokens * width, tokens * height, *squares])[:, None]
        x_error, g_error = (
            ProductError(units * size * 2.0**-24, 11 * 2.0**-24, truncated)
            for size in (width, height)
        )
        with with_tf32() if truncated else nullcontext():
            bound = gram_bound([sums], tokens, (x_error, g_error), dtype)
        assert 1 < (bound / norm).sqrt().item() < 1 + most


def in_11_bits(numbers: Tensor, *, nearest: bool) -> Tensor:
    """Round float32 numbers to TF32, to nearest or towards zero, in float64."""
    bits = numbers.float().view(torch.int32) + (0x1000 if nearest else 0)
    return (bits & ~0x1FFF).view(torch.float32).double()


@settings(deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from([1, 16, 300]),
    st.one_of(st.just(0.0), st.floats(0, 4).map(lambda power: 10**power)),
    st.floats(1e-6, 1),
    st.booleans(),
)
def test_norms_of_truncated_numbers_cover_an_update_that_rounds_to_nearest(
    seed: int, tokens: int, offset: float, factor: float, upwards: bool
) -> None:
    x, g = alike(seed, tokens, 16, 20, offset, torch.float32)
    if upwards:  # each number is truncated by as much as possible, and the factor rounds nothing
        factor = 0.5
        x, g = (torch.full_like(each, 1 + 2.0**-10 - 2.0**-23) for each in (x, g))
    products = [
        each @ each.mT for each in (in_11_bits(x, nearest=False), in_11_bits(g, nearest=False))
    ]
    errors = ProductError(3 * 16 * 2.0**-24, 12 * 2.0**-24, 2.0**-10)
    with with_tf32():
        bound = gram_bound([gram_sums(*products)], tokens, (errors, errors), torch.float32)
    made = in_11_bits(factor * g, nearest=True).mT @ in_11_bits(x, nearest=True)
    assert made.norm() <= factor * bound[0, 0].double().sqrt() * (1 + 1e-6)


class ProductsIn11Bits(TorchDispatchMode):
    """Rounds what products are given, as a GPU does with TF32."""

    def __init__(self) -> None:
        super().__init__()
        aten = torch.ops.aten
        self._rounding: set[Any] = {aten.mm.default, aten.mm.out, aten.bmm.default}
        self._rounding.add(aten.convolution_backward.default)

    def __torch_dispatch__(
        self, function: Any, _: Any, given: Any = (), options: Any = None
    ) -> Any:
        if function in self._rounding:
            given = [
                in_11_bits(each, nearest=True).float() if isinstance(each, Tensor) else each
                for each in given
            ]
        return function(*given, **(options or {}))


@pytest.mark.parametrize("trainer", OURS)
def test_with_tf32_one_of_several_examples_is_clipped(trainer: str) -> None:
    values, sizes = (1, 1 + 2.0**-11, 1 + 2.0**-10 - 2.0**-23), (1, 0.033, 0.1234567)
    for value, size in product(values, sizes):
        x, g = torch.zeros(2, 3, 1, 8)
        x[0], g[0] = 100 * value, 100 * size
        with with_tf32(), ProductsIn11Bits():
            update = update_of(trainer, nn.Linear(8, 8, bias=False), (x, g))
            of_window = update_of(trainer, nn.Conv1d(1, 1, 8, bias=False), (x, g[..., :1]))
        assert 3 * max(update.norm(), of_window.norm()) <= 1 + 1e-6


def test_tf32_is_noticed_however_it_was_allowed() -> None:
    assert not has_tf32()
    with with_tf32():
        assert has_tf32()
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert has_tf32()
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
    assert not has_tf32()


def test_a_norm_of_a_large_matrix_is_not_too_small() -> None:
    large = torch.full((1, 4096, 1024), 1 / 2048)
    norms = GhostNorms()
    norms.add_samples(large, large.dtype)
    assert 1 <= norms.squared_norms()[0].item() < 1.001


@given(st.floats(0, 1e30), st.floats(1e-30, 1e30))
def test_a_factor_times_its_norm_is_at_most_the_threshold(squared: float, threshold: float) -> None:
    squares = torch.tensor([squared])
    factor = clipping_factors(squares, threshold)
    assert factor.dtype == torch.float32
    assert float(factor) * float(squares.double().sqrt()) <= threshold * (1 + 1e-15)
    assert float(factor) <= 1


class Operators(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.number += not any(each.alias_info for each in func._schema.arguments)
        return func(*args, **(kwargs or {}))


def test_bounds_take_no_operator_for_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of layers of a shape are made together."""
    made = GhostNorms.squared_norms

    def counted(norms: GhostNorms) -> list[Tensor]:
        with operators:
            return made(norms)

    monkeypatch.setattr(GhostNorms, "squared_norms", counted)
    numbers = []
    for layers in (1, 4):
        operators = Operators()
        size = ModelSize(50, 16, layers, 2)
        trains = TRAINERS[PLAIN](SimpleBigModel(size, max_seq_len=8), batch_size=2)
        trains.train_step(next(iter(get_random_dataloader(batch_size=2, seq_len=8, vocab_size=50))))
        numbers.append(operators.number)
    assert numbers[0] == numbers[1] < 200


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("trainer", OURS)
def test_a_gradient_whose_squared_norm_is_infinite_is_not_left_unclipped(trainer: str) -> None:
    x, g = 1e15 * numbers(0, 1, 4, 8).float(), 1e15 * numbers(1, 1, 4, 8).float()
    update = update_of(trainer, nn.Linear(8, 8, bias=False), (x, g))
    assert not update.norm() > 1 + 1e-6


REFUSED = {
    "max_grad_norm": ((0.0, -1.0, math.nan, math.inf), "be finite and above 0"),
    "noise_multiplier": ((-1.0, math.nan, math.inf), "be finite and not below 0"),
    "micro_batches": ((3, 0, -2, 8), "divide the batch size, 4"),
}


@pytest.mark.parametrize("trainer", [*TRAINERS])
def test_numbers_that_are_not_private_are_refused(trainer: str) -> None:
    tried = [(n, value, must) for n, (values, must) in REFUSED.items() for value in values]
    texts = ("max_grad_norm", "noise_multiplier", "learning_rate")
    for name, value, must in (*tried, *((n, "nan", "be a finite number") for n in texts)):
        shown = repr(value) if isinstance(value, str) else value
        with pytest.raises(ConfigurationError, match=f"{name} is {shown}, and must {must}"):
            TRAINERS[trainer](nn.Linear(2, 2), batch_size=4, **{name: value})


def test_aligned_rows_are_longer_by_zeros_where_they_are_odd_and_many() -> None:
    odd = torch.ones(2, 2**19, 3, dtype=torch.bfloat16)
    longer = aligned(odd)
    assert longer.shape == (2, 2**19, 64)
    assert torch.equal(longer[..., :3], odd)
    assert not longer[..., 3:].any()
    even, few = torch.ones(2**18, 8), torch.ones(2, 3)
    assert aligned(even) is even
    assert aligned(few) is few


@pytest.mark.parametrize("together", [False, True])
@settings(deadline=None)
@given(seed=st.integers(0, 2**16), offset=st.sampled_from([0.0, 1.0, 100.0, 1e4]))
def test_a_norm_of_a_tied_weight_is_an_upper_bound_and_near_if_tokens_differ(
    together: bool, seed: int, offset: float
) -> None:
    x, g = (each.float() for each in alike(seed, 40, 8, 30, offset, torch.float64))
    rows = torch.randint(30, (1, 25), generator=torch.Generator().manual_seed(seed))
    of_rows = numbers(seed + 2, 1, 25, 8).float() * (1 + offset)
    norms = GhostNorms(together=together)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "SMALL", 0)  # products of these sizes would be in float64
        norms.add_tied([(x, g), (rows, of_rows)])
        [bound] = norms.squared_norms()
    exact = g.double().mT @ x.double()
    exact[0].index_add_(0, rows[0], of_rows[0].double())
    assert bound.double().sqrt() >= exact.norm()
    if offset == 0:
        assert bound.double().sqrt() <= (1 + 1e-4) * exact.norm()
