"""The changed trainer does what the original does."""

from __future__ import annotations

import torch

from bench.opacus_changes import ZeroingDPSGDTrainer
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


def test_zeroed_gradients_leave_the_update_as_it_is() -> None:
    assert torch.equal(trained(ZeroingDPSGDTrainer), trained(TRAINERS["dpsgd"]))
