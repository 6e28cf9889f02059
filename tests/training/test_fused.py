"""Merged passes: each operator does what it says, and a step what it does without them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dpbench import TRAINERS, Case, SimpleBigModel, get_random_dataloader
from dpbench.core.case import ModelSize
from dpbench.instruments.logical.logical import Logical
from dpbench.training import kernels
from dpbench.training.base import Batch
from dpbench.training.clipped_sums import ALIGNED, one_buffer
from dpbench.training.graphs import signature
from dpbench.training.kernels import gram_norms, layer_norm_samples, multiplied
from dpbench.training.norms import rounded_down, squared_norms_of_alike

SIZE = ModelSize(50, 16, 1, 2)
PLAIN = "fused:graphs=false,kernels=false"


def made(trainer: str = "fused", **options: Any) -> Any:
    torch.manual_seed(0)
    model = SimpleBigModel(SIZE, max_seq_len=12)
    return TRAINERS[trainer](model, batch_size=6, **({"noise_multiplier": 0.0} | options))


def batch_of(tokens: int) -> Batch:
    return next(iter(get_random_dataloader(batch_size=6, seq_len=tokens, vocab_size=50)))


def parameters(trainer: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


# --- operators -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norms_of_alike_layers_are_those_of_the_gradients(dtype: torch.dtype, bias: bool) -> None:
    xs = [normal(3, 7, 5, dtype=dtype), normal(3, 7, 5, dtype=dtype).sin()]
    g = normal(3, 7, 4)
    gs = [each.to(dtype) for each in (g.cos(), g, g.sin(), g.square())]  # two for each input
    expected = torch.zeros(3, dtype=torch.float64)
    for x, g in zip([x for x in xs for _ in range(2)], gs, strict=True):
        expected += torch.bmm(g.double().mT, x.double()).square().sum((1, 2))
        expected += g.double().sum(1).square().sum(1) if bias else 0
    norms = squared_norms_of_alike(xs, gs, bias)
    assert norms.dtype == torch.promote_types(dtype, torch.float32)
    rtol = 4 * torch.finfo(dtype).eps if dtype == torch.bfloat16 else 4e-6
    torch.testing.assert_close(norms.double().sum(0), expected, rtol=rtol, atol=0)
    torch.testing.assert_close(gram_norms(xs, gs, bias)[0].double().sum(0), expected)


def test_gram_norms_of_an_embedding_add_up_rows_that_an_example_names_twice() -> None:
    rows, g = torch.tensor([[0, 1, 0], [2, 2, 2]]), normal(2, 3, 4)
    samples = torch.zeros(2, 3, 4, dtype=torch.float64)
    for sample, named, gradients in zip(samples, rows, g, strict=True):
        sample.index_add_(0, named, gradients)
    expected = samples.square().sum((1, 2))
    torch.testing.assert_close(gram_norms([rows], [g], False)[0, 0], expected)


def test_layer_norm_samples_are_the_gradients_of_each_example() -> None:
    layer, x, g = nn.LayerNorm(5).double(), normal(3, 7, 5), normal(3, 7, 5).cos()
    samples = layer_norm_samples(x, g, layer.eps)
    for example in range(3):
        expected = torch.autograd.grad(layer(x[example]), [*layer.parameters()], g[example])
        for got, wanted in zip(samples[:, example], expected, strict=True):
            torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_operators_return_the_type_and_shape_that_they_say_without_data(dtype: torch.dtype) -> None:
    x, g = normal(2, 3, 4, dtype=dtype), normal(2, 3, 4, dtype=dtype)
    test_fake = "test_faketensor"
    torch.library.opcheck(layer_norm_samples, (x, g, 1e-5), test_utils=test_fake)
    torch.library.opcheck(gram_norms, ([x], [g], True), test_utils=test_fake)
    ops = torch.ops.dpbench
    torch.library.opcheck(ops.wide_product.default, (x, g.mT), test_utils=test_fake)
    sums = x[:, :, :3], g[:, :, :3], True
    torch.library.opcheck(ops.gram_sums.default, sums, test_utils=test_fake)
    torch.library.opcheck(kernels.multiplied_by_kernel, (x, torch.rand(2)), test_utils=test_fake)


@given(
    st.lists(st.floats(0, 1, width=32), min_size=1, max_size=20),
    st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
)
def test_a_factor_is_never_rounded_up_nor_by_more_than_a_step(
    values: list[float], dtype: torch.dtype
) -> None:
    factors = torch.tensor(values)
    rounded = rounded_down(factors, dtype)
    assert rounded.dtype == dtype
    assert (rounded.double() <= factors.double()).all()
    above = torch.nextafter(rounded, torch.full_like(rounded, 2.0))
    assert (above.double() > factors.double()).all()


@pytest.mark.parametrize("scale", [multiplied, kernels.multiplied_by_kernel])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_an_example_is_scaled_by_the_whole_factor_and_rounded_once(
    dtype: torch.dtype, scale: Callable[[Tensor, Tensor], Tensor]
) -> None:
    tensor, factors = torch.randn(5, 3, 40).to(dtype), torch.rand(5)
    product = scale(tensor, factors)
    assert product.dtype == dtype
    exact = tensor.double() * factors.double()[:, None, None]
    assert ((product.double() / exact - 1).abs() <= torch.finfo(dtype).eps / 2 * 1.01).all()


def test_each_part_of_a_buffer_begins_where_matrix_products_want_it() -> None:
    given_ = [torch.empty(3, 5), torch.empty(()), torch.empty(ALIGNED), torch.empty(2)]
    flat, places, _ = one_buffer(given_)
    assert [place.shape for place in places.values()] == [each.shape for each in given_]
    starts = [place.storage_offset() for place in places.values()]
    assert starts == [0, ALIGNED, 2 * ALIGNED, 3 * ALIGNED]
    assert flat.numel() == 4 * ALIGNED


# --- steps ---------------------------------------------------------------------------------------


def test_steps_of_several_shapes_and_rates_are_those_without_kernels() -> None:
    trainers = [made("fused"), made(PLAIN)]
    for tokens, rate in ((8, 0.1), (12, 0.1), (8, 0.5)):
        for trainer in trainers:
            trainer.plain_optimizer.param_groups[0]["lr"] = rate
            trainer.train_step(batch_of(tokens))
    torch.testing.assert_close(*map(parameters, trainers), rtol=1e-5, atol=1e-6)


def test_a_graph_is_of_one_shape_and_mode_of_each_layer() -> None:
    trainer = made()
    recorded = signature(trainer, batch_of(8))
    assert signature(trainer, batch_of(8)) == recorded
    assert signature(trainer, batch_of(12)) != recorded
    for layer in (trainer.model, trainer.model.blocks[0]):
        layer.eval()
        assert signature(trainer, batch_of(8)) != recorded
        trainer.model.train()
        assert signature(trainer, batch_of(8)) == recorded
    trainer.max_grad_norm /= 2  # is an input of the graph
    assert signature(trainer, batch_of(8)) == recorded


@pytest.mark.parametrize("trainer_name", ["fused", PLAIN])
def test_noise_differs_between_steps_and_between_runs(trainer_name: str) -> None:
    def moved_in_two_steps(seed: int | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = SimpleBigModel(SIZE, max_seq_len=12)
        options = {"max_grad_norm": 1e3, "seed": seed}  # mostly noise
        trainer = TRAINERS[trainer_name](model, batch_size=6, **options)
        values = [parameters(trainer)]
        for _ in range(2):
            trainer.train_step(batch_of(8))
            values.append(parameters(trainer))
        return [after - before for before, after in pairwise(values)]

    first, again, other = (moved_in_two_steps(seed) for seed in (1, 1, 2))
    unseeded, also = (moved_in_two_steps(None) for _ in range(2))
    assert all(map(torch.equal, first, again))
    for one, another in combinations((*first, *other, *unseeded, *also), 2):
        correlation = torch.corrcoef(torch.stack([one, another]))[0, 1]
        assert abs(correlation) < 5 / len(one) ** 0.5  # a false alarm: 6e-7 each


def test_without_hardware_its_operators_are_counted_by_their_operands() -> None:
    result = Logical().count(Case("fused", 4, 8, "50x32x1x2"))
    counts = {count.operator: count for count in result.operators}
    assert not [name for name, count in counts.items() if count.general_rule]
    update = counts["dpbench.noisy_update"]
    model = SimpleBigModel(ModelSize(50, 32, 1, 2), max_seq_len=8)
    weights = sum(p.numel() for p in model.parameters()) * 4
    assert update.phase == "optimizer"
    assert update.read_bytes == 2 * update.write_bytes + 48  # key, buffer and step
    assert update.write_bytes > weights
    # Of 4 examples with 8 tokens the products x xᵀ and g gᵀ, which are symmetric, of each layer.
    # Query, key and value have one x.
    layers = {(32, 32 * 3): 1, (32, 32): 1, (32, 128): 1, (128, 32): 1, (32, 50): 1, (0, 32): 2}
    flops = sum(4 * 8 * 9 * sum(widths) * n for widths, n in layers.items())
    assert counts["dpbench.gram_norms"].flops == flops
    # Two embeddings, and of four layers and the head what query, key and value were given once.
    assert counts["dpbench.scaled"].calls == 7
