"""Over ranks the gradient is that of the joint batch, and each element's noise is drawn once."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.verify.over_ranks import ROWS, WIDTH, over_ranks, run, small

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


COUNTED = [
    "dpsgd@ddp",
    "lean:changes=noise@ddp",
    "lean@ddp",
    "book_keeping@ddp",
    "fused@ddp",
    "dpsgd_ghost@fsdp2",
    "ghost_lean:changes=unused@fsdp2",
    "ghost_lean:changes=noise@fsdp2",
    "ghost_lean:changes=gather@fsdp2",
    "ghost_lean:changes=blocks@fsdp2",
    "ghost_lean@fsdp2",
]
PARAMETERS = 2 * ROWS * WIDTH + WIDTH**2 + 3 * WIDTH


@cache
def found(ranks: int) -> dict[str, Any]:
    """What is wrong, of all trainers here, and counts: they share the processes of the ranks."""
    others = [*REFUSED, *(f"{FAULTY}:{name}" for name in ("OverRanks@ddp", *FAULTS))]
    pairs = RIGHT[ranks] + (others if ranks == 2 else [])
    with TemporaryDirectory() as folder:
        return over_ranks(pairs, COUNTED if ranks == 2 else [], ranks, Path(folder))


def wrong(pair: str, ranks: int = 2) -> dict[str, list[str]]:
    of_pair: dict[str, list[str]] = found(ranks)["wrong"][pair]
    return of_pair


def count(pair: str, what: str) -> int:
    of_pair: int = found(2)["counts"][pair][what]
    return of_pair


@pytest.mark.parametrize(("ranks", "pair"), [(n, pair) for n in RIGHT for pair in RIGHT[n]])
def test_gradients_are_those_of_the_joint_batch_and_noise_is_drawn_once(
    ranks: int, pair: str
) -> None:
    assert wrong(pair, ranks) == {}


@pytest.mark.parametrize("pair", REFUSED)
def test_what_cannot_be_parallel_is_refused_with_what_can(pair: str) -> None:
    [refused] = wrong(pair)["refused"]
    assert f"does not train under parallel={pair.partition('@')[2]}: " in refused
    assert REFUSED[pair] in refused


def test_a_right_trainer_of_ones_own_passes() -> None:
    assert wrong(f"{FAULTY}:OverRanks@ddp") == {}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_between_ranks_is_named(fault: str) -> None:
    check, said = FAULTS[fault]
    assert said in "\n".join(wrong(f"{FAULTY}:{fault}")[check])


def test_the_command_compares_ranks_with_those_of_another_run(tmp_path: Path) -> None:
    code, text = run(["verify", *small(f"{FAULTY}:NoiseOfEachRank", 2)], tmp_path)
    assert code == 1
    assert re.search(r"^noise: steps, runs, processes +ok ", text, re.MULTILINE)
    assert re.search(r"^ranks agree +ok +2 ranks", text, re.MULTILINE)
    assert "noise: deviation: head.weight: 1.4" in text


def test_under_ddp_ranks_share_the_drawing_and_small_gradients_one_reduction() -> None:
    assert count("dpsgd@ddp", "drawn") == PARAMETERS  # in rank 0 alone
    for trainer in ("lean:changes=noise@ddp", "lean@ddp", "book_keeping@ddp"):
        assert PARAMETERS / 2 <= count(trainer, "drawn") < 0.6 * PARAMETERS  # some for alignment
    assert count("dpsgd@ddp", "calls") == count("lean:changes=noise@ddp", "calls") == 6
    for trainer in ("lean@ddp", "book_keeping@ddp", "fused@ddp"):
        assert count(trainer, "calls") == 1


def test_under_fsdp2_each_change_to_ghost_clipping_saves_what_it_says() -> None:
    whole = 4 * PARAMETERS
    opacus, all_changes = "dpsgd_ghost@fsdp2", "ghost_lean@fsdp2"
    assert count(opacus, "bytes") == 5 * whole  # gathered three times, reduced twice
    assert count(opacus, "drawn") == PARAMETERS  # in every rank
    assert count("ghost_lean:changes=unused@fsdp2", "bytes") == 4 * whole
    assert count("ghost_lean:changes=gather@fsdp2", "bytes") == 5 * whole - 2 * 4 * ROWS * WIDTH
    assert count("ghost_lean:changes=blocks@fsdp2", "calls") < count(opacus, "calls")
    for trainer in ("ghost_lean:changes=noise@fsdp2", all_changes):
        assert PARAMETERS / 2 <= count(trainer, "drawn") < 0.6 * PARAMETERS
    assert count(all_changes, "bytes") < 0.8 * count(opacus, "bytes")
