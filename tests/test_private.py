"""`make_private` trains as the loop over examples does, in both of its loops, or says why not."""

from __future__ import annotations

import copy
import io
import math
import multiprocessing
import pickle
import subprocess
import sys
from collections import UserDict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus import GradSampleModule, PrivacyEngine
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from dpbench import Private, make_private
from dpbench.core.case import Case
from dpbench.core.errors import ConfigurationError
from dpbench.core.registry import resolve
from dpbench.instruments.logical.one_rank import fake_process_group
from dpbench.launch.ranks import on_all_ranks
from dpbench.training.graphs import values_of
from dpbench.training.poisson import PoissonSampler
from tests.verify.test_trainers import SETTINGS, everywhere, on_the_model

WIDTH, CLASSES, EXAMPLES, BATCH, C = 5, 3, 40, 4, 0.3


def classifier(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), *more, nn.Linear(8, CLASSES))


def examples(number: int = EXAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(number) % CLASSES
    return TensorDataset(torch.randn(number, WIDTH, generator=generator), labels)


def losses(model: Any, batch: Any) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="none")


def private(model: nn.Module | None = None, optimizer: Any = None, **options: Any) -> Private:
    model = model or classifier()
    if not isinstance(optimizer, torch.optim.Optimizer):
        make = optimizer or partial(torch.optim.SGD, lr=0.5)
        optimizer = make([p for p in model.parameters() if p.requires_grad])
    given = {"batch_size": BATCH, "max_grad_norm": C, "noise_multiplier": 0.0, "seed": 1}
    dataset = options.pop("dataset", None) or examples()
    return make_private(model, optimizer, dataset, **given | options)


def by_step(made: Private, batch: Any) -> None:
    made.step(batch, losses)


def by_loop(made: Private, batch: Any, reduction: str = "mean") -> None:
    loss = getattr(losses(made.model, batch), reduction)()
    made.optimizer.zero_grad()
    loss.backward()
    made.optimizer.step()


def by_parts(made: Private, batch: Any) -> None:
    for part in made.parts(batch):
        losses(made.model, part).mean().backward()
    made.optimizer.step()
    made.optimizer.zero_grad()


WAYS = {"step": by_step, "loop": by_loop, "parts": by_parts}
Way = Callable[[Private, Any], None]


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    found: Way = request.param
    return found


@pytest.fixture(params=[by_step, by_loop], ids=["step", "loop"])
def loop(request: pytest.FixtureRequest) -> Way:
    found: Way = request.param
    return found


def one_after_another(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any], losses: Any = losses
) -> None:
    """The steps of a loop over examples, without noise."""
    trained = [p for p in model.parameters() if p.requires_grad]
    for batch in batches:
        sums = [torch.zeros_like(p) for p in trained]
        for n in range(len(batch[0])):
            loss = losses(model, [each[n : n + 1] for each in batch])[0]
            gradients = torch.autograd.grad(loss, trained)
            norm = torch.stack([each.norm() for each in gradients]).norm()
            for total, each in zip(sums, gradients, strict=True):
                total += each * (C / norm).clamp(max=1)
        for parameter, total in zip(trained, sums, strict=True):
            parameter.grad = total / BATCH
        optimizer.step()


def waits_for(made: Private, examples: int) -> None:
    """Let a step be taken with a batch of this size that is not the loader's."""
    made._sampler.unused.append(examples)


def values(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def trained(made: Private, way: Way, epochs: int = 1) -> list[Any]:
    batches = []
    for _ in range(epochs):
        for batch in made.loader:
            way(made, batch)
            batches.append(batch)
    return batches


# --- the same as the loop over examples ----------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer",
    [
        *(partial(torch.optim.SGD, lr=0.5, momentum=m, weight_decay=0.1) for m in (0.0, 0.9)),
        partial(torch.optim.AdamW, lr=0.01),
        partial(torch.optim.Adam, lr=0.01, amsgrad=True),
        *(
            getattr(torch.optim, name)
            for name in ("Adadelta", "Adafactor", "Adagrad", "Adamax", "ASGD")
        ),
        *(getattr(torch.optim, name) for name in ("NAdam", "RAdam", "RMSprop", "Rprop")),
    ],
    ids=str,
)
def test_any_optimizer_trains_as_a_loop_over_examples(optimizer: Any, way: Way) -> None:
    made = private(optimizer=optimizer, physical_batch_size=3)
    batches = trained(made, way)
    assert {0, BATCH} & {len(batch[0]) for batch in batches}
    expected = classifier()
    one_after_another(expected, optimizer(expected.parameters()), batches)
    torch.testing.assert_close(values(made.model), values(expected), atol=1e-5, rtol=1e-4)
    assert made.steps == len(batches) == EXAMPLES // BATCH


def test_a_loss_may_be_the_sum_over_examples() -> None:
    made = private(loss_reduction="sum")
    batches = trained(made, partial(by_loop, reduction="sum"))
    expected = classifier()
    one_after_another(expected, torch.optim.SGD(expected.parameters(), lr=0.5), batches)
    torch.testing.assert_close(values(made.model), values(expected), atol=1e-5, rtol=1e-4)


def test_a_batch_of_one_expected_example_may_have_several(way: Way) -> None:
    made = private(batch_size=1)
    batches = trained(made, way)
    assert max(len(batch[0]) for batch in batches) > 1
    expected = classifier()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.5 * BATCH)
    one_after_another(expected, optimizer, batches)
    torch.testing.assert_close(values(made.model), values(expected), atol=1e-5, rtol=1e-4)


def test_groups_and_frozen_parameters_stay_as_the_optimizer_has_them(way: Way) -> None:
    def made_of(model: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        model[0].bias.requires_grad_(False)
        groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}]
        return model, torch.optim.SGD(groups, lr=0.5)

    model, optimizer = made_of(classifier())
    frozen = model[0].bias.clone()
    made = private(model, optimizer)
    batches = trained(made, way)
    expected = made_of(classifier())
    one_after_another(*expected, batches)
    torch.testing.assert_close(values(model), values(expected[0]), atol=1e-5, rtol=1e-4)
    assert torch.equal(model[0].bias, frozen)


@pytest.mark.parametrize("name", ["private", "own"])
def test_schedulers_may_be_given_either_optimizer(
    name: str, way: Way, recwarn: pytest.WarningsRecorder
) -> None:
    def steps(optimizer: torch.optim.Optimizer, scheduled: Any, step: Any) -> None:
        scheduler = torch.optim.lr_scheduler.StepLR(scheduled, 1, gamma=0.5)
        for number in range(EXAMPLES // BATCH):
            step(number)
            scheduler.step()

    own = torch.optim.RMSprop((model := classifier()).parameters(), lr=0.1)
    made = private(model, own)
    batches = [*made.loader]
    scheduled = made.optimizer if name == "private" else own
    steps(own, scheduled, lambda n: way(made, batches[n]))
    expected = classifier()
    optimizer = torch.optim.RMSprop(expected.parameters(), lr=0.1)
    steps(optimizer, optimizer, lambda n: one_after_another(expected, optimizer, [batches[n]]))
    torch.testing.assert_close(values(model), values(expected), atol=1e-5, rtol=1e-4)
    assert not [each for each in recwarn if "lr_scheduler" in str(each.message)]


def test_an_empty_batch_gets_noise_and_no_gradient(way: Way) -> None:
    made = private(noise_multiplier=1.0)
    before = values(made.model)
    waits_for(made, 0)
    way(made, (torch.empty(0, WIDTH), torch.empty(0, dtype=torch.long)))
    moved = (values(made.model) - before).div(0.5 * C / BATCH)
    assert moved.isfinite().all()
    assert 0.7 < moved.std() < 1.3
    assert made.steps == 1


def test_the_loss_of_an_empty_batch_is_nan() -> None:
    made = private()
    waits_for(made, 0)
    empty = torch.empty(0, WIDTH), torch.empty(0, dtype=torch.long)
    assert math.isnan(made.step(empty, losses))


@pytest.mark.parametrize("before", ["step", "loop"])
def test_both_loops_may_take_turns(before: str) -> None:
    made, other = private(), private()
    for number, batch in enumerate(made.loader):
        WAYS["step" if number % 2 else before](made, batch)
    trained(other, by_step)
    torch.testing.assert_close(values(made.model), values(other.model), atol=1e-5, rtol=1e-4)


AXES = [axes | {"trainer": name} for axes in SETTINGS for name in ("ByStep", "ByLoop")]


@pytest.mark.slow
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_verify_passes_it_as_a_trainer(axes: dict[str, Any]) -> None:
    axes = {**axes}
    assert not everywhere(f"tests.private_trainers:{axes.pop('trainer')}", **axes)


@pytest.mark.parametrize("name", ["ByStep", "ByLoop"])
def test_verify_passes_it_on_a_small_model(name: str) -> None:
    checks = on_the_model(f"tests.private_trainers:{name}")
    assert all(check.passed for check in checks), [check.wrong for check in checks]


# --- the usual loop ------------------------------------------------------------------------------


def first_batch(made: Private) -> Any:
    batch = next(batch for batch in made.loader if len(batch[0]) > 1)
    made._sampler.unused = [len(batch[0])]
    return batch


ORDERS = {
    "forward, zero_grad, backward, step": "fzbs",
    "zero_grad, forward, backward, step": "zfbs",
    "forward, backward, step, zero_grad": "fbsz",
    "zero_grad everywhere": "zfzbsz",
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_gradients_may_be_cleared_in_the_usual_places(order: str) -> None:
    made, other = private(), private()
    for batch in made.loader:
        loss = torch.zeros(())
        for each in order:
            if each == "f":
                loss = losses(made.model, batch).mean()
            elif each == "b":
                loss.backward()
            else:
                {"z": made.optimizer.zero_grad, "s": made.optimizer.step}[each]()
    trained(other, by_step)
    torch.testing.assert_close(values(made.model), values(other.model), atol=1e-5, rtol=1e-4)


NEEDS = r"needs a forward of the model in training mode, and one backward"
WRONG_ORDERS = {
    "s": NEEDS,
    "fs": NEEDS,
    "fbss": NEEDS,
    "fbzs": NEEDS,
    "efbs": NEEDS,
    "gfbs": NEEDS,
    "fbb": "backward ran twice for one forward",
    "fbsb": "given up because .* a step was taken",
    "fbf": "ran again after a backward",
    "fbo": "trains privately now: call private.optimizer.step",
    "o": "trains privately now",
}


@pytest.mark.parametrize("order", WRONG_ORDERS)
def test_a_wrong_order_is_an_error_by_name(order: str) -> None:
    own = torch.optim.SGD((model := classifier()).parameters(), lr=0.5)
    made = private(model, own)
    batch, loss = first_batch(made), torch.zeros((), requires_grad=True)
    before = values(model)
    calls = {
        "b": lambda: loss.backward(retain_graph=True),
        "e": model.eval,
        "g": lambda: setattr(made, "model", lambda x: torch.no_grad()(model)(x).requires_grad_()),
        "z": made.optimizer.zero_grad,
        "s": made.optimizer.step,
        "o": own.step,
    }

    def run() -> None:
        nonlocal loss
        for each in order:
            if each == "f":
                loss = losses(made.model, batch).mean()
            else:
                calls[each]()

    with pytest.raises(ConfigurationError, match=WRONG_ORDERS[order]):
        run()
    if "s" not in order[:-1]:
        assert torch.equal(values(model), before)


def test_a_step_after_an_error_is_right_again() -> None:
    made, other = private(), private()
    made.model(torch.randn(9, WIDTH))
    batches = [batch for batch in made.loader if len(batch[0])]
    with pytest.raises(ConfigurationError):
        made.optimizer.step()
    losses(made.model, batches[1]).mean().backward()
    made.optimizer.zero_grad()  # gives the batch up
    losses(made.model, batches[2])  # is given up by the next forward
    for each in (made, other):
        each._sampler.unused = [len(batches[0][0])]
    by_loop(made, batches[0])
    by_step(other, batches[0])
    torch.testing.assert_close(values(made.model), values(other.model), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_losses_of_two_forwards_are_an_error_in_backward(checkpoints: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = classifier()

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.inner, x.requires_grad_(), use_reentrant=True)

    made = private(Checkpointed() if checkpoints else None)
    one, two = [batch for batch in made.loader if len(batch[0])][:2]
    first = losses(made.model, one).mean()
    both = first + losses(made.model, two).mean()
    with pytest.raises(ConfigurationError, match="given up because the model ran again"):
        both.backward()


def test_the_model_may_be_evaluated_and_generate_between_forward_and_backward(way: Way) -> None:
    made, other = private(), private()

    def evaluated(model: nn.Module) -> Any:
        def run(x: Tensor) -> Tensor:
            returned: Tensor = model(x)
            with torch.no_grad():
                model(torch.randn(7, WIDTH))
                model.eval()
                model(torch.randn(1, WIDTH))
                model.train()
            return returned

        return run

    for batch in made.loader:
        loss = losses(evaluated(made.model), batch).mean()
        loss.backward()
        made.optimizer.step()
    trained(other, way)
    torch.testing.assert_close(values(made.model), values(other.model), atol=1e-5, rtol=1e-4)


def test_parts_must_all_be_trained() -> None:
    made = private(physical_batch_size=1)
    for part in made.parts(first_batch(made)):
        losses(made.model, part).mean().backward()
        with pytest.raises(ConfigurationError, match="has more parts"):
            made.optimizer.step()
        break
    with pytest.raises(ConfigurationError, match="needs a forward"):
        for _ in made.parts(first_batch(made)):
            pass


def test_few_batches_have_more_than_one_part() -> None:
    made = private(dataset=examples(2000), batch_size=50)
    sizes = [len(each) for _ in range(10) for each in made._sampler]
    divided = [size for size in sizes if size > made.trainer.part_size]
    assert len(sizes) == 400
    assert len(divided) < 20 < sum(size > 50 for size in sizes)


# --- randomness ----------------------------------------------------------------------------------


def noise_of(made: Private) -> Tensor:
    before = values(made.model)
    waits_for(made, 0)
    made.step((torch.empty(0, WIDTH), torch.empty(0, dtype=torch.long)), losses)
    return values(made.model) - before


NOISY = {"noise_multiplier": 1.0}


def test_a_seed_repeats_batches_and_noise() -> None:
    def of(seed: int | None) -> list[Tensor]:
        made = private(seed=seed, **NOISY)
        return [torch.cat([x for x, _ in made.loader]), noise_of(made), noise_of(made)]

    assert all(map(torch.equal, of(3), of(3)))
    assert not any(map(torch.equal, of(3), of(4)))
    assert not any(map(torch.equal, of(None), of(None)))
    assert not torch.equal(*of(3)[1:])


def test_torch_s_seed_decides_neither_batches_nor_noise() -> None:
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(private(seed=None, **NOISY))
    assert not torch.equal(noise_of(made[0]), noise_of(made[1]))
    assert made[0]._sampler._batch(1) != made[1]._sampler._batch(1)


def test_no_key_is_saved_or_copied() -> None:
    made = private(seed=None, optimizer=torch.optim.AdamW, **NOISY)
    trained(made, by_loop)
    file = io.BytesIO()
    torch.save([made.state_dict(), made.optimizer.state_dict(), made.model], file)
    stream, sampler = made.trainer.stream.rows[0, :4], made._sampler._key
    for key in (stream.numpy().tobytes(), sampler.numpy().tobytes()):
        assert len(key) == 32
        assert not any(key[n : n + 8] in file.getvalue() for n in range(0, 32, 8))
    for secret in (made, made.optimizer, made._sampler):
        with pytest.raises(TypeError, match="cannot be copied"):
            pickle.dumps(secret)


@pytest.mark.parametrize("seed", [None, 3])
def test_a_resumed_run_draws_no_noise_twice(seed: int | None) -> None:
    made = private(seed=seed, **NOISY)
    drawn = [noise_of(made) for _ in range(3)]
    state = copy.deepcopy(made.state_dict())
    drawn += [noise_of(made) for _ in range(3)]
    made.load_state_dict(state)  # back to an earlier step, in the same process
    drawn += [noise_of(made) for _ in range(3)]
    for n, one in enumerate(drawn):
        assert not any(torch.allclose(one, other, atol=1e-4) for other in drawn[:n])
    resumed = private(seed=seed, **NOISY)
    resumed.load_state_dict(state)
    again = noise_of(resumed)
    assert torch.allclose(again, drawn[3], atol=1e-6) == (seed is not None)
    assert not any(torch.allclose(again, other, atol=1e-4) for other in drawn[:3])


def key_of_a_process(_: int) -> bytes:
    torch.manual_seed(0)
    made = private(seed=None)
    return pickle.dumps([made._sampler._key.tolist(), made.trainer.stream.rows.tolist()])


def test_two_processes_without_a_seed_differ() -> None:
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        one, two = pool.map(key_of_a_process, range(2))
    assert one != two


def test_batches_are_poisson_and_independent() -> None:
    number, batches, rate = 50, 10_000, 5 / 50
    sampler = PoissonSampler(number, 5, seed=0)
    places = torch.arange(7).repeat(batches)
    chosen = sampler._chosen(places, torch.arange(1, batches + 1).repeat_interleave(7))
    chosen = chosen.view(batches, 56)[:, :number].float()
    assert sampler._batch(9) == chosen[8].nonzero().flatten().tolist()
    deviation = math.sqrt(rate * (1 - rate))
    # Each example is drawn as often as others, and the counts have the binomial's deviation.
    often = (chosen.mean(0) - rate) / deviation * math.sqrt(batches)
    assert often.abs().max() < 4.5
    counts = chosen.sum(1)
    assert abs(counts.var() / (number * rate * (1 - rate)) - 1) < 0.06
    assert len({*counts.tolist()}) > 8
    # Neither two examples of a batch, nor an example in two batches, have to do with each other.
    centred = (chosen - rate) / deviation
    alike = centred.T @ centred / math.sqrt(batches)
    alike.fill_diagonal_(0)
    assert alike.abs().max() < 5.5
    for distance in (1, 2, 8):
        correlation = (centred[:-distance] * centred[distance:]).mean()
        assert abs(correlation) * math.sqrt(batches * number) < 4.5


def test_all_examples_are_drawn_at_rate_1() -> None:
    assert PoissonSampler(1000, 1000, seed=0)._batch(1) == [*range(1000)]


@pytest.mark.parametrize("number", [651, 93, 100])
def test_an_epoch_has_as_many_steps_as_batches_fit(number: int) -> None:
    # int(1 / rate) would be one less where 1 / rate is rounded down.
    assert len(private(dataset=examples(number), batch_size=1).loader) == number


# --- ε -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accountant", ["prv", "rdp", "gdp"])
def test_epsilon_is_that_of_opacus(accountant: str, recwarn: pytest.WarningsRecorder) -> None:
    made = private(accountant=accountant, noise_multiplier=1.1)
    engine = PrivacyEngine(accountant=accountant)
    model = classifier()
    wrapped, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(examples(), batch_size=BATCH),
        noise_multiplier=1.1,
        max_grad_norm=C,
    )
    assert len(loader) == len(made.loader)
    assert made.epsilon(1e-5) == 0
    for batch in made.loader:
        by_loop(made, batch)
    for batch in [*examples(EXAMPLES // BATCH)]:
        losses(wrapped, (batch[0][None], batch[1][None])).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert made.epsilon(1e-5) == engine.get_epsilon(1e-5) > 0


def test_epsilon_counts_the_noise_that_is_drawn() -> None:
    made = private(noise_multiplier=1.0)
    for sigma in (2.0, 3.0):
        made.trainer.noise_multiplier = sigma
        by_step(made, next(iter(made.loader)))
    assert [sigma for sigma, _, _ in made.accountant.history] == [2, 3]
    for name in ("noise_multiplier", "sample_rate"):
        with pytest.raises(AttributeError):
            setattr(made, name, 0.01)


def test_epsilon_without_noise_is_infinite() -> None:
    made = private()
    trained(made, by_step)
    assert made.epsilon(1e-5) == math.inf
    with pytest.raises(ConfigurationError, match="delta is 0, and must be between 0 and 1"):
        made.epsilon(0)


@pytest.mark.parametrize("accountant", ["rdp", "gdp"])
def test_a_target_is_reached_and_not_exceeded(accountant: str) -> None:
    target = {"target_epsilon": 3.0, "target_delta": 1e-5, "epochs": 2}
    made = private(noise_multiplier=None, accountant=accountant, **target)
    trained(made, by_step, epochs=2)
    assert 2.9 < made.epsilon(1e-5) <= 3.0


# --- checkpoints and copies ----------------------------------------------------------------------


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(loop: Way) -> None:
    options: Any = {"optimizer": partial(torch.optim.AdamW, lr=0.01), "noise_multiplier": 0.8}
    made = private(**options)
    trained(made, loop)
    file = io.BytesIO()
    torch.save({"model": made.model.state_dict(), "private": made.optimizer.state_dict()}, file)
    trained(made, loop)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    resumed = private(**options)
    resumed.model.load_state_dict(state["model"])
    resumed.optimizer.load_state_dict(state["private"])
    before = resumed.epsilon(1e-5)
    assert before > 0
    trained(resumed, loop)
    torch.testing.assert_close(values(made.model), values(resumed.model), atol=1e-6, rtol=1e-5)
    assert made.epsilon(1e-5) == resumed.epsilon(1e-5) > before
    assert made.steps == resumed.steps == 20


def test_a_state_does_not_change_with_later_steps() -> None:
    made = private(**NOISY)
    trained(made, by_step)
    state = made.state_dict()
    made.load_state_dict(state)
    trained(made, by_step)
    assert state["private"]["accountant"]["history"] == [(1.0, 0.1, 10)]
    assert state["private"]["steps"] == 10


def test_a_state_without_private_steps_is_refused() -> None:
    made = private()
    with pytest.raises(ConfigurationError, match="no private steps: it must be of private"):
        made.load_state_dict(torch.optim.SGD(made.model.parameters(), lr=1.0).state_dict())


def copied(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("copies", [copy.deepcopy, copied, torch.optim.swa_utils.AveragedModel])
def test_a_copy_is_a_plain_model_that_trains_alone(copies: Any, loop: Way) -> None:
    made = private()
    batches = trained(made, loop)
    before = values(made.model)
    other = copies(made.model)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.5)
    batch = next(each for each in batches if len(each[0]))
    for _ in range(2):  # two backwards, and no step of `made`
        losses(other, batch).mean().backward()
    assert all(p.grad is not None for p in other.parameters())
    optimizer.step()
    assert not torch.equal(values(other), before)
    assert torch.equal(values(made.model), before)
    trained(made, loop)


def test_a_moving_average_follows_the_model(loop: Way) -> None:
    made = private()
    average = torch.optim.swa_utils.AveragedModel(made.model)
    for batch in made.loader:
        loop(made, batch)
        average.update_parameters(made.model)
    assert not torch.equal(values(average.module), values(made.model))


# --- refused by name -----------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from examples()

    def __len__(self) -> int:
        return EXAMPLES


REFUSED_ARGUMENTS: dict[str, dict[str, Any]] = {
    "batch_size is 41, and must be at least 1 and at most the number of examples, 40": {
        "batch_size": 41
    },
    "batch_size is 0": {"batch_size": 0},
    "batch_size is 2.5": {"batch_size": 2.5},
    "physical_batch_size is 0": {"physical_batch_size": 0},
    "loss_reduction is 'none', and must be mean or sum": {"loss_reduction": "none"},
    "unknown argument of make_private 'clipping'": {"clipping": "per_layer"},
    "'max_grad_nrom'; .* did you mean max_grad_norm?": {
        "max_grad_norm": None,
        "max_grad_nrom": 1.0,
    },
    "dataset with batch_size for its data_loader=": {
        "dataset": DataLoader(TensorDataset(torch.zeros(40, 6)))
    },
    "got a Stream": {"dataset": Stream()},
    "got a generator": {"dataset": (each for each in "ab")},
    "got a list": {"dataset": SimpleNamespace},
    "give noise_multiplier, or all of": {"target_epsilon": 1.0},
    "give noise_multiplier, or all": {"noise_multiplier": None, "target_epsilon": 1.0},
    "noise_multiplier is -1": {"noise_multiplier": -1.0},
    "max_grad_norm is inf": {"max_grad_norm": math.inf},
    "max_grad_norm is 0": {"max_grad_norm": 0.0},
    "leave out shuffle": {"shuffle": True},
    "leave out drop_last": {"drop_last": True},
    "leave out batch_sampler": {"batch_sampler": None},
    "max_grad_norm is .* be one number": {"max_grad_norm": [1.0, 2.0]},
    "target_delta is 2, and must be between 0 and 1": {"target_delta": 2},
    "target_epsilon is -1": {"target_epsilon": -1},
    "epochs is 0, and must be above 0": {"epochs": 0},
    "accountant is 'exact', and must be": {"accountant": "exact"},
}


@pytest.mark.parametrize("says", REFUSED_ARGUMENTS)
def test_arguments_that_cannot_be_used_are_named(says: str) -> None:
    options = {**REFUSED_ARGUMENTS[says]}
    if says == "got a list":
        made: Any = partial(make_private, classifier(), torch.optim.SGD(classifier().parameters()))
        with pytest.raises(ConfigurationError, match=says):
            made([], batch_size=1, max_grad_norm=1.0, noise_multiplier=1.0)
        return
    with pytest.raises(ConfigurationError, match=says):
        private(**options)


def test_arguments_in_the_words_of_opacus_are_translated() -> None:
    own, model = {"data_loader": DataLoader(examples())}, classifier()
    optimizer = torch.optim.SGD(model.parameters())
    said = r"write make_private\(model, optimizer, dataset, batch_size=….*module=.*data_loader="
    for given, named in (((), {"module": model, "optimizer": optimizer}), ((model, optimizer), {})):
        with pytest.raises(ConfigurationError, match=said):
            make_private(*given, **named, **own)  # type: ignore[arg-type]


class Drops(nn.Module):
    """A part with dropout runs again, for its own parameter or for attention."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.cls = nn.Parameter(torch.ones(WIDTH)) if own else None
        self.a = None if own else nn.TransformerEncoderLayer(WIDTH, 1, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return F.dropout(x * self.cls) if self.a is None else self.a(x[:, None])[:, 0]


@pytest.mark.filterwarnings("ignore:to clip")
@pytest.mark.parametrize(
    ("own", "which", "freeze"),
    [
        (True, r"the whole model \(Drops\) .*: its parameter cls can be clipped in no sm", "cls"),
        (False, r"layer a.self_attn \(MultiheadAttention\)", "it"),
    ],
)
def test_a_part_that_draws_random_numbers_is_refused_with_remedies_for_this_training(
    loop: Way, own: bool, which: str, freeze: str
) -> None:
    made = private(Drops(own), seed=3)
    with pytest.raises(ConfigurationError, match=which) as refused:
        loop(made, next(iter(made.loader)))
    assert "set its dropout to 0" in str(refused.value)
    assert str(refused.value).endswith(f"or freeze {freeze} with requires_grad_(False)")


def wrapped_by(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], Any]:
    return lambda: private(wrap(classifier()))


def without_last(model: Any) -> Any:
    return private(model, torch.optim.SGD(model[0].parameters(), lr=0.1))


def with_stranger(model: Any) -> Any:
    mine = [*model.parameters(), *nn.Linear(2, 2).parameters()]
    return private(model, torch.optim.SGD(mine, lr=0.1))


def with_opacus(model: nn.Module) -> Any:
    sgd, usual = torch.optim.SGD(model.parameters(), lr=0.1), {"expected_batch_size": BATCH}
    return private(model, DPOptimizer(sgd, noise_multiplier=1.0, max_grad_norm=C, **usual))


def twice(model: nn.Module) -> Any:
    private(model)
    return private(model)


REFUSED_MODELS: dict[str, Callable[[], Any]] = {
    "lacks parameter 2.weight: give it all": lambda: without_last(classifier()),
    "a parameter that the model has not": lambda: with_stranger(classifier()),
    "no parameter that is trained": lambda: private(
        classifier().requires_grad_(False), torch.optim.SGD([torch.zeros(1)], lr=0.1)
    ),
    "was called for this model before: .* copy.deepcopy": lambda: twice(classifier()),
    "without DataParallel": wrapped_by(nn.DataParallel),
    "without OptimizedModule": wrapped_by(torch.compile),  # type: ignore[dict-item]
    "without GradSampleModule": wrapped_by(GradSampleModule),
    "without DPOptimizer": lambda: with_opacus(classifier()),
    "LBFGS needs": lambda: private(optimizer=torch.optim.LBFGS),
    r"layer 2 \(BatchNorm1d\): it computes statistics": lambda: private(
        classifier(nn.BatchNorm1d(8, affine=False))
    ),
}


@pytest.mark.parametrize("says", REFUSED_MODELS)
def test_models_and_optimizers_that_cannot_be_used_are_named(says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        REFUSED_MODELS[says]()


def test_a_copy_of_a_private_model_may_be_made_private() -> None:
    made = private()
    trained(made, by_step)
    again = private(copy.deepcopy(made.model))
    trained(again, by_step)
    assert again.steps == made.steps


@dataclass
class Pair:
    inputs: Tensor
    labels: Tensor

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.inputs, self.labels))


def pair_of(items: list[Any]) -> Pair:
    return Pair(*(torch.stack(each) for each in zip(*items, strict=True)))


def test_a_step_takes_batches_of_the_loader_only(loop: Way) -> None:
    made = private()
    batch = [each[:BATCH] for each in examples().tensors]
    with pytest.raises(ConfigurationError, match=r"has 4 examples, but none was drawn.* one step"):
        loop(made, batch)
    before = values(made.model)
    drawn = first_batch(made)
    made._sampler.unused = [len(drawn[0])]
    loop(made, drawn)
    assert not torch.equal(values(made.model), before)
    with pytest.raises(ConfigurationError, match="but none was drawn, so its ε would"):
        loop(made, drawn)


def test_an_empty_batch_without_a_step_is_named(loop: Way) -> None:
    made = private()
    drawn, before = first_batch(made), values(made.model)
    made._sampler.unused = [0, len(drawn[0])]
    with pytest.raises(ConfigurationError, match=r"an empty batch of .* got no step"):
        loop(made, drawn)
    assert torch.equal(values(made.model), before)
    assert made.steps == 0
    made._sampler.unused = [len(drawn[0]) + 1, 0, len(drawn[0])]  # they were given up together
    loop(made, drawn)


def test_empty_batches_of_a_loop_that_ended_early_need_no_step(loop: Way) -> None:
    made = private()
    made._sampler.unused = [0]
    for batch in made.loader:
        loop(made, batch)
    assert made.steps == len(made.loader)


def views(kind: str) -> Any:
    """Losses of two views of each example."""

    def of_views(model: Any, batch: Any) -> Tensor:
        x, y = batch
        if kind == "called twice":
            return losses(model, (x, y)) + losses(model, (x.flip(1), y))
        if kind == "next to each other":
            both, labels = torch.stack([x, x.flip(1)], 1).flatten(0, 1), y.repeat_interleave(2)
            return losses(model, (both, labels)).view(-1, 2).sum(1)
        both, labels = torch.cat([x, x.flip(1)]), torch.cat([y, y])
        return losses(model, (both, labels)).view(2, -1).sum(0)

    return of_views


@pytest.mark.parametrize("kind", ["called twice", "next to each other"])
def test_several_views_of_an_example_are_clipped_together(kind: str) -> None:
    made = private()
    batches = [*made.loader]
    for batch in batches:
        made.step(batch, views(kind))
    expected = classifier()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.5)
    one_after_another(expected, optimizer, batches, views(kind))
    torch.testing.assert_close(values(made.model), values(expected), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("later", [False, True])
def test_views_in_another_order_are_refused_by_name(later: bool) -> None:
    made = private()
    if later:
        trained(made, by_step)
    batch, before = first_batch(made), values(made.model)
    with pytest.raises(ConfigurationError, match=r"layer 0 .* as torch.cat\(\[x, y\]\) puts them"):
        made.step(batch, views("one after another"))
    assert torch.equal(values(made.model), before)


def test_views_are_no_examples_in_the_usual_loop() -> None:
    made = private()
    x, y = first_batch(made)
    made._sampler.unused, before = [len(x)], values(made.model)
    with pytest.raises(ConfigurationError, match=r"but the next batch has .* is one row"):
        by_loop(made, (torch.cat([x, x]), torch.cat([y, y])))
    assert torch.equal(values(made.model), before)


BAD_LOSSES: dict[str, Any] = {
    r"^losses must return one loss for .* do not return the mean": lambda m, b: losses(m, b).mean(),
    r"must return one loss for each example, \[\d\], but returned NoneType": lambda m, b: None,
    "the model or its loss mixes examples": lambda m, b: losses(m, b) / len(b[0]),
    "divide an example's loss only by numbers of": lambda m, b: losses(m, b) / b[0].abs().sum(),
    "uses parameter 0.weight without a call": lambda m, b: losses(m, b) + m[0].weight.norm(),
    "losses must be a function, not a Tensor": torch.zeros(3),
}


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("says", BAD_LOSSES)
def test_losses_that_are_no_losses_of_examples_are_refused_also_later(
    says: str, later: bool
) -> None:
    made = private()
    if later:
        trained(made, by_step)
    batch, before = first_batch(made), values(made.model)
    with pytest.raises(ConfigurationError, match=says):
        made.step(batch, BAD_LOSSES[says])
    assert torch.equal(values(made.model), before)
    made.step(batch, losses)


def test_losses_in_a_function_that_was_checked_with_others_are_checked() -> None:
    def wrapped(function: Any) -> Any:
        return lambda model, batch: function(model, batch)

    made = private()
    for batch in made.loader:
        made.step(batch, wrapped(losses))
    with pytest.raises(ConfigurationError, match="mixes examples"):
        made.step(first_batch(made), wrapped(lambda m, b: losses(m, b) / len(b[0])))


def test_a_batch_that_is_no_batch_is_named() -> None:
    made = private()
    x, y = first_batch(made)
    for says, batch in {
        "but not str: leave it out": (x, ["a"] * len(x)),
        "but not Pair": Pair(x, y),
        "the first dimension of each tensor in a batch must be the example": (x, y[:1]),
        "but not NoneType": (x, None),
    }.items():
        with pytest.raises(ConfigurationError, match=says):
            made.step(batch, losses)


class Mixing(nn.Module):
    """Subtracts the mean over the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Any:
        h = self.one(x[:, None].expand(-1, 3, -1))
        h += 1
        return self.two(h.relu_()).sum(1)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Any:
        return self.two(self.one(x).relu())[:, :CLASSES]


class Shared(nn.Module):
    """Adds a row that all examples share, as GPT-2 does with positions."""

    def __init__(self) -> None:
        super().__init__()
        self.row, self.head = nn.Embedding(4, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.scale = nn.Parameter(torch.ones(CLASSES))

    def forward(self, x: Tensor) -> Any:
        return self.head(x[:, None] + self.row(torch.arange(2)[None])).sum(1) * self.scale


class Buffered(nn.Module):
    """Keeps the mean of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = classifier()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Any:
        self.mean = x.mean(0).detach() if len(x) else self.mean
        return self.inner(x)


@pytest.mark.filterwarnings("ignore:to clip")
@pytest.mark.parametrize("kind", [InPlace, Tied, Shared, lambda: classifier(nn.LayerNorm(8))])
def test_what_was_hard_to_clip_is_right_in_both_loops(kind: Any, way: Way) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        made: nn.Module = kind()
        return made

    made = private(model())
    with torch.no_grad():
        made.model(torch.ones(3, WIDTH))
    batches = trained(made, way)
    made.model.eval()
    assert made.model(torch.ones(7, WIDTH)).shape == (7, CLASSES)
    expected = model()
    one_after_another(expected, torch.optim.SGD(expected.parameters(), lr=0.5), batches)
    torch.testing.assert_close(values(made.model), values(expected), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (lambda: classifier(Mixing()), "mixes examples, and nobody can clip them"),
        (lambda: classifier(Mixing(), nn.LayerNorm(8)), "mixes examples"),
        (Buffered, "buffer mean changes with the examples in forward"),
    ],
)
def test_a_model_that_mixes_examples_is_refused_in_both_loops(
    model: Any, says: str, way: Way
) -> None:
    made = private(model())
    batch, before = first_batch(made), values(made.model)
    with pytest.raises(ConfigurationError, match=says):
        way(made, batch)
    assert torch.equal(values(made.model), before)


def test_mixing_is_refused_also_if_the_first_batch_has_one_example(loop: Way) -> None:
    made = private(classifier(Mixing()))
    x, y = (each[:4] for each in examples().tensors)
    waits_for(made, 1)
    loop(made, (x[:1], y[:1]))
    waits_for(made, 4)
    with pytest.raises(ConfigurationError, match="mixes examples"):
        loop(made, (x, y))


def test_a_sequence_in_the_first_dimension_is_refused(loop: Way) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Any:
            return self.layer(x).mean(0)  # [T, B, …] becomes [B, …]

    made = private(Recurrent())
    square = torch.randn(4, 4, WIDTH), torch.tensor([0, 1, 2, 0])
    waits_for(made, 4)
    with pytest.raises(ConfigurationError, match="example"):
        loop(made, square)


def test_an_example_with_nan_is_left_out(way: Way) -> None:
    made, other = private(), private()
    x, y = first_batch(made)
    made._sampler.unused, other._sampler.unused = [len(x)], [len(x) - 1]
    spoiled = x.clone()
    spoiled[0] = math.nan
    way(made, (spoiled, y))
    way(other, (x[1:], y[1:]))
    torch.testing.assert_close(values(made.model), values(other.model), atol=1e-6, rtol=1e-5)
    if way is not by_parts:
        assert int(made.trainer.dropped) == 1


def test_one_of_many_equal_examples_moves_a_sum_at_bf16_by_its_own_gradient(loop: Way) -> None:
    moved = []
    for number in (256, 255):
        torch.manual_seed(0)
        model = nn.Linear(WIDTH, 1).bfloat16()
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        made = private(model, partial(torch.optim.SGD, lr=2.0**-8), max_grad_norm=1e6)
        x = torch.ones(number, WIDTH, dtype=torch.bfloat16)
        waits_for(made, number)
        if loop is by_step:
            made.step(x, lambda m, b: m(b)[:, 0])
        else:
            made.model(x)[:, 0].mean().backward()
            made.optimizer.step()
        moved.append(values(made.model).double() * 2**8 * BATCH)
    assert (moved[0] - moved[1]).abs().max() <= 2.0  # rounding of the parameters, 256 × 2⁻⁸, twice


CHANGES: dict[str, Callable[[Any], object]] = {
    "layer 3 was added": lambda m: m.append(nn.Linear(CLASSES, CLASSES)),
    "layer 0 was replaced": lambda m: m.__setitem__(0, nn.Linear(WIDTH, 8)),
    "parameter 0.weight was frozen": lambda m: m[0].weight.requires_grad_(False),
    "0.weight was moved to other memory": lambda m: m.double(),
}


@pytest.mark.parametrize("says", CHANGES)
def test_a_model_that_changes_later_is_refused(says: str, loop: Way) -> None:
    made = private()
    trained(made, loop)
    batch = first_batch(made)
    CHANGES[says](made.model)
    with pytest.raises(ConfigurationError, match=says):
        loop(made, batch)


def test_a_group_cannot_be_added_later() -> None:
    with pytest.raises(ConfigurationError, match="before make_private"):
        private().optimizer.add_param_group({"params": [torch.zeros(1)]})


def test_dropout_may_change(way: Way) -> None:
    made, other = private(classifier(nn.Dropout(0.5))), private(classifier(nn.Dropout(0.0)))
    trained(made, way)
    assert isinstance(made.model, nn.Sequential)
    made.model[2].p = 0.0  # type: ignore[assignment]
    made.model.load_state_dict(other.model.state_dict())
    other._sampler.drawn = made._sampler.drawn
    trained(made, way)
    trained(other, way)
    torch.testing.assert_close(values(made.model), values(other.model), atol=1e-6, rtol=1e-5)


def test_a_model_that_returns_its_own_loss_is_checked() -> None:
    class OwnLoss(nn.Module):
        def __init__(self, divides: bool) -> None:
            super().__init__()
            self.inner, self.divides = classifier(), divides

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            logits = self.inner(x)
            each = F.cross_entropy(logits, y, reduction="none")
            kept = (y > 0).float() if self.divides else torch.ones_like(each)
            return {"loss": (each * kept).sum() / kept.sum().clamp(min=1), "logits": logits}

    made = private(OwnLoss(False))
    for x, y in made.loader:
        made.model(x, y)["loss"].backward()
        made.optimizer.step()
    other = private()
    trained(other, by_loop)
    torch.testing.assert_close(values(made.model), values(other.model), atol=1e-6, rtol=1e-5)
    made = private(OwnLoss(True))
    x, y = first_batch(made)
    with pytest.raises(ConfigurationError, match=r"not the mean .* use private.step with a loss"):
        made.model(x, torch.tensor([0, 1, 2, 0, 1, 2])[: len(x)])


def test_a_model_without_an_output_of_examples_is_refused_in_the_usual_loop() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = classifier()

        def forward(self, x: Tensor) -> Any:
            return self.inner(x).mean()

    made = private(Mean())
    with pytest.raises(ConfigurationError, match=r"returns no tensor .* use private.step"):
        made.model(first_batch(made)[0])


@pytest.mark.filterwarnings("ignore:to clip")
def test_losses_may_use_autocast(loop: Way) -> None:
    class Scale(nn.Module):
        """Has two inputs, so that it runs again to be clipped, with inputs of 16 bits."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(CLASSES))

        def forward(self, one: Tensor, other: Tensor) -> Any:
            return (one + other) @ torch.diag(self.scale)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = classifier(), Scale()

        def forward(self, x: Tensor) -> Any:
            return self.scale(self.inner(x), self.inner(x))

    def cast(model: Any, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return losses(model, batch).float()

    made = private(Scaled(), partial(torch.optim.SGD, lr=0.05))
    batches = [*made.loader]
    for batch in batches:
        if loop is by_step:
            made.step(batch, cast)
        else:
            cast(made.model, batch).mean().backward()
            made.optimizer.step()
    expected = Scaled()
    before = values(expected)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.05)
    one_after_another(expected, optimizer, batches, cast)
    moved = values(expected) - before
    assert (values(made.model) - values(expected)).norm() < 0.02 * moved.norm()


# --- batches -------------------------------------------------------------------------------------


def dictionary(items: list[Any]) -> Any:
    inputs, labels = zip(*items, strict=True)
    names = [f"example {label}" for label in labels]
    return UserDict(inputs=torch.stack(inputs), labels=torch.stack(labels), names=names)


def test_an_empty_batch_has_the_form_of_others() -> None:
    pairs = private(collate_fn=pair_of).loader.collate_fn
    mappings = private(collate_fn=dictionary).loader.collate_fn
    empty, full = pairs([]), pairs([examples()[0]])
    assert type(empty) is type(full) is Pair
    assert empty.inputs.shape == (0, WIDTH)
    assert empty.labels.dtype == torch.long
    empty = mappings([])
    assert type(empty) is UserDict
    assert (empty["inputs"].shape, empty["names"]) == ((0, WIDTH), [])


def test_mappings_are_batches_of_a_step() -> None:
    def chosen(items: list[Any]) -> Any:
        made = dictionary(items)
        del made["names"]
        return made

    made = private(collate_fn=chosen)
    for batch in made.loader:
        made.step(batch, lambda m, b: losses(m, (b["inputs"], b["labels"])))
    other = private()
    trained(other, by_step)
    torch.testing.assert_close(values(made.model), values(other.model))


def test_workers_of_the_loader_change_nothing(loop: Way) -> None:
    made, other = private(num_workers=1), private()
    for batch in made.loader:
        loop(made, batch)
    trained(other, loop)
    torch.testing.assert_close(values(made.model), values(other.model))


# --- functions of losses that a graph has captured -----------------------------------------------

FACTOR = 1.0


class Weighted:
    def __init__(self, weight: float) -> None:
        self.weight, self.other = weight, 0

    def __call__(self, model: Any, batch: Any) -> Tensor:
        return losses(model, batch) * self.weight

    def called(self, model: Any, batch: Any) -> Tensor:
        return self(model, batch) + losses(model, batch) * self.weight


def scaled(model: Any, batch: Any, by: float = 1.0) -> Tensor:
    return losses(model, batch) * by * FACTOR


def test_a_function_whose_values_change_is_another_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def changes(function: Any, change: Callable[[], object]) -> bool:
        before = values_of(function)
        assert values_of(function) == before
        change()
        return values_of(function) != before

    rate, held, weighted = 1.0, [1.0], Weighted(1.0)
    tensor, box = torch.ones(()), SimpleNamespace(rate=1.0)

    def set_rate() -> None:
        nonlocal rate
        rate = 2.0

    module = sys.modules[__name__]
    assert changes(lambda m, b: losses(m, b) * rate, set_rate)
    assert changes(lambda m, b: losses(m, b) * held[0], lambda: held.append(2.0))
    assert changes(lambda m, b: losses(m, b) * tensor, lambda: tensor.mul_(2))
    assert changes(lambda m, b: losses(m, b) * box.rate, lambda: setattr(box, "rate", 2.0))
    assert changes(partial(scaled, by=weighted), lambda: setattr(weighted, "weight", 2.0))  # type: ignore[arg-type]
    assert changes(weighted, lambda: setattr(weighted, "weight", 3.0))
    assert changes(weighted.called, lambda: setattr(weighted, "weight", 4.0))
    assert changes(scaled, lambda: monkeypatch.setattr(module, "FACTOR", 3.0))
    assert not changes(weighted, lambda: setattr(weighted, "other", 1))
    assert values_of(partial(scaled, by=1.0)) != values_of(partial(scaled, by=2.0))
    assert values_of(partial(scaled, by=1.0)) == values_of(partial(scaled, by=1.0))
    made = [lambda m, b, by=by: losses(m, b) * by for by in (1.0, 1.0, 2.0)]
    assert values_of(made[0]) == values_of(made[1]) != values_of(made[2])


# --- ranks, imports ------------------------------------------------------------------------------


def on_two_ranks(case: Case) -> list[bytes]:
    torch.set_num_threads(1)
    made = []
    for way in WAYS.values():
        each = private(physical_batch_size=2, dataset=examples(20), batch_size=2)
        trained(each, way)
        made.append(values(each.model).numpy().tobytes())
        assert each.epsilon(1e-5) == math.inf
    unseeded = private(seed=None, **NOISY)
    made.append(noise_of(unseeded).numpy().tobytes())
    return made


def test_two_ranks_train_as_one_process_with_the_joint_batch() -> None:
    case = resolve(Case("fused", 4, parallel="ddp", gpus=2, seq_len=8, model_size="50x16x1x2"))
    first, second = on_all_ranks(on_two_ranks, case, "cpu")
    assert first == second
    alone = private(dataset=examples(20), batch_size=2)
    trained(alone, by_step)
    for one in first[:-1]:
        made = torch.frombuffer(bytearray(one), dtype=torch.float32)
        torch.testing.assert_close(made, values(alone.model), atol=1e-6, rtol=1e-5)


def test_other_distributions_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_process_group(2):
        with pytest.raises(ConfigurationError, match="without DistributedDataParallel"):
            private(nn.parallel.DistributedDataParallel(classifier()))
        sharded = torch.distributed.fsdp.fully_shard(classifier())
        with pytest.raises(ConfigurationError, match=r"without shards: .* shards \(FSDP\)"):
            private(sharded)
        with pytest.raises(ConfigurationError, match="must be a multiple of the 2 ranks"):
            private(batch_size=3)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="init_process_group first"):
        private()


@pytest.mark.slow
def test_to_train_loads_nothing_of_the_benchmark() -> None:
    code = (
        "import sys, dpbench.private;"
        "print([m for m in sys.modules if m.split('.')[0] in ('pandas', 'pytest', '_pytest')"
        " or m.startswith(('dpbench.instruments', 'dpbench.plugin', 'dpbench.launch'))])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "[]\n"
