"""Sharded by FSDP2, `fused` meets the objects of parameters that come and go with it."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpbench import TRAINERS, Workload
from dpbench.core.errors import ConfigurationError
from dpbench.instruments.logical.one_rank import fake_process_group
from dpbench.training.base import Batch
from dpbench.training.clipped_sums import Buffer

WIDTH = 6


@pytest.fixture(autouse=True)
def one_of_two_ranks() -> Iterator[None]:
    """What this process gathers of the other rank is not defined."""
    with fake_process_group(2):
        yield


class Blocks(Workload):
    """The layers that it is given, each a block."""

    def __init__(self, *layers: nn.Module) -> None:
        self.layers = layers

    def model(self) -> nn.Module:
        named = [
            ("first", nn.Linear(WIDTH, WIDTH)),
            *((f"b{n}", x) for n, x in enumerate(self.layers)),
        ]
        return nn.Sequential(OrderedDict(named))

    def batches(self, batch_size: int) -> Iterator[Batch]:
        while True:
            yield torch.ones(batch_size, 3, WIDTH)

    def losses(self, model: Any, batch: Batch) -> Tensor:
        losses: Tensor = model(batch).flatten(1).sum(1)
        return losses

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return [*model.children()][1:]


def made(workload: Workload, **options: Any) -> Any:
    return TRAINERS["fused"](
        workload.model(), batch_size=2, workload=workload, parallel="fsdp2", **options
    )


BATCH = next(Blocks().batches(2))


class Outside(nn.Module):
    """Uses a parameter of its layer without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) @ self.inner.weight


def test_a_gathered_parameter_that_its_layer_s_call_does_not_use_is_named() -> None:
    trainer = made(Blocks(Outside()))
    with pytest.raises(
        ConfigurationError, match=r"uses parameter b0\.inner\.weight without a call"
    ):
        trainer.train_step(BATCH)


def test_a_parameter_of_two_layers_is_refused_by_both_names() -> None:
    workload = Blocks(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
    model: Any = workload.model()
    model.b0[1].weight = model.b0[0].weight
    trainer = TRAINERS["fused"](model, batch_size=2, workload=workload, parallel="fsdp2")
    with pytest.raises(ConfigurationError, match=r"b0\.0\.weight and b0\.1\.weight are one"):
        trainer.train_step(BATCH)


def test_a_workload_that_does_not_say_its_blocks_is_refused() -> None:
    class Whole(Blocks):
        def blocks(self, model: nn.Module) -> Any:
            return Workload.blocks(self, model)

    with pytest.raises(ConfigurationError, match="need the blocks of the model"):
        made(Whole(nn.Linear(WIDTH, WIDTH)))


def test_a_block_that_would_be_copied_is_refused_by_its_class() -> None:
    with pytest.raises(ConfigurationError, match=r"layer b0 \(PReLU\) .*FSDP2 shards it as a"):
        made(Blocks(nn.PReLU())).train_step(BATCH)


def test_a_layer_whose_values_are_not_there_in_backward_is_refused() -> None:
    trainer = made(Blocks(nn.Sequential(nn.GELU(), nn.PReLU())))
    with pytest.raises(ConfigurationError, match=r"layer b0\.1 \(PReLU\) .* gathers its param"):
        trainer.train_step(BATCH)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(WIDTH, WIDTH),
        nn.LayerNorm(WIDTH, bias=False),
        nn.Sequential(nn.PReLU(), nn.GELU()),
        nn.GELU(),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_a_block_may_be_one_layer_or_have_none_that_is_trained(layer: nn.Module) -> None:
    trainer = made(Blocks(layer))
    for _ in range(2):
        trainer.train_step(BATCH)
        with torch.no_grad():
            trainer.model(BATCH)  # leaves the outermost gathered, as in an evaluation
    trainer.train_step(BATCH)


def test_a_shard_that_was_given_other_memory_is_refused() -> None:
    trainer = made(Blocks(nn.Linear(WIDTH, WIDTH)))
    for _ in range(2):
        trainer.train_step(BATCH)
    trainer.model.double()
    with pytest.raises(
        ConfigurationError, match=r"parameter first\.weight was moved to other memory"
    ):
        trainer.train_step(BATCH)


def test_a_frozen_layer_is_gathered_and_stays() -> None:
    workload = Blocks(nn.Linear(WIDTH, WIDTH))
    model: Any = workload.model()
    model.first.requires_grad_(False)
    trainer = TRAINERS["fused"](model, batch_size=2, workload=workload, parallel="fsdp2")
    before = [p.to_local().clone() for p in trainer.model.parameters()]
    trainer.train_step(BATCH)
    same = [
        torch.equal(p.to_local(), b)
        for p, b in zip(trainer.model.parameters(), before, strict=True)
    ]
    assert same == [True, True, False, False]


def test_no_buffer_that_was_sent_is_in_memory_when_the_update_begins() -> None:
    trainer = made(Blocks(nn.Linear(WIDTH, WIDTH)))
    reduce, step = trainer.reduce, trainer.noisy_step
    sent, left = list[Any](), list[int]()

    def noting(buffer: Buffer) -> None:
        sent.append(weakref.ref(buffer.flat))
        reduce(buffer)

    def counting(reductions: Any) -> None:
        for each in reductions:
            each.wait()
        left.append(sum(flat() is not None for flat in sent))
        step(reductions)

    trainer.reduce, trainer.noisy_step = noting, counting
    trainer.train_step(BATCH)
    assert sent
    assert left == [0]
