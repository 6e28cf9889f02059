"""Over ranks the gradient is that of the joint batch, and each element's noise is drawn once."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.verify.over_ranks import Wrong, wrong_over_ranks

FAULTY = "tests.verify.faulty"

OF_OPACUS = [
    "dpsgd@ddp",
    "dpsgd:grad_sample=functorch@ddp",
    "dpsgd:grad_sample=ew@ddp",
    "dpsgd:clip=per_layer@ddp",
    "dpsgd:clip=per_layer,grad_sample=ew@ddp",
    "dpsgd_ghost@ddp",
    "dpsgd_fgc@ddp",
    "dpsgd_ghost@fsdp2",
]
OF_OURS = [
    "lean@ddp",
    "lean:changes=noise@ddp",
    "lean:changes=reduce@ddp",
    "ghost_lean@ddp",
    "mixed_ghost@ddp",
    "book_keeping@ddp",
    "micro_batch@ddp",
    "micro_batch:vmap=true@ddp",
    "fused@ddp",
    "ghost_lean@fsdp2",
]
SOME_CHANGES = [
    "ghost_lean:changes=unused+none@fsdp2",
    "ghost_lean:changes=noise@fsdp2",
    "ghost_lean:changes=taken+gather+bias@fsdp2",
    "ghost_lean:changes=noise@ddp",
    "ghost_lean:changes=reduce+taken@ddp",
]
"""Those that meet another of Opacus's optimizers than all of them together do."""

RIGHT = {
    2: ["standard@ddp", "standard@fsdp2", *OF_OPACUS, *OF_OURS, *SOME_CHANGES],
    3: ["standard@fsdp2", *OF_OPACUS[:1], *OF_OPACUS[-1:], *OF_OURS[:1], *OF_OURS[-2:]],
}
REFUSED = {
    "dpsgd:clip=per_layer,grad_sample=functorch@ddp": "Unexpected grad_sample_mode: functorch",
    "dpsgd@fsdp2": "use dpsgd_ghost, ghost_lean or mixed_ghost, or parallel=ddp",
    "dpsgd_fgc@fsdp2": "use dpsgd_ghost, ghost_lean or mixed_ghost, or parallel=ddp",
    "lean@fsdp2": "use dpsgd_ghost, ghost_lean or mixed_ghost, or parallel=ddp",
    "fused@fsdp2": "use dpsgd_ghost, ghost_lean or mixed_ghost, or parallel=ddp",
    f"{FAULTY}:Looped@ddp": "its spread(model) must say how ranks share a model",
}
FAULTS = {
    "NoiseOfEachRank@ddp": ("noise: deviation", "1.41"),
    "NoiseAfterReduction@ddp": ("ranks agree", "head.weight: ranks differ after a step"),
    "ReducedTwice@ddp": ("gradient, half clipped", "2 times the mean of gradients clipped flat"),
    "MeanOfSums@ddp": ("gradient, half clipped", "0.5 times the mean of gradients clipped flat"),
    "ThresholdOfRank@ddp": (
        "gradient in 2 parts, all clipped",
        "0.5 times the mean of gradients clipped flat",
    ),
    "OneNotReduced@ddp": ("ranks agree", "head.weight: ranks differ after a step"),
    "SharesOfOneSeed@ddp": ("noise: ranks", "elements further on (r = "),
    "ShardsOfOneSeed@fsdp2": ("noise: ranks", "elements further on (r = "),
}


@cache
def found(ranks: int) -> dict[str, Wrong]:
    """What is wrong, of all trainers here: they share the processes of the ranks."""
    others = [*REFUSED, *(f"{FAULTY}:{name}" for name in ("OverRanks@ddp", *FAULTS))]
    pairs = RIGHT[ranks] + (others if ranks == 2 else [])
    with TemporaryDirectory() as folder:
        return wrong_over_ranks(pairs, ranks, Path(folder))


@pytest.mark.parametrize(("ranks", "pair"), [(n, pair) for n in RIGHT for pair in RIGHT[n]])
def test_gradients_are_those_of_the_joint_batch_and_noise_is_drawn_once(
    ranks: int, pair: str
) -> None:
    assert found(ranks)[pair] == {}


@pytest.mark.parametrize("pair", REFUSED)
def test_what_cannot_be_parallel_is_refused_with_what_can(pair: str) -> None:
    [refused] = found(2)[pair]["refused"]
    assert f"does not train under parallel={pair.partition('@')[2]}: " in refused
    assert REFUSED[pair] in refused


def test_a_right_trainer_of_ones_own_passes() -> None:
    assert found(2)[f"{FAULTY}:OverRanks@ddp"] == {}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_between_ranks_is_named(fault: str) -> None:
    check, said = FAULTS[fault]
    assert said in "\n".join(found(2)[f"{FAULTY}:{fault}"][check])
