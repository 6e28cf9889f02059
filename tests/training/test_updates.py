"""Updates merged with the noise are those of PyTorch's optimizers, and keep their state true."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from io import BytesIO
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpbench import TRAINERS, SimpleBigModel, get_random_dataloader
from dpbench.core.case import ModelSize
from dpbench.training.base import Batch
from dpbench.training.clipped_sums import Buffer, in_buffers, one_buffer
from dpbench.training.noise_stream import NoiseStream
from dpbench.training.noisy_updates import (
    MergedUpdate,
    Scalars,
    noisy_mean,
    noisy_update,
    update_shards,
)
from tests.training.test_noisy_updates import stream_of

SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW

Make = Callable[..., Any]
SLOW = pytest.mark.slow

MERGED: dict[str, Make] = {
    "sgd": SGD,
    "decay": partial(SGD, weight_decay=0.1),
    "maximize": partial(SGD, maximize=True, weight_decay=0.1),
    "momentum": partial(SGD, momentum=0.9),
    "dampening": partial(SGD, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "nesterov": partial(SGD, momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True),
    "adam": partial(Adam, eps=1e-4),
    "adam-decay": partial(Adam, weight_decay=0.1, betas=(0.5, 0.9), maximize=True, eps=1e-4),
    "adam-decoupled": partial(Adam, weight_decay=0.1, decoupled_weight_decay=True, eps=1e-4),
    "adamw": partial(AdamW, weight_decay=0.1, eps=1e-4),
    "adamw-fused": partial(AdamW, fused=True, eps=1e-4),
    "adamw-for-loop": partial(AdamW, foreach=False, maximize=True, eps=1e-4),
}

NOT_MERGED: dict[str, Make] = {
    "amsgrad": partial(AdamW, amsgrad=True, eps=1e-4),
    "lr": lambda parameters, lr: SGD(parameters, lr=torch.tensor(lr)),
    "rmsprop": partial(torch.optim.RMSprop, eps=1e-2),
    "adagrad": partial(torch.optim.Adagrad, eps=1e-2),
    "adadelta": torch.optim.Adadelta,
    "adamax": partial(torch.optim.Adamax, eps=1e-2),
    "nadam": partial(torch.optim.NAdam, eps=1e-2),
    "radam": partial(torch.optim.RAdam, eps=1e-2),
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
    "adafactor": torch.optim.Adafactor,
}

SHAPES = [(600, 500), (7, 5), (3,), ()]
"""The first has a buffer of its own."""


def generated(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Twins:
    """The same parameters under the same optimizer: ``ours`` merged, ``theirs`` by PyTorch."""

    def __init__(self, make: Make, dtype: torch.dtype = torch.float64, device: str = "cpu") -> None:
        self.ours, self.theirs = (
            [nn.Parameter(generated(n, shape, dtype).to(device)) for n, shape in enumerate(SHAPES)]
            for _ in range(2)
        )
        self.optimizer, self.reference = (make(each, lr=0.1) for each in (self.ours, self.theirs))
        self.sharing = in_buffers(self.ours, self.optimizer)
        self.merged = MergedUpdate(self.sharing)
        self.steps = 0

    @torch.no_grad()
    def step(self, deviation: float = 0.0, examples: int = 4) -> None:
        """A step of both, with the same sums of gradients and the same noise."""
        self.steps += 1
        updates = self.merged.updates(self.optimizer, deviation, examples)
        assert not isinstance(updates, str), updates
        stream = stream_of(self.steps, self.ours[0].device.type)
        for update, buffer in zip(updates, self.sums(), strict=True):
            update(buffer.flat, stream)
        for buffer in self.sums():
            noisy_mean(buffer.flat, stream, deviation, 1 / examples)
            for parameter, part in buffer.places.items():
                self.theirs[self.number(parameter)].grad = part
        self.reference.step()

    def number(self, parameter: Tensor) -> int:
        return next(n for n, each in enumerate(self.ours) if each is parameter)

    def sums(self) -> list[Buffer]:
        made = [one_buffer(each) for each in self.sharing]
        for flat, places, _ in made:
            flat.zero_()
            for parameter, place in places.items():
                seed = 100 * self.steps + self.number(parameter)
                place.copy_(generated(seed, tuple(place.shape), place.dtype))
        return made

    def check(self, **tolerance: Any) -> None:
        torch.testing.assert_close(self.ours, self.theirs, **tolerance)
        ours, theirs = (each.state_dict()["state"] for each in (self.optimizer, self.reference))
        kept = {n: {k: v for k, v in state.items() if v is not None} for n, state in theirs.items()}
        torch.testing.assert_close(ours, {n: s for n, s in kept.items() if s}, **tolerance)


@pytest.mark.parametrize("name", MERGED)
def test_several_steps_are_those_of_pytorch_after_the_same_noise(name: str) -> None:
    twins = Twins(MERGED[name])
    for rate in (0.1, 0.1, 0.03, 0.2):
        for optimizer in (twins.optimizer, twins.reference):
            optimizer.param_groups[0]["lr"] = rate
        twins.step(deviation=2.0)
    twins.check()


@pytest.mark.parametrize("name", ["sgd", "nesterov", "adamw"])
def test_at_bf16_the_state_has_the_type_of_the_parameters(name: str) -> None:
    twins = Twins(MERGED[name], torch.bfloat16)
    for _ in range(3):
        twins.step()
    for ours, theirs in zip(twins.ours, twins.theirs, strict=True):
        assert (ours - theirs).float().norm() < 0.02 * theirs.float().norm()
    for state in twins.optimizer.state.values():
        assert {each.dtype for key, each in state.items() if key != "step"} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["sgd", "dampening", "adam", "adamw-fused"])
def test_a_checkpoint_goes_on_in_both_directions(name: str) -> None:
    twins = Twins(MERGED[name])
    twins.step()
    twins.step()
    stream = BytesIO()
    torch.save([twins.optimizer.state_dict(), twins.reference.state_dict()], stream)
    stream.seek(0)
    ours, theirs = torch.load(stream)
    twins.step()
    before = [p.detach().clone() for p in twins.ours]
    twins.reference.load_state_dict(ours)
    twins.optimizer.load_state_dict(theirs)
    twins.step()
    twins.step()
    assert not all(map(torch.equal, before, twins.ours))
    twins.check()


@pytest.mark.parametrize("name", ["momentum", "dampening", "adam", "adamw-fused"])
def test_pytorch_may_take_steps_in_between(name: str) -> None:
    twins = Twins(MERGED[name])
    for own in (True, False, True, False, False):
        if own:
            for parameters, optimizer in (
                (twins.ours, twins.optimizer),
                (twins.theirs, twins.reference),
            ):
                for n, parameter in enumerate(parameters):
                    parameter.grad = generated(n, tuple(parameter.shape), parameter.dtype)
                optimizer.step()
        else:
            twins.step()
        twins.check()


@pytest.mark.parametrize("optimizer", [SGD, AdamW])
def test_groups_have_rates_and_decay_of_their_own(optimizer: Make) -> None:
    def make(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        matrices = [p for p in parameters if p.dim() > 1]
        rest = [p for p in parameters if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.3}, {"params": rest, "lr": 2 * lr}]
        made: torch.optim.Optimizer = optimizer(groups, lr=lr, weight_decay=0.0)
        return made

    twins = Twins(make)
    assert len(twins.sharing) == 3
    for _ in range(3):
        twins.step()
    twins.check()


def test_parameters_of_a_buffer_that_were_put_into_two_groups_are_not_merged() -> None:
    twins = Twins(MERGED["adamw"])
    moved = twins.optimizer.param_groups[0]["params"].pop()
    twins.optimizer.add_param_group({"params": [moved]})
    why = twins.merged.updates(twins.optimizer, 0.0, 1)
    assert why == "parameters were moved to other parameter groups"


def test_parameters_with_different_numbers_of_steps_are_not_merged() -> None:
    twins = Twins(MERGED["adamw"])
    twins.step()
    twins.optimizer.state[twins.ours[1]]["step"].add_(1)
    why = twins.merged.updates(twins.optimizer, 0.0, 1)
    assert why == "parameters of one group have taken different numbers of steps"


# --- in a trainer ---------------------------------------------------------------------------------


def made(trainer: str = "fused", **options: Any) -> Any:
    torch.manual_seed(0)
    model = SimpleBigModel(ModelSize(50, 16, 1, 2), max_seq_len=12)
    return TRAINERS[trainer](model, batch_size=6, **({"noise_multiplier": 0.0} | options))


def batches(number: int) -> list[Batch]:
    return list(get_random_dataloader(batch_size=6, seq_len=8, vocab_size=50))[:number]


def parameters(trainer: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("sgd", "adamw", "amsgrad", "rmsprop") else pytest.param(name, marks=SLOW)
        for name in (*MERGED, *NOT_MERGED)
    ],
)
def test_fused_trains_with_every_optimizer_as_it_does_without_merged_updates(name: str) -> None:
    options = {"optimizer": (MERGED | NOT_MERGED)[name], "learning_rate": 0.01}
    trainers = [made(each, **options) for each in ("fused", "fused:kernels=false")]
    where = trainers[0].labels["noise"]
    assert where == ("in the update" if name in MERGED else "in a phase of its own")
    start = parameters(trainers[0])
    for batch in batches(4):
        losses = [float(trainer.train_step(batch)) for trainer in trainers]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    ours, theirs = (parameters(trainer) - start for trainer in trainers)
    assert (ours - theirs).norm() < 2e-3 * theirs.norm()


@pytest.mark.parametrize("name", ["sgd", "adamw", "rmsprop"])
def test_a_scheduler_changes_the_rate_without_a_warning(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = made(optimizer=(MERGED | NOT_MERGED)[name])
        scheduler = torch.optim.lr_scheduler.StepLR(trainer.plain_optimizer, 1, gamma=0.0)
        values = [parameters(trainer)]
        for batch in batches(2):
            trainer.train_step(batch)
            scheduler.step()
            values.append(parameters(trainer))
    assert not torch.equal(values[0], values[1])
    assert torch.equal(values[1], values[2])


@pytest.mark.parametrize("name", ["sgd", "momentum", "adamw"])
def test_a_step_with_hooks_gets_the_noise_that_the_merged_one_draws(name: str) -> None:
    """So what is verified of gradients that hooks see holds for the merged step."""
    options: dict[str, Any] = {"optimizer": MERGED[name], "noise_multiplier": 3.0}
    options |= {"learning_rate": 0.01, "seed": 1}
    merged, own = (made(**options) for _ in range(2))
    seen = []
    own.plain_optimizer.register_step_pre_hook(lambda *_: seen.append(1))
    with pytest.warns(
        UserWarning, match="fused adds the noise in a pass before the update, because the step"
    ):
        own.train_step(batches(1)[0])
    merged.train_step(batches(1)[0])
    for batch in batches(3):
        own.train_step(batch)
        merged.train_step(batch)
    assert len(seen) == 4
    torch.testing.assert_close(parameters(merged), parameters(own), rtol=1e-5, atol=1e-5)


def test_why_a_step_is_not_merged_any_more_is_said_once() -> None:
    trainer = made(optimizer=MERGED["adamw"])
    trainer.train_step(batches(1)[0])
    trainer.plain_optimizer.param_groups[0]["amsgrad"] = True
    for state in trainer.plain_optimizer.state.values():
        state["max_exp_avg_sq"] = torch.zeros_like(state["exp_avg_sq"])
    with pytest.warns(UserWarning, match="because AdamW has amsgrad=True"):
        trainer.train_step(batches(1)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.train_step(batches(1)[0])


def test_shards_that_share_a_buffer_are_updated_like_one_tensor() -> None:
    sizes, lengths = [6, 4, 3], [6, 2, 0]  # this rank has fewer rows of the later parameters
    whole = [torch.randn(13), torch.randn(13), torch.rand(13)]
    gradient, stream = torch.randn(13), NoiseStream(1, torch.device("cpu"), 0).next_step()[0]
    cut = [[p[:n] for p, n in zip(t.split(sizes), lengths, strict=True)] for t in whole]
    shards = [[each.clone() for each in pieces] for pieces in cut]
    scalars = Scalars(0.5, 0.1, 0.01, beta1=0.9, alpha1=0.1, beta2=0.99, alpha2=0.01, eps=1e-8)
    noisy_update(whole[0], whole[1:], gradient, stream, "adam", scalars)
    update_shards(shards, sizes, gradient, stream, formula="adam", scalars=scalars)
    for pieces, expected in zip(shards, cut, strict=True):
        assert all(map(torch.equal, pieces, expected))
