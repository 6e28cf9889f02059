"""The way to norms that takes least, by shape; each way gives the same update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dpbench import TRAINERS, Case
from dpbench.child.build import build
from dpbench.core.registry import resolve
from dpbench.training.norms import GRADIENT, KEPT, PRODUCTS, Shape, cheapest, costs
from dpbench.training.parallel import kind_of
from tests.training.test_norms import Weighted, forced

ALL = (PRODUCTS, GRADIENT, KEPT)
PLAIN = "fused:graphs=false,kernels=false"
NUMBERS = st.integers(1, 20_000)
LINEAR = st.builds(
    Shape,
    st.integers(1, 64),
    NUMBERS,
    NUMBERS,
    NUMBERS,
    st.sampled_from([2, 4, 8]),
    rows=st.just(False),
)


# --- the choice ----------------------------------------------------------------------------------


CHOSEN = [
    (Shape(8, 256, 2048, 2048, 4), PRODUCTS, PRODUCTS),
    (Shape(8, 256, 2048, 8192, 2), PRODUCTS, PRODUCTS),
    (Shape(8, 1024, 8192, 2048, 2), PRODUCTS, PRODUCTS),
    (Shape(8, 1024, 2048, 32_000, 2), PRODUCTS, PRODUCTS),
    (Shape(2, 16_384, 2048, 32_000, 2), KEPT, GRADIENT),
    (Shape(8, 1024, 2048, 16, 2), KEPT, GRADIENT),
    (Shape(8, 1024, 16, 8192, 4), KEPT, GRADIENT),
    (Shape(64, 1, 512, 512, 4), PRODUCTS, PRODUCTS),
]
"""Shapes, and the way that is chosen in one backward pass and in two."""


def test_sequences_longer_than_a_layer_is_wide_have_norms_from_gradients() -> None:
    for shape, in_one_pass, in_two in CHOSEN:
        assert cheapest(shape, (PRODUCTS, KEPT), kernel=True) == in_one_pass
        assert cheapest(shape, (PRODUCTS, GRADIENT)) == in_two


def test_the_gradient_of_a_batch_of_one_is_kept_where_products_are_larger() -> None:
    layer, table = Shape(1, 1024, 2048, 8192, 2), Shape(1, 8192, 32_000, 2048, 2, rows=True)
    for shape in (layer, table):
        assert cheapest(shape._replace(tokens=8192), ALL, alone=True) == KEPT
        assert cheapest(shape._replace(tokens=16), ALL, alone=True) == PRODUCTS
    assert cheapest(table._replace(examples=8), (PRODUCTS, KEPT)) == PRODUCTS


@given(LINEAR, st.booleans(), st.booleans())
def test_no_other_way_that_fits_takes_less(shape: Shape, kernel: bool, alone: bool) -> None:
    chosen, cost = cheapest(shape, ALL, kernel=kernel, alone=alone), costs(shape, kernel=kernel)
    assert cost[chosen] <= min(cost[PRODUCTS], cost[GRADIENT])
    weight, tokens = shape.width * shape.height, shape.tokens
    if alone or weight <= tokens * max(shape.width, shape.height):
        assert cost[chosen] <= cost[KEPT]
    else:
        assert chosen != KEPT


@given(LINEAR)
def test_a_gradient_made_twice_is_never_best_where_a_kernel_has_the_products(shape: Shape) -> None:
    assert cheapest(shape, ALL, kernel=True) != GRADIENT


# --- what trainers do ----------------------------------------------------------------------------


def ways_of(trainer: str, batch_size: int, seq_len: int, **axes: Any) -> dict[str, str]:
    case = Case(trainer, batch_size, seq_len, "50x32x1x2", **axes)
    made, [batch] = build(resolve(case), torch.device("cpu"), 1)
    made.train_step(batch)
    return {name.removeprefix("blocks.0."): way for name, way in made.ways.items()}


def test_trainers_say_which_way_each_layer_went() -> None:
    short, alone, long = (ways_of("fused", *each) for each in ((4, 8), (1, 64), (4, 64)))
    assert short.keys() == alone.keys() == long.keys()
    assert short["up"] == short["token_embedding"] == long["token_embedding"] == PRODUCTS
    assert short["final_norm"] == alone["up"] == alone["token_embedding"] == long["up"] == KEPT
    tables = {"token_embedding": GRADIENT, "position_embedding": GRADIENT}
    assert ways_of(PLAIN, 4, 64) == long | tables  # it has no kernel for products


@pytest.mark.parametrize("trainer", ["fused", PLAIN])
def test_gradients_of_adapters_are_kept(trainer: str) -> None:
    ways = ways_of(trainer, 2, 64, trainable="lora:2")
    assert {*ways.values()} == {KEPT}
    assert {*ways_of(trainer, 2, 64, trainable="*.bias").values()} == {KEPT}


def test_micro_batches_of_one_example_keep_no_gradient_that_a_batch_of_one_would() -> None:
    layer = "attention.query"
    assert ways_of("fused", 1, 24)[layer] == KEPT
    assert ways_of("fused", 2, 24, micro_batches=2)[layer] == PRODUCTS


def conv1d() -> nn.Module:
    utils = pytest.importorskip("transformers.pytorch_utils")
    layer: nn.Module = utils.Conv1D(6, 5)
    return layer


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(5, 6),
    "without bias": lambda: nn.Linear(5, 6, bias=False),
    "Conv1D": conv1d,
    "Embedding": lambda: nn.Embedding(9, 6),
    "Embedding with padding": lambda: nn.Embedding(9, 6, padding_idx=3),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    ("trainer", "way"),
    [(PLAIN, way) for way in ALL] + [("fused", PRODUCTS), ("fused", KEPT)],
)
def test_each_way_moves_parameters_by_the_mean_of_clipped_gradients(
    trainer: str, way: str, layer: str
) -> None:
    for examples, parts in ((1, 1), (3, 1), (4, 2)):
        check_step(trainer, way, examples, parts, layer)


def check_step(trainer: str, way: str, examples: int, parts: int, layer: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(LAYERS[layer]()).double()
    is_table = kind_of(model[0]) is nn.Embedding
    given = torch.randint(9, (examples, 7)) if is_table else torch.randn(examples, 7, 5).double()
    batch: tuple[Tensor, Tensor] = given, torch.randn(examples, 7, 6).double()
    workload, parameters = Weighted(model, batch), [*model.parameters()]
    losses = workload.losses(model, batch)
    gradients = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
    norms = [torch.cat([g.flatten() for g in each]).norm() for each in gradients]
    threshold = float(sum(norms) / len(norms))
    before = [p.detach().clone() for p in parameters]
    made = TRAINERS[trainer](
        model, batch_size=examples, workload=workload, micro_batches=parts,
        noise_multiplier=0.0, learning_rate=1.0, max_grad_norm=threshold,
    )  # fmt: skip
    with forced(way):
        made.train_step(batch)
    for n, (parameter, old) in enumerate(zip(parameters, before, strict=True)):
        clipped = [
            each[n] * min(1.0, threshold / float(norm))
            for each, norm in zip(gradients, norms, strict=True)
        ]
        expected = torch.stack(clipped).sum(0) / examples
        torch.testing.assert_close(old - parameter, expected, rtol=1e-6, atol=1e-6)
