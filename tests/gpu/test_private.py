"""On a GPU, `make_private` replays graphs, but never those of another function of losses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpbench import Private, make_private

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("alone_on_the_gpu")]
WIDTH, CLASSES, EXAMPLES = 16, 3, 64


@pytest.fixture(autouse=True)
def ieee() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def private(model: nn.Module, **options: Any) -> Private:
    dataset = TensorDataset(torch.randn(EXAMPLES, WIDTH), torch.arange(EXAMPLES) % CLASSES)
    usual = {"batch_size": 8, "max_grad_norm": 0.3, "noise_multiplier": 0.0, "seed": 1}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return make_private(model, optimizer, dataset, **usual | options)


def classifier() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, CLASSES)).cuda()


def values(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("physical", [None, 3])
def test_graphs_train_as_the_usual_loop_and_as_functions_change(physical: int | None) -> None:
    rate, replayed = 1.0, []

    def losses(model: Any, batch: Any) -> Tensor:
        inputs, labels = batch
        return rate * F.cross_entropy(model(inputs), labels, reduction="none")

    model = classifier()
    made, other = (
        private(each, physical_batch_size=physical) for each in (model, copy.deepcopy(model))
    )
    for _ in range(2):
        for batch in made.loader:
            rate = 1.0 if made.steps % 4 else 0.01  # so small that nothing is clipped
            made.step(batch, losses)
            if len(batch[0]):
                replayed.append((rate, made.trainer.replays))
            other._sampler.unused.append(len(batch[0]))
            for part in other.parts(batch):
                losses(other.model, part).mean().backward()
            other.optimizer.step()
            torch.testing.assert_close(values(made.model), values(other.model))
    assert len({*replayed}) == 2  # the function of the first step is replayed, and the other runs


def test_a_new_lambda_of_the_same_code_is_replayed() -> None:
    made = private(classifier())
    replays = []
    for inputs, labels in made.loader:
        made.step((inputs, labels), lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none"))
        replays.append(made.trainer.replays)
    assert all(replays[1:])
