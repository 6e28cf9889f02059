"""Over ranks the gradient is that of the joint batch, and each element's noise is drawn once."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.verify.over_ranks import ROWS, WIDTH, over_ranks, run, small

FAULTY = "tests.verify.faulty_ranks"
APART, LEAN_APART = (f"tests.verify.over_ranks:{each}" for each in ("Apart", "LeanApart"))

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
    "lean:changes=noise@ddp",
    "lean:changes=reduce@ddp",
    "ghost_lean@ddp",
    "mixed_ghost@ddp",
    "book_keeping@ddp",
    "micro_batch@ddp",
    "micro_batch:vmap=true@ddp",
    f"{APART}@ddp",
    f"{APART}@ddp@adamw",
    f"{APART}@fsdp2",
    f"{APART}@fsdp2@adamw",
    f"{LEAN_APART}@ddp",
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

THREE_RANKS = [
    "standard@fsdp2",
    "dpsgd@ddp",
    "dpsgd_ghost@fsdp2",
    "lean@ddp",
    "fused@ddp",
    f"{APART}@fsdp2",
    "ghost_lean@fsdp2",
]

RIGHT = {
    "of Opacus": (2, ["standard@ddp", "standard@fsdp2", *OF_OPACUS]),
    "of ours": (2, [*OF_OURS, *SOME_CHANGES, f"{FAULTY}:OverRanks@ddp"]),
    "three ranks": (3, THREE_RANKS),
}
"""Those that are verified in the same processes, and in how many: these take a second to start."""

OPACUS_NORMS = ("dpsgd_ghost", "dpsgd_fgc", "ghost_lean:changes=")
"""Trainers with Opacus's norms, which tokens that are alike cancel."""

REFUSED = {
    "dpsgd:clip=per_layer,grad_sample=functorch@ddp": "Unexpected grad_sample_mode: functorch",
    "dpsgd@fsdp2": "use fused, book_keeping, dpsgd_ghost, ghost_lean or mixed_ghost, or parallel",
    "dpsgd_fgc@fsdp2": "use fused, book_keeping, ",
    "lean@fsdp2": "use fused, book_keeping, ",
    "micro_batch@fsdp2": "use fused, book_keeping, ",
    f"{FAULTY}:Looped@ddp": "its spread(model) must say how ranks share a model",
}
FAULTS = {
    "NoiseOfEachRank@ddp": ("noise: deviation", "head.weight: 2."),
    "NoiseAfterReduction@ddp": ("ranks agree", "head.weight: ranks differ after a step"),
    "ReducedTwice@ddp": ("gradient, half clipped", "2 times the mean of gradients clipped flat"),
    "MeanOfSums@ddp": ("gradient, half clipped", "0.5 times the mean of gradients clipped flat"),
    "ThresholdOfRank@ddp": (
        "gradient in 2 parts, all clipped",
        "0.5 times the mean of gradients clipped flat",
    ),
    "OneNotReduced@ddp": ("ranks agree", "head.weight: ranks differ after a step"),
    "SharesOfOneSeed@ddp": ("noise: elements", "elements further on in"),
    "FirstPassKept@fsdp2": ("gradient, half clipped", "head.weight: off by 0."),
    "ShardsOfOneSeed@fsdp2": ("noise: elements", "elements further on in"),
    "ShardsOfDefaultGenerator@fsdp2": ("noise: elements", "elements further on in"),
    "FusedShardsOfOneSeed@fsdp2": ("noise: elements", "elements further on in"),
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
    "standard@fsdp2",
    "fused@fsdp2",
    f"{APART}@ddp",
    f"{APART}@fsdp2",
    f"{LEAN_APART}@ddp",
]
PARAMETERS = 2 * ROWS * WIDTH + WIDTH**2 + 3 * WIDTH


def wrong(pairs: Iterable[str], ranks: int, folder: Path) -> dict[str, dict[str, list[str]]]:
    """What is wrong with trainers, by check."""
    found: dict[str, dict[str, list[str]]] = over_ranks([*pairs], [], ranks, folder)["wrong"]
    return found


@pytest.mark.parametrize(("ranks", "pairs"), RIGHT.values(), ids=RIGHT)
def test_gradients_are_those_of_the_joint_batch_and_noise_is_drawn_once(
    ranks: int, pairs: list[str], tmp_path: Path
) -> None:
    found = wrong(pairs, ranks, tmp_path)
    of_opacus = [pair for pair in pairs if pair.startswith(OPACUS_NORMS)]
    for pair in of_opacus:
        found[pair].pop("tokens alike", None)
    assert found == {pair: {} for pair in pairs}


def test_what_cannot_be_parallel_is_refused_with_what_can(tmp_path: Path) -> None:
    found = wrong(REFUSED, 2, tmp_path)
    for pair, said in REFUSED.items():
        [refused] = found[pair]["refused"]
        assert f"does not train under parallel={pair.partition('@')[2]}: " in refused
        assert said in refused


def test_a_fault_between_ranks_is_named(tmp_path: Path) -> None:
    found = wrong([f"{FAULTY}:{name}" for name in FAULTS], 2, tmp_path)
    for name, (check, said) in FAULTS.items():
        assert said in "\n".join(found[f"{FAULTY}:{name}"][check]), name


def test_the_command_compares_ranks_with_those_of_another_run(tmp_path: Path) -> None:
    code, text = run(["verify", *small(f"{FAULTY}:NoiseOfEachRank", 2)], tmp_path)
    assert code == 1
    assert re.search(r"^noise: parameters, steps, runs, processes +ok ", text, re.MULTILINE)
    assert re.search(r"^ranks agree +ok +2 ranks", text, re.MULTILINE)
    assert "noise: deviation: head.weight: 2." in text  # ranks are seeded alike in that run


def test_each_change_saves_what_it_says(tmp_path: Path) -> None:
    counts = over_ranks([], COUNTED, 2, tmp_path)["counts"]
    calls, sent, drawn = (
        {pair: counts[pair][what] for pair in COUNTED} for what in ("calls", "bytes", "drawn")
    )
    # Under DDP ranks share the drawing, and small gradients one reduction.
    assert drawn["dpsgd@ddp"] == PARAMETERS  # in rank 0 alone
    for trainer in ("lean:changes=noise@ddp", "lean@ddp", "book_keeping@ddp"):
        assert PARAMETERS / 2 <= drawn[trainer] < 0.6 * PARAMETERS  # some for alignment
    assert calls["dpsgd@ddp"] == calls["lean:changes=noise@ddp"] == 6
    assert calls["lean@ddp"] == calls["book_keeping@ddp"] == calls["fused@ddp"] == 1
    # Under FSDP2 Opacus gathers three times, reduces twice, and draws for all shards in each rank.
    opacus, all_changes = "dpsgd_ghost@fsdp2", "ghost_lean@fsdp2"
    assert (sent[opacus], drawn[opacus]) == (5 * 4 * PARAMETERS, PARAMETERS)
    assert sent["ghost_lean:changes=unused@fsdp2"] == 4 * 4 * PARAMETERS
    assert sent["ghost_lean:changes=gather@fsdp2"] == sent[opacus] - 2 * 4 * ROWS * WIDTH
    assert calls["ghost_lean:changes=blocks@fsdp2"] < calls[opacus]
    for trainer in ("ghost_lean:changes=noise@fsdp2", all_changes):
        assert PARAMETERS / 2 <= drawn[trainer] < 0.6 * PARAMETERS
    assert sent[all_changes] < 0.8 * sent[opacus]
    # Of fused only the sums are reduced, and as evenly as FSDP2 does it.
    for trainer in ("fused@fsdp2", f"{APART}@fsdp2"):
        assert sent[trainer] == sent["standard@fsdp2"]
    # Sums are reduced while others are computed, but for those of small parameters, which are one.
    orders = {pair: counts[pair]["order"].lstrip("m") for pair in COUNTED}
    assert orders["dpsgd@ddp"].strip("r") == orders["fused@ddp"].strip("r") == ""
    for trainer in (f"{APART}@ddp", f"{APART}@fsdp2", f"{LEAN_APART}@ddp"):
        assert re.fullmatch("r(m+r)+", orders[trainer]), (trainer, orders[trainer])
