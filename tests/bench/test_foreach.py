"""The trainers of few launches clip as the definition says, and draw the right noise."""

from __future__ import annotations

import pytest
import torch

from bench import foreach
from dpbench import MODEL_SIZES, SimpleBigModel, TrainerBase, get_random_dataloader
from dpbench.training.base import Batch
from dpbench.training.phases import observed_step
from tests.training.test_trainers import Recorder, clipped_mean, examples_of, flat

TINY = MODEL_SIZES["tiny"]
BATCH_SIZE = 6
TRAINERS = [
    foreach.ForeachDPSGDTrainer,
    foreach.ForeachGhostClippingTrainer,
    foreach.NoneForeachGhostClippingTrainer,
]


def batches(count: int) -> list[Batch]:
    loader = get_random_dataloader(
        batch_size=BATCH_SIZE, seq_len=12, vocab_size=TINY.vocabulary, num_batches=count
    )
    return [(input_ids, labels) for input_ids, labels in loader]


def model() -> SimpleBigModel:
    torch.manual_seed(0)
    return SimpleBigModel(TINY)


def parameters(module: torch.nn.Module) -> torch.Tensor:
    return flat([p.detach() for p in module.parameters()])


@pytest.mark.parametrize("trainer_class", TRAINERS)
def test_without_noise_every_update_is_the_mean_of_clipped_per_example_gradients(
    trainer_class: type[TrainerBase], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In three steps, of which the later ones would show what an earlier one left behind."""
    monkeypatch.setattr(foreach, "ELEMENTS", 100_000)  # several buffers
    threshold = float(examples_of(model(), batches(1)[0]).norms.norm(dim=1).median())
    options = {"learning_rate": 1.0, "noise_multiplier": 0.0, "max_grad_norm": threshold}
    trainer = trainer_class(model(), batch_size=BATCH_SIZE, **options)
    for batch in batches(3):
        before = parameters(trainer.model)
        reference = model()
        reference.load_state_dict(
            {k.removeprefix("_module."): v for k, v in trainer.model.state_dict().items()}
        )
        expected = clipped_mean(examples_of(reference, batch), threshold)
        trainer.train_step(batch)
        update = before - parameters(trainer.model)
        assert (update - expected).norm() < 1e-6 * before.norm()
        assert (update - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("trainer_class", TRAINERS)
def test_noise_has_the_standard_deviation_sigma_c_over_b(trainer_class: type[TrainerBase]) -> None:
    sigma, threshold = 3.0, 0.5
    updated = {}
    for multiplier in (sigma, 0.0):
        trainer = trainer_class(
            model(),
            batch_size=BATCH_SIZE,
            learning_rate=1.0,
            noise_multiplier=multiplier,
            max_grad_norm=threshold,
        )
        trainer.train_step(batches(1)[0])
        updated[multiplier] = parameters(trainer.model)
    noise = updated[sigma] - updated[0.0]
    expected = sigma * threshold / BATCH_SIZE
    # Five standard errors of a deviation, s / sqrt(2n), and of a mean, s / sqrt(n).
    assert noise.std().item() == pytest.approx(expected, rel=5 / (2 * noise.numel()) ** 0.5)
    assert abs(noise.mean().item()) < 5 * expected / noise.numel() ** 0.5


@pytest.mark.parametrize("trainer_class", TRAINERS)
def test_the_phases_are_those_of_opacus_and_bfloat16_trains(
    trainer_class: type[TrainerBase],
) -> None:
    trainer = trainer_class(model().to(torch.bfloat16), batch_size=BATCH_SIZE)
    recorder = Recorder()
    with observed_step(recorder):
        loss = trainer.train_step(batches(1)[0])
    assert torch.isfinite(loss)
    heard = list(dict.fromkeys(recorder.heard))
    assert heard == ["forward", "backward", "optimizer", "clip", "noise"]
