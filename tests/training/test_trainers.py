"""The arithmetic of the trainers: what is measured must be what it says it is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn

from dpbench import MODEL_SIZES, TRAINERS, SimpleBigModel, TrainerBase, get_random_dataloader
from dpbench.core.errors import ConfigurationError
from dpbench.training.base import Batch, mean_cross_entropy
from dpbench.training.parallel import own_generator
from dpbench.training.phases import observed_step
from dpbench.verify.reference import Examples
from dpbench.workloads.transformer import Transformer

GRAD_SAMPLES = ["dpsgd:grad_sample=functorch", "dpsgd:grad_sample=ew"]
PLAIN = "fused:graphs=false,kernels=false"
DP_TRAINERS = [*(name for name in TRAINERS if name != "standard"), *GRAD_SAMPLES, PLAIN]
PER_LAYER = ["dpsgd:clip=per_layer", *(f"{name},clip=per_layer" for name in GRAD_SAMPLES)]
BATCH_SIZE = 6
TINY = MODEL_SIZES["tiny"]


@pytest.fixture
def batch() -> Batch:
    loader = get_random_dataloader(batch_size=BATCH_SIZE, seq_len=12, vocab_size=TINY.vocabulary)
    input_ids, labels = next(iter(loader))
    return input_ids, labels


def tiny_model(attention: str = "sdpa") -> nn.Module:
    torch.manual_seed(0)
    return SimpleBigModel(TINY, attention=attention)


def examples_of(model: nn.Module, batch: Batch) -> Examples:
    """Gradients by a loop over examples: the definition, without any of Opacus."""
    return Examples.computed(model, batch, Transformer().losses)


def clipped_mean(examples: Examples, threshold: float, clips: str = "flat") -> Tensor:
    return flat([*examples.mean(examples.factors(clips, threshold)).values()])


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).double()


def update_of(name: str, model: nn.Module, batch: Batch, **options: float) -> Tensor:
    """Old minus new parameters after one step at learning rate 1, in float64."""
    model = copy.deepcopy(model)
    before = flat([p.detach().clone() for p in model.parameters()])
    trainer = TRAINERS[name](model, batch_size=BATCH_SIZE, learning_rate=1.0, **options)
    trainer.train_step(batch)
    return before - flat([p.detach() for p in model.parameters()])


@pytest.mark.parametrize(
    ("name", "attention"),
    [*((name, "sdpa") for name in DP_TRAINERS), ("dpsgd", "dp_mha"), ("fused", "dp_mha")],
)
def test_without_noise_the_update_is_the_mean_of_clipped_per_example_gradients(
    name: str, attention: str, batch: Batch
) -> None:
    model = tiny_model(attention)
    examples = examples_of(model, batch)
    norms = examples.norms.norm(dim=1)
    threshold = float(norms.median())
    assert (norms > threshold).any(), "some examples must be clipped"
    assert (norms < threshold).any(), "and some must not"
    expected = clipped_mean(examples, threshold)
    update = update_of(name, model, batch, noise_multiplier=0.0, max_grad_norm=threshold)
    assert (update - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("name", PER_LAYER)
def test_per_layer_clipping_clips_each_parameters_gradient_to_its_share(
    name: str, batch: Batch
) -> None:
    model = tiny_model()
    examples = examples_of(model, batch)
    norms = examples.norms
    share = float(norms.median())
    assert (norms > share).any(1).all()
    assert (norms < share).any(1).all()
    threshold = share * len(norms[0]) ** 0.5
    expected = clipped_mean(examples, threshold, "per layer")
    update = update_of(name, model, batch, noise_multiplier=0.0, max_grad_norm=threshold)
    # The update is small beside the parameters, which are rounded to float32 before and after.
    assert (update - expected).norm() < 3e-5 * expected.norm()
    flatly = clipped_mean(examples, threshold)
    assert (update - flatly).norm() > 0.01 * flatly.norm()


@pytest.mark.parametrize("name", [*DP_TRAINERS, PER_LAYER[0]])
def test_noise_has_the_standard_deviation_sigma_c_over_b(name: str, batch: Batch) -> None:
    sigma, threshold = 3.0, 0.5
    model = tiny_model()
    torch.manual_seed(1)
    noisy = update_of(name, model, batch, noise_multiplier=sigma, max_grad_norm=threshold)
    exact = update_of(name, model, batch, noise_multiplier=0.0, max_grad_norm=threshold)
    noise = noisy - exact
    expected = sigma * threshold / BATCH_SIZE
    # The standard error of a deviation from n normal samples is s / sqrt(2n): 0.13 % for the
    # 293 632 parameters here. Five of those leave a chance of 6e-7 for a false alarm.
    tolerance = 5 / (2 * noise.numel()) ** 0.5
    assert noise.std().item() == pytest.approx(expected, rel=tolerance)
    assert abs(noise.mean().item()) < 5 * expected / noise.numel() ** 0.5


@pytest.mark.skipif(torch.__version__ < "2.13", reason="PyTorch's CPU rounds it itself")
@pytest.mark.parametrize("name", DP_TRAINERS)
def test_the_deviation_is_not_rounded_to_the_type_of_the_gradients(name: str, batch: Batch) -> None:
    model = tiny_model().to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.data.zero_()  # so that what is left is the noise

    def deviation(sigma: float) -> float:
        return update_of(name, model, batch, noise_multiplier=sigma, seed=1).std().item()

    # In bf16 the numbers beside 1.0115 are 1.0078 and 1.0156.
    assert deviation(1.0115) / deviation(1.0) == pytest.approx(1.0115, rel=1e-3)


def test_a_batch_of_another_size_is_refused(batch: Batch) -> None:
    for make in map(TRAINERS.__getitem__, TRAINERS):
        trainer = make(tiny_model(), batch_size=BATCH_SIZE + 1)
        with pytest.raises(ValueError, match="built for batches of 7 examples, and this batch has"):
            trainer.train_step(batch)


@pytest.mark.parametrize("name", list(TRAINERS))
def test_train_step_returns_the_mean_loss_before_the_update(name: str, batch: Batch) -> None:
    model = tiny_model()
    expected = mean_cross_entropy(model(batch[0]), batch[1])
    loss = TRAINERS[name](model, batch_size=BATCH_SIZE).train_step(batch)
    assert not loss.requires_grad
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_the_optimizer_is_plain_sgd_unless_told_otherwise() -> None:
    for make in map(TRAINERS.__getitem__, TRAINERS):
        plain = make(tiny_model(), batch_size=1).plain_optimizer
        assert isinstance(plain, torch.optim.SGD)
        assert (plain.defaults["lr"], plain.defaults["momentum"]) == (1e-3, 0)
        adam = make(tiny_model(), batch_size=1, optimizer=torch.optim.Adam)
        assert isinstance(adam.plain_optimizer, torch.optim.Adam)


class Recorder:
    """Remembers which phases a step went through, without repetitions in a row."""

    def __init__(self) -> None:
        self.observed: list[str] = []

    def start_step(self) -> None:
        self.observed = []

    def switch(self, phase: str) -> None:
        if phase != "outside":
            self.observed.append(phase)

    def end_step(self) -> None:
        pass


def phases_of(trainer: TrainerBase, batch: Batch) -> list[str]:
    recorder = Recorder()
    with observed_step(recorder):
        trainer.train_step(batch)
    return list(dict.fromkeys(recorder.observed))


def test_the_standard_trainer_has_three_phases(batch: Batch) -> None:
    trainer = TRAINERS["standard"](tiny_model(), batch_size=BATCH_SIZE)
    assert phases_of(trainer, batch) == ["forward", "backward", "optimizer"]


@pytest.mark.parametrize("name", DP_TRAINERS)
def test_a_dp_trainer_goes_through_all_phases(name: str, batch: Batch) -> None:
    trainer = TRAINERS[name](tiny_model(), batch_size=BATCH_SIZE)
    heard = phases_of(trainer, batch)
    drawn_in_update = name == "fused"
    noise = [] if drawn_in_update else ["noise"]
    assert set(heard) == {"forward", "backward", "clip", *noise, "optimizer"}
    assert heard.index("clip") < heard.index([*noise, "optimizer"][0])


def test_marking_phases_changes_nothing_that_opacus_does(batch: Batch) -> None:
    """The trainer's step and a hand-written Opacus loop give the same parameters, bit by bit."""
    ours, theirs = tiny_model(), tiny_model()
    TRAINERS["dpsgd"](ours, batch_size=BATCH_SIZE, seed=5).train_step(batch)

    module = GradSampleModule(theirs.train())
    optimizer = DPOptimizer(
        torch.optim.SGD(theirs.parameters(), lr=1e-3),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=BATCH_SIZE,
        generator=own_generator(torch.device("cpu"), 5),
    )
    mean_cross_entropy(module(batch[0]), batch[1]).backward()
    optimizer.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize(
    ("name", "clips"),
    [
        ("standard", None),
        *((name, "flat") for name in DP_TRAINERS if TRAINERS.is_builtin(name)),
        *((name, "per layer") for name in PER_LAYER),
    ],
)
def test_a_trainer_says_what_it_clips_and_where_its_noise_is_drawn(
    name: str, clips: str | None
) -> None:
    labels = TRAINERS[name](tiny_model(), batch_size=1).labels
    assert labels.get("clips") == clips
    drawn = "in the update" if name == "fused" else "in a phase of its own"
    assert labels.get("noise") == (drawn if clips else None)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"clip": "ghost"}, "unknown clip 'ghost'; choose from flat, per_layer"),
        ({"grad_sample": "ew", "autocast": torch.bfloat16}, "ew.* do not work under autocast"),
        ({"grad_sample": "jax"}, "unknown grad_sample 'jax'; choose from hooks, functorch, ew"),
    ],
)
def test_wrong_value_of_a_parameter_is_refused(parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        TRAINERS["dpsgd"](tiny_model(), batch_size=1, **parameters)
