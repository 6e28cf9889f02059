"""An example whose gradient is not finite counts as zero, and changes nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpbench import TRAINERS, Workload
from dpbench.training.base import Batch
from dpbench.training.kernels import without_dropped
from dpbench.workloads.transformer import Transformer

OURS = ("fused", "fused:graphs=false,kernels=false", "micro_batch")


class Shifted(nn.Module):
    """A layer norm and a parameter of its own, which needs a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.shift = nn.LayerNorm(8), nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) + self.shift


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.mT).mT


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x).tanh())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 40), nn.Linear(40, 8)),
    "of one layer": lambda: nn.Linear(8, 8, bias=False),
    "norm": lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)),
    "convolution": lambda: nn.Sequential(Convolved(), nn.GELU(), nn.Linear(8, 8)),
    "unit": lambda: nn.Sequential(nn.Linear(8, 8), Shifted()),
    "tied": Tied,
}


class Weighted(Workload):
    """The loss is the sum of outputs × weights."""

    def model(self) -> nn.Module:
        return nn.Linear(8, 8)

    def batches(self, batch_size: int) -> Iterator[Batch]:
        yield torch.randn(batch_size, 5, 8), torch.randn(batch_size, 5, 8)

    def losses(self, model: Any, batch: Batch) -> Tensor:
        losses: Tensor = (model(batch[0]) * batch[1]).flatten(1).sum(1)
        return losses


def trainer_of(name: str, model: nn.Module, **options: Any) -> Any:
    usual = {"batch_size": 4, "workload": Weighted(), "noise_multiplier": 0.0}
    return TRAINERS[name](model, **usual | options)


def moved(name: str, kind: str, batch: Batch, **options: Any) -> tuple[Tensor, Any, Tensor]:
    """What a step adds to the parameters, its trainer, and the loss."""
    torch.manual_seed(0)
    model = MODELS[kind]().to(batch[0].dtype)
    trainer = trainer_of(name, model, learning_rate=100.0, max_grad_norm=0.1, **options)
    before = [p.detach().clone() for p in trainer.trained]
    loss = trainer.train_step(batch)
    pairs = zip(trainer.trained, before, strict=True)
    return torch.cat([(p.detach() - b).flatten() for p, b in pairs]), trainer, loss


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("trainer", OURS)
def test_the_update_is_that_of_the_other_examples(trainer: str, kind: str, wrong: float) -> None:
    torch.manual_seed(1)
    [batch] = Weighted().batches(4)
    without = [each.clone() for each in batch]
    without[1][2] = 0  # its gradient is zero
    expected, _, _ = moved(trainer, kind, without)
    for which, dtype in ((0, torch.float32), (1, torch.float32), (1, torch.bfloat16)):
        spoilt = [each.clone().to(dtype) for each in batch]
        spoilt[which][2, 1, 3] = wrong
        given = [each.clone() for each in spoilt]
        update, made, loss = moved(trainer, kind, spoilt, micro_batches=2)
        near = 1e-6 if dtype is torch.float32 else 0.03
        assert (update - expected).norm() <= near * expected.norm()
        assert int(made.dropped) == 1
        assert not (math.isnan(wrong) and loss.isfinite())
        assert all(map(torch.equal, map(torch.nan_to_num, given), map(torch.nan_to_num, spoilt)))
        made.train_step(batch if dtype is torch.float32 else [each.to(dtype) for each in batch])
        assert int(made.dropped) == 0


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("trainer", OURS)
def test_if_all_are_dropped_the_step_adds_noise_alone(trainer: str, optimizer: Any) -> None:
    model, options = nn.Linear(8, 8), {"noise_multiplier": 1.0, "optimizer": optimizer}
    made = trainer_of(trainer, model, **options)
    before = model.weight.detach().clone()
    made.train_step((torch.full((4, 5, 8), math.nan), torch.ones(4, 5, 8)))
    assert int(made.dropped) == 4
    assert model.weight.isfinite().all()
    assert (model.weight != before).all()


@pytest.mark.parametrize("trainer", OURS)
def test_a_token_of_an_embedding_may_be_part_of_a_dropped_example(trainer: str) -> None:
    """The loss of an example of a transformer is NaN, where another's has the same tokens."""

    class OneIsNaN(Transformer):
        loss = Workload.loss

        def losses(self, model: Any, batch: Batch) -> Tensor:
            (ids, labels), weights = batch[:2], batch[2]
            losses: Tensor = super().losses(model, (ids, labels)) * weights
            return losses

    def update(weight: float) -> Tensor:
        torch.manual_seed(0)
        workload = OneIsNaN(seq_len=8, model_size="50x16x2x2")
        model, batch = workload.model(), next(iter(workload.batches(4)))
        made = trainer_of(trainer, model, workload=workload, learning_rate=10.0)
        before = [p.detach().clone() for p in made.trained]
        weights = torch.ones(4)
        weights[1] = weight
        made.train_step((*batch, weights))
        assert int(made.dropped) == int(weight != 0)
        pairs = zip(made.trained, before, strict=True)
        return torch.cat([(p.detach() - b).flatten() for p, b in pairs])

    assert torch.allclose(update(0.0), update(math.nan), atol=1e-6)


def test_a_tensor_is_changed_in_place_only_where_that_is_possible() -> None:
    factors = torch.tensor([1.0, 0.0, 0.5])
    for tensor in (torch.ones(3, 2, 2), torch.ones(1, 2, 2).expand(3, -1, -1)):
        for in_place in (True, False):
            given = tensor.clone() if tensor.is_contiguous() else tensor
            cleared = without_dropped(given, factors, in_place=in_place)
            assert cleared.flatten(1).sum(1).tolist() == [4, 0, 4]
            changed = in_place and tensor.is_contiguous()
            assert given.flatten(1).sum(1).tolist() == [4, 4 * (not changed), 4]
    ids = torch.ones(3, 2, dtype=torch.int64)
    assert without_dropped(ids, factors, in_place=True) is ids


class Prompt(nn.Module):
    """Passes on its parameter, for one example without a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.ones(1, 3, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.prompt.expand(len(x), -1, -1)


class Prompted(Workload):
    """The loss is the sum of products of two layers' outputs, one of which read a parameter."""

    def model(self) -> nn.Module:
        return nn.ModuleList([Prompt(), nn.Linear(8, 2), nn.Linear(8, 2)])

    def batches(self, batch_size: int) -> list[Any]:
        return []

    def losses(self, model: Any, batch: Any) -> Tensor:
        prompt, one, other = model
        losses: Tensor = (one(prompt(batch)) * other(batch)).flatten(1).sum(1)
        return losses


@pytest.mark.parametrize("trainer", OURS)
def test_a_parameter_that_a_layer_passes_on_is_not_cleared(trainer: str) -> None:
    workload = Prompted()
    model = workload.model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    options = {"noise_multiplier": 0.0, "learning_rate": 1.0, "workload": workload}
    made = TRAINERS[trainer](model, batch_size=1, **options)
    made.train_step(torch.full((1, 3, 8), math.nan))
    assert int(made.dropped) == 1
    assert all(map(torch.equal, model.parameters(), before))
