"""Poisson batches: of any size, the empty one included."""

from __future__ import annotations

import math
from functools import cache, partial
from operator import itemgetter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from dpbench.child.build import batch_sizes, build
from dpbench.child.case import run_case
from dpbench.core.case import Case
from dpbench.core.errors import ConfigurationError
from dpbench.core.registry import TRAINERS
from dpbench.instruments.logical.logical import Logical
from dpbench.instruments.timing import TimingRecorder
from dpbench.training.base import Batch, TrainerBase
from dpbench.training.standard import StandardTrainer
from dpbench.workloads.base import examples_in, part_sizes, parts_of

CPU = torch.device("cpu")
PRIVATE = [name for name in TRAINERS if name != "standard"]
FURTHER = [
    "fused:graphs=false,kernels=false",
    "dpsgd:grad_sample=functorch",
    "dpsgd:grad_sample=ew",
]
poisson = partial(Case, batch_size=4, seq_len=8, model_size="50x16x1x2", sampling="poisson")


def built(trainer: str, sigma: float = 0.0, **axes: Any) -> tuple[TrainerBase, Batch]:
    """A trainer, and a batch of 12 examples."""
    made, batches = build(poisson(trainer, **axes), CPU, 3, noise_multiplier=sigma)
    return made, pytree.tree_map(lambda *each: torch.cat(each), *batches)


def parameters(trainer: TrainerBase) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).clone()


@cache
def steps_of(trainer: str, parts: int) -> tuple[list[float], torch.Tensor]:
    """The losses of batches of several sizes without noise, and the parameters afterwards."""
    made, batch = built(trainer, micro_batches=parts)
    cut = [slice(size) for size in (5, 0, 1, 11)]
    losses = [float(made.train_step(pytree.tree_map(itemgetter(part), batch))) for part in cut]
    return losses, parameters(made)


@pytest.mark.parametrize("parts", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    "trainer", [*PRIVATE, *(pytest.param(name, marks=pytest.mark.slow) for name in FURTHER)]
)
def test_private_trainers_agree_on_batches_of_any_size(trainer: str, parts: int) -> None:
    losses, moved = steps_of(trainer, parts)
    expected, right = steps_of("micro_batch", 1)
    assert losses == pytest.approx(expected, nan_ok=True, rel=1e-5)
    assert math.isnan(losses[1])
    torch.testing.assert_close(moved, right, rtol=0, atol=2e-6)


@pytest.mark.parametrize("trainer", ["standard", *PRIVATE, "dpsgd:clip=per_layer"])
def test_an_empty_batch_moves_parameters_by_noise_alone(trainer: str) -> None:
    made, batch = built(trainer, 1.0)
    before = parameters(made)
    assert math.isnan(float(made.train_step(pytree.tree_map(itemgetter(slice(0)), batch))))
    moved = (parameters(made) - before) * 4 / 1e-3  # expected size ÷ learning rate
    assert float(moved.std()) == pytest.approx(0.0 if trainer == "standard" else 1.0, abs=0.1)


def test_standard_training_divides_by_the_expected_size() -> None:
    made, batch = built("standard")
    before = parameters(made)
    six = pytree.tree_map(itemgetter(slice(6)), batch)
    mean = torch.autograd.grad(made.mean_loss(made.model, six), [*made.model.parameters()])
    made.train_step(six)
    gradient = torch.cat([g.flatten() for g in mean]) * 6 / 4
    torch.testing.assert_close(before - parameters(made), 1e-3 * gradient, rtol=1e-2, atol=1e-6)


@given(st.integers(0, 200), st.integers(1, 20))
def test_a_batch_comes_in_as_few_parts_as_possible(examples: int, most: int) -> None:
    sizes = part_sizes(examples, -(-examples // most))
    parts = parts_of(torch.arange(examples), sizes)
    assert torch.equal(torch.cat([torch.arange(0), *parts]), torch.arange(examples))
    assert all(most >= size >= max(sizes) - 1 for size in sizes)


@pytest.mark.parametrize("expected", [1, 8, 4096])
def test_few_sizes_have_the_expected_mean(expected: int) -> None:
    sizes = [batch_sizes(poisson(t, batch_size=expected), 10) for t in ("standard", "fused")]
    assert sizes[0] == sizes[1]
    assert sum(sizes[0]) / 10 == pytest.approx(expected, abs=0.2 * expected**0.5)
    assert len({*sizes[0]}) > 2
    assert batch_sizes(poisson("dpsgd", batch_size=expected), 1) == pytest.approx([expected], abs=1)
    assert (0 in sizes[0]) == (expected == 1)


def test_measured_batches_have_these_sizes_after_a_warm_up_of_the_expected_one() -> None:
    case = poisson("dpsgd")
    _, batches = build(case, CPU, 8, sampled=5)
    assert [*map(examples_in, batches)] == [4, 4, 4, *batch_sizes(case, 5)]


def test_each_size_is_trained_once_before_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, case = [], poisson("standard")
    take_step = StandardTrainer.train_step

    def train_step(trainer: StandardTrainer, batch: Batch) -> torch.Tensor:
        seen.append(examples_in(batch))
        return take_step(trainer, batch)

    monkeypatch.setattr(StandardTrainer, "train_step", train_step)
    run_case(case, TimingRecorder(3), device="cpu", warmup=1, active=3)
    assert seen == [4, *2 * batch_sizes(case, 3)]


def test_the_rate_is_that_of_all_steps() -> None:
    case = poisson("standard")
    outcome = run_case(case, TimingRecorder(5), device="cpu", warmup=1)
    [rate] = [r.value for r in outcome.rows if r.metric == "samples_per_second"]
    seconds = sum(sum(step.values()) for step in outcome.details["phase_seconds"])
    assert rate == pytest.approx(sum(batch_sizes(case, 5)) / seconds)
    assert outcome.notes == (
        "batches have 4, 2, 3, 7, 5 examples, on average 4.2; the expected number is 4",
    )


def test_a_step_is_counted_for_each_size() -> None:
    def read(case: Case) -> dict[int, float]:
        rows = Logical(active=2).count(case).rows
        return {
            row.repeat: row.value
            for row in rows
            if (row.phase, row.metric) == ("step", "logical_read_bytes")
        }

    sizes, counted = batch_sizes(poisson("fused"), 2), read(poisson("fused"))
    repeat = sizes.index(min(sizes))  # trained in one part
    alone = read(poisson("fused", batch_size=sizes[repeat], sampling="fixed"))
    assert counted[repeat] == alone[0] < counted[1 - repeat]


def test_ranks_do_not_sample() -> None:
    with pytest.raises(ConfigurationError, match="sampling=poisson supports one GPU only, and"):
        poisson("dpsgd", gpus=2, parallel="ddp")
