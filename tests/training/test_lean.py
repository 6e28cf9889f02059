"""Changes to Opacus: each saves bytes by itself, and none changes an update."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from dpbench import MODEL_SIZES, TRAINERS, Case, SimpleBigModel, get_random_dataloader
from dpbench.core.errors import ConfigurationError
from dpbench.instruments.logical.logical import Logical
from dpbench.training import ghost_lean, lean

TINY = MODEL_SIZES["tiny"]
BATCH_SIZE = 4
ORIGINAL = {"lean": "dpsgd", "ghost_lean": "dpsgd_ghost"}
OVER_RANKS = ("reduce", "gather", "blocks")  # which change nothing on one GPU
ONE_EACH = [
    (trainer, change)
    for trainer, known in (("lean", lean.CHANGES), ("ghost_lean", ghost_lean.CHANGES))
    for change in known
    if change not in OVER_RANKS
]


@cache
def trained(trainer: str) -> Tensor:
    """The parameters after three steps in two parts; one step alone hides what is left over."""
    torch.manual_seed(0)
    made = TRAINERS[trainer](
        SimpleBigModel(TINY),
        batch_size=BATCH_SIZE,
        learning_rate=1.0,
        noise_multiplier=0.0,
        max_grad_norm=0.3,
        micro_batches=2,
    )
    for batch in get_random_dataloader(
        batch_size=BATCH_SIZE, seq_len=12, vocab_size=TINY.vocabulary, num_batches=3
    ):
        made.train_step(batch)
    return torch.cat([p.detach().flatten() for p in made.model.parameters()])


@cache
def moved(trainer: str) -> float:
    result = Logical().count(Case(trainer, BATCH_SIZE, 64, "2000x512x1x8"))
    return sum(count.read_bytes + count.write_bytes for count in result.operators)


@pytest.mark.parametrize(("trainer", "change"), ONE_EACH)
def test_a_change_alone_saves_bytes_and_leaves_the_update_as_it_is(
    trainer: str, change: str
) -> None:
    changed, original = f"{trainer}:changes={change}", ORIGINAL[trainer]
    assert moved(trainer) < moved(changed) < moved(original)
    exact = change in ("kept", "unused", "none", "taken")
    tolerance = 0.0 if exact else 1e-6
    difference = (trained(changed) - trained(original)).norm()
    assert difference <= tolerance * trained(original).norm()


@pytest.mark.parametrize("trainer", ORIGINAL)
def test_changes_are_named_together(trainer: str) -> None:
    assert moved(f"{trainer}:changes=summed+noise") < moved(f"{trainer}:changes=noise")
    with pytest.raises(ConfigurationError, match="unknown change 'faster'"):
        TRAINERS[trainer](SimpleBigModel(TINY), batch_size=1, changes="noise+faster")


def test_mixed_ghost_norms_move_less_than_either_kind_alone() -> None:
    """Of one step of many tokens, of which products are larger than some layers' gradients."""

    def bytes_of(trainer: str) -> float:
        case = Case(trainer, 2, 128, "20x64x1x2")
        counts = Logical().count(case).operators
        return sum(c.read_bytes + c.write_bytes for c in counts if c.phase == "backward")

    assert bytes_of("mixed_ghost") < min(bytes_of("ghost_lean"), bytes_of("dpsgd_fgc"))
