"""Fewer bytes than Opacus moves, and the same update."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dpbench import MODEL_SIZES, TRAINERS, Case, SimpleBigModel, get_random_dataloader
from dpbench.commands.cli import main
from dpbench.core.errors import ConfigurationError
from dpbench.core.model_size import ModelSize
from dpbench.instruments.logical.logical import Logical
from dpbench.training.ghost_norms import GhostNorms

RESULTS = Path(__file__).parents[2] / "docs" / "results"
TINY = MODEL_SIZES["tiny"]
BATCH_SIZE = 4
ORIGINAL = {
    "lean": "dpsgd",
    "ghost_lean": "dpsgd_ghost",
    "ghost_lean:norms=products": "dpsgd_ghost",
}


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


def moved(trainer: str) -> float:
    result = Logical().count(Case(trainer, BATCH_SIZE, 64, "2000x512x1x8"))
    return sum(count.read_bytes + count.write_bytes for count in result.operators)


@pytest.mark.parametrize("trainer", ORIGINAL)
def test_bytes_are_saved_and_the_update_stays(trainer: str) -> None:
    assert moved(trainer) < 0.75 * moved(ORIGINAL[trainer])
    expected = trained(ORIGINAL[trainer])
    assert (trained(trainer) - expected).norm() <= 1e-6 * expected.norm()


def test_another_way_of_norms_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="unknown way of norms 'mixed'; choose from chea"):
        TRAINERS["ghost_lean"](SimpleBigModel(TINY), batch_size=1, norms="mixed")


def test_of_long_sequences_norms_from_gradients_move_less_than_products() -> None:
    def bytes_of(trainer: str) -> float:
        counts = Logical().count(Case(trainer, 2, 128, "20x64x1x2")).operators
        return sum(c.read_bytes + c.write_bytes for c in counts if c.phase == "backward")

    others = map(bytes_of, ("ghost_lean:norms=products", "dpsgd_ghost", "dpsgd_fgc"))
    assert bytes_of("ghost_lean") < min(others)


def test_runs_that_name_trainers_of_before_are_still_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for file, before in (("methods-256", "mixed_ghost"), ("opacus-changes", "lean:changes=kept")):
        assert main(["show", str(RESULTS / f"h200-{file}.json")]) == 0
        assert f"\n{before} " in capsys.readouterr().out


class Operators(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.number += not any(each.alias_info for each in func._schema.arguments)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("trainer", ["ghost_lean", "book_keeping"])
def test_bounds_take_no_operator_for_each_layer(
    trainer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of layers of a shape are made together."""
    made = GhostNorms.squared_norms

    def counted(norms: GhostNorms) -> list[Tensor]:
        with operators:
            return made(norms)

    monkeypatch.setattr(GhostNorms, "squared_norms", counted)
    numbers = []
    for layers in (1, 4):
        operators = Operators()
        size = ModelSize(50, 16, layers, 2)
        trains = TRAINERS[trainer](SimpleBigModel(size, max_seq_len=8), batch_size=2)
        trains.train_step(next(iter(get_random_dataloader(batch_size=2, seq_len=8, vocab_size=50))))
        numbers.append(operators.number)
    assert numbers[0] == numbers[1] < 200
