"""A trainer is held to micro-batches by what it asks losses of, however it comes by them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dpbench import StandardTrainer, Workload, phase
from dpbench.child.build import smoke_test
from dpbench.child.case import run_case
from dpbench.core.case import Case
from dpbench.core.errors import ConfigurationError
from dpbench.core.registry import resolve
from dpbench.instruments.logical.logical import Logical
from dpbench.instruments.timing import TimingRecorder
from dpbench.training.base import Batch
from tests.named import target


class OwnLoss(StandardTrainer):
    """Asks no helper for its loss; ``divided`` says into what it divides a batch."""

    def divided(self, batch: Batch) -> list[Batch]:
        return [batch]

    def loss_of(self, batch: Batch) -> Tensor:
        return self.workload.losses(self.model, batch).mean()

    def train_step(self, batch: Batch) -> Tensor:
        for part in self.divided(batch):
            with phase("forward"):
                loss = self.loss_of(part)
            with phase("backward"):
                loss.backward()
        with phase("optimizer"):
            self.plain_optimizer.step()
            self.plain_optimizer.zero_grad()
        return loss.detach()


class Halves(OwnLoss):
    """Divides every batch by itself."""

    def divided(self, batch: Batch) -> list[Batch]:
        size = len(batch[0]) // 2
        return [tuple(t[half::2][:size] for t in batch) for half in (0, 1)]


class OneByOne(StandardTrainer):
    """Divides further than it is told to, with the usual helper."""

    def train_step(self, batch: Batch) -> Tensor:
        for example in range(self.batch_size):
            loss = self.mean_loss(self.model, tuple(t[example : example + 1] for t in batch))
            loss.backward()
        self.plain_optimizer.step()
        return loss.detach()


class Helper(StandardTrainer):
    """Asks the usual helper for the loss of a whole batch."""

    def train_step(self, batch: Batch) -> Tensor:
        return self.mean_loss(self.model, batch).detach()


class LooksFirst(OwnLoss):
    """Looks at a part of a batch before it trains all of it."""

    def divided(self, batch: Batch) -> list[Batch]:
        with torch.no_grad():
            self.loss_of(tuple(t[:1] for t in batch))
        return [batch]


class OneHalf(Halves):
    """Trains one half of a batch alone."""

    def divided(self, batch: Batch) -> list[Batch]:
        return super().divided(batch)[:1]


class Mapped(OwnLoss):
    """Maps a loss over all examples, of which each call sees one."""

    def loss_of(self, batch: Batch) -> Tensor:
        def loss(*example: Tensor) -> Tensor:
            return self.workload.losses(self.model, tuple(t[None] for t in example))[0]

        return torch.func.vmap(loss)(*batch).mean()


class MappedHalves(Mapped, Halves):
    """Maps over half of them."""


class Again(OwnLoss):
    """Runs the whole model again in backward."""

    def loss_of(self, batch: Batch) -> Tensor:
        model = partial(checkpoint, self.model, use_reentrant=False)
        return self.workload.losses(model, batch).mean()


class AgainInHalves(Again, Halves):
    pass


class Compiled(OwnLoss):
    """Compiles its model."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.compiled = torch.compile(self.model, backend="eager")

    def loss_of(self, batch: Batch) -> Tensor:
        return self.workload.losses(self.compiled, batch).mean()


class CompiledHalves(Compiled, Halves):
    pass


class AroundTheModel(OwnLoss):
    """Runs a model without calling it."""

    def loss_of(self, batch: Batch) -> Tensor:
        return self.workload.losses(self.model.forward, batch).mean()


class WithoutWorkload(OwnLoss):
    """Has a loss of its own."""

    def loss_of(self, batch: Batch) -> Tensor:
        return self.model(batch[0]).square().mean()


class Images(Workload):
    """Pictures and classes."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(12, 3))

    def batches(self, batch_size: int) -> list[Batch]:
        return [(torch.randn(batch_size, 3, 4), torch.zeros(batch_size, dtype=torch.long))]

    def losses(self, model: Callable[..., Tensor], batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


class Folded(Images):
    """Examples and positions are one dimension for the model."""

    def model(self) -> nn.Module:
        return nn.Linear(4, 3)

    def losses(self, model: Callable[..., Tensor], batch: Batch) -> Tensor:
        x = batch[0]
        return model(x.flatten(0, 1)).reshape(len(x), -1).square().mean(1)


class TimeFirst(Folded):
    """The examples are the second dimension."""

    def losses(self, model: Callable[..., Tensor], batch: Batch) -> Tensor:
        return model(batch[0].transpose(0, 1)).square().mean((0, 2))


class Pairs(Folded):
    """Two calls for each example, the second with more than the first; by keyword."""

    def losses(self, model: Callable[..., Tensor], batch: Batch) -> Tensor:
        x = batch[0]
        one, others = model(input=x[:, 0]), model(input=x.flatten(0, 1))
        return (others.reshape(len(x), -1).sum(1) - one.sum(1)).square()


class Parts(Folded):
    """Calls layers of its model, and never the model."""

    def model(self) -> nn.Module:
        return nn.ModuleDict({"encode": nn.Linear(4, 3), "decode": nn.Linear(3, 4)})

    def losses(self, model: Any, batch: Batch) -> Tensor:
        return (model["decode"](model["encode"](batch[0])) - batch[0]).square().mean((1, 2))


class ConstantFirst(Folded):
    """The layer that is called first sees the same for any number of examples."""

    def model(self) -> nn.Module:
        return nn.ModuleDict({"place": nn.Embedding(3, 4), "head": nn.Linear(4, 3)})

    def losses(self, model: Any, batch: Batch) -> Tensor:
        places = model["place"](torch.arange(3, device=batch[0].device))
        return model["head"](batch[0] + places).square().mean((1, 2))


class NoLayer(Folded):
    """Calls nothing."""

    def losses(self, model: Any, batch: Batch) -> Tensor:
        return (batch[0] @ model.weight.T).square().mean((1, 2))


def case_of(trainer: type, workload: type = Images) -> Case:
    return resolve(Case(target(trainer), 4, workload=target(workload), micro_batches=2))


WORKLOADS = (Images, Folded, TimeFirst, Pairs, Parts)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_who_ignores_micro_batches_is_refused_whatever_is_trained(workload: type) -> None:
    with pytest.raises(ConfigurationError, match="computes more examples than a micro-batch has"):
        smoke_test(case_of(OwnLoss, workload))


@pytest.mark.parametrize("workload", WORKLOADS)
def test_who_divides_is_not(workload: type) -> None:
    for trainer in (StandardTrainer, Halves):
        smoke_test(case_of(trainer, workload))


@pytest.mark.parametrize("workload", WORKLOADS)
def test_who_leaves_a_part_out_is_refused(workload: type) -> None:
    with pytest.raises(ConfigurationError, match="compute fewer examples than the batch has"):
        smoke_test(case_of(OneHalf, workload))


@pytest.mark.parametrize("trainer", [Helper, LooksFirst, Mapped, Again, Compiled, AroundTheModel])
def test_no_way_to_call_a_model_hides_that_it_sees_the_whole_batch(trainer: type) -> None:
    with pytest.raises(
        ConfigurationError,
        match=rf"^{trainer.__name__} with micro_batches=2: one forward computes more",
    ):
        smoke_test(case_of(trainer))


@pytest.mark.parametrize("trainer", [OneByOne, MappedHalves, AgainInHalves, CompiledHalves])
def test_every_way_to_divide_is_right(trainer: type) -> None:
    smoke_test(case_of(trainer))


def timed(case: Case) -> object:
    return run_case(case, TimingRecorder(1), device="cpu", warmup=0, active=1)


@pytest.mark.parametrize("how", [Logical().count, timed])
@pytest.mark.usefixtures("capsys")
def test_each_instrument_refuses_before_it_says_a_number(how: Callable[[Case], object]) -> None:
    with pytest.raises(ConfigurationError, match="computes more examples than a micro-batch has"):
        how(case_of(OwnLoss))


@pytest.mark.parametrize("workload", [ConstantFirst, NoLayer])
def test_what_layers_see_does_not_matter(workload: type) -> None:
    smoke_test(case_of(StandardTrainer, workload))
    with pytest.raises(ConfigurationError, match="computes more examples than a micro-batch has"):
        smoke_test(case_of(OwnLoss, workload))


def test_who_asks_the_workload_for_no_loss_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"a step never calls Images\.losses, so the examples"
    ):
        smoke_test(case_of(WithoutWorkload))


def test_looking_moves_no_byte() -> None:
    """The rows of a case are those of the same steps that nobody looks at."""
    counted = Logical().count(case_of(Halves))
    whole = Logical().count(resolve(Case(target(Halves), 4, workload=target(Images))))
    assert counted.rows[0].value > 0
    assert [row.value for row in counted.rows] == [row.value for row in whole.rows]
