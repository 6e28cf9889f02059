"""The changed trainers do what the originals do."""

from __future__ import annotations

import pytest
import torch

from bench import opacus_changes as changed
from dpbench import MODEL_SIZES, TRAINERS, SimpleBigModel, TrainerBase, get_random_dataloader

TINY = MODEL_SIZES["tiny"]
BATCH_SIZE = 4


def trained(trainer_class: type[TrainerBase]) -> torch.Tensor:
    """The parameters after three steps without noise; one step alone hides what is left over."""
    torch.manual_seed(0)
    trainer = trainer_class(
        SimpleBigModel(TINY),
        batch_size=BATCH_SIZE,
        learning_rate=1.0,
        noise_multiplier=0.0,
        max_grad_norm=0.3,
    )
    for batch in get_random_dataloader(
        batch_size=BATCH_SIZE, seq_len=12, vocab_size=TINY.vocabulary, num_batches=3
    ):
        trainer.train_step(batch)
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


@pytest.mark.parametrize(
    ("original", "changes"),
    [
        ("dpsgd", [changed.KeptDPSGDTrainer, changed.ZeroingDPSGDTrainer]),
        ("dpsgd_ghost", [changed.NoneGhostClippingTrainer]),
        (
            "dpsgd_fgc",
            [changed.KeptFastGradientClippingTrainer, changed.KeptNoneFastGradientClippingTrainer],
        ),
    ],
)
def test_a_change_leaves_the_update_as_it_is(
    original: str, changes: list[type[TrainerBase]]
) -> None:
    expected = trained(TRAINERS[original])
    for change in changes:
        assert torch.equal(trained(change), expected)
