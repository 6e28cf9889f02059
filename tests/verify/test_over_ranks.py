"""Over ranks the gradient is that of the joint batch, and each element's noise is drawn once."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.verify.over_ranks import ROWS, WIDTH, over_ranks, run, small

FAULTY = "tests.verify.faulty_ranks"
APART = "tests.verify.over_ranks:Apart"
PLAIN = "fused:graphs=false,kernels=false"

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
    f"{PLAIN}@ddp",
    "micro_batch@ddp",
    f"{APART}@ddp",
    f"{APART}@ddp@adamw",
    f"{APART}@fsdp2",
    f"{APART}@fsdp2@adamw",
    f"{PLAIN}@fsdp2",
]
THREE_RANKS = [
    "standard@fsdp2",
    "dpsgd@ddp",
    "dpsgd_ghost@fsdp2",
    f"{PLAIN}@ddp",
    "fused@ddp",
    f"{APART}@fsdp2",
]

RIGHT = {
    "of Opacus": (2, ["standard@ddp", "standard@fsdp2", *OF_OPACUS]),
    "of ours": (2, [*OF_OURS, f"{FAULTY}:OverRanks@ddp"]),
    "three ranks": (3, THREE_RANKS),
}
"""Number of ranks, and the trainers verified in one launch, which takes a second."""
SOME_RIGHT = [f"{PLAIN}@ddp", f"{APART}@fsdp2"]

OPACUS_NORMS = ("dpsgd_ghost", "dpsgd_fgc")
"""Trainers with Opacus's ghost norms, in which similar tokens cancel."""

REFUSED = {
    "dpsgd:clip=per_layer,grad_sample=functorch@ddp": "Unexpected grad_sample_mode: functorch",
    "dpsgd@fsdp2": "use fused or dpsgd_ghost, or parallel=ddp",
    "dpsgd_fgc@fsdp2": "use fused or dpsgd_ghost, ",
    "micro_batch@fsdp2": "use fused or dpsgd_ghost, ",
    f"{FAULTY}:Looped@ddp": "the trainer does not override distribute(model)",
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
    "SharesOfOneSeed@ddp": ("noise: elements", "the noise repeats after"),
    "FirstPassKept@fsdp2": ("gradient, half clipped", "head.weight: off by 0."),
    "ShardsOfOneSeed@fsdp2": ("noise: elements", "the noise repeats after"),
    "ShardsOfDefaultGenerator@fsdp2": ("noise: elements", "the noise repeats after"),
    "FusedShardsOfOneSeed@fsdp2": ("noise: elements", "the noise repeats after"),
}


SOME_FAULTS = ("NoiseOfEachRank@ddp", "FusedShardsOfOneSeed@fsdp2")

COUNTED = [
    "dpsgd@ddp",
    f"{PLAIN}@ddp",
    "fused@ddp",
    "dpsgd_ghost@fsdp2",
    f"{PLAIN}@fsdp2",
    "standard@fsdp2",
    "fused@fsdp2",
    f"{APART}@ddp",
    f"{APART}@fsdp2",
]
PARAMETERS = 2 * ROWS * WIDTH + WIDTH**2 + 3 * WIDTH


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "pairs"), RIGHT.values(), ids=RIGHT)
def test_gradients_are_those_of_the_joint_batch_and_noise_is_drawn_once(
    ranks: int, pairs: list[str], tmp_path: Path
) -> None:
    found = over_ranks(pairs, [], ranks, tmp_path, layer=True)["wrong"]
    for pair in pairs:
        if pair.startswith(OPACUS_NORMS):
            found[pair].pop("tokens alike", None)
    assert found == {pair: {} for pair in pairs}


@pytest.mark.slow
def test_of_each_kind_one_is_right_refused_or_named(tmp_path: Path) -> None:
    faulty = [f"{FAULTY}:{name}" for name in SOME_FAULTS]
    record = over_ranks([*SOME_RIGHT, *REFUSED, *faulty], COUNTED, 2, tmp_path)
    found = record["wrong"]
    assert [found[pair] for pair in SOME_RIGHT] == [{}] * len(SOME_RIGHT)
    for pair, said in REFUSED.items():
        [refused] = found[pair]["refused"]
        assert f"does not train under parallel={pair.partition('@')[2]}: " in refused
        assert said in refused
    check_faults(SOME_FAULTS, record)
    check_counts(record["counts"])


@pytest.mark.slow
def test_a_fault_between_ranks_is_named(tmp_path: Path) -> None:
    others = sorted(FAULTS.keys() - SOME_FAULTS)
    check_faults(others, over_ranks([f"{FAULTY}:{name}" for name in others], [], 2, tmp_path))


def check_faults(names: Iterable[str], record: dict[str, Any]) -> None:
    for name in names:
        check, said = FAULTS[name]
        pair = f"{FAULTY}:{name}"
        assert said in "\n".join(record["wrong"][pair][check]), name
        # Rank 0 judges the noise for all.
        in_rank_1 = record["ranks"][1]["wrong"][pair]
        assert [*in_rank_1] == [c for c in record["wrong"][pair] if not c.startswith("noise")], name


@pytest.mark.slow
def test_the_command_compares_ranks_with_those_of_another_run(tmp_path: Path) -> None:
    code, text = run(["verify", *small(f"{FAULTY}:NoiseOfEachRank", 2)], tmp_path)
    assert code == 1
    assert re.search(r"^noise: parameters, steps, runs, processes +ok ", text, re.MULTILINE)
    assert re.search(r"^ranks agree +ok +2 ranks", text, re.MULTILINE)
    assert "noise: deviation: head.weight: 2." in text  # that run seeds ranks alike


def check_counts(counts: dict[str, dict[str, Any]]) -> None:
    """Check that less is drawn, sent and called."""
    calls, sent, drawn = (
        {pair: counts[pair][what] for pair in COUNTED} for what in ("calls", "bytes", "drawn")
    )
    # Under DDP ranks share the drawing, and small gradients share one reduction.
    assert drawn["dpsgd@ddp"] == PARAMETERS  # by rank 0 only
    assert PARAMETERS / 2 <= drawn[f"{PLAIN}@ddp"] < 0.6 * PARAMETERS  # with padding
    assert calls["dpsgd@ddp"] == 6
    assert calls[f"{PLAIN}@ddp"] == calls["fused@ddp"] == 1
    # Under FSDP2 Opacus gathers three times, reduces twice, and each rank draws all noise.
    opacus, ours = "dpsgd_ghost@fsdp2", f"{PLAIN}@fsdp2"
    assert (sent[opacus], drawn[opacus]) == (5 * 4 * PARAMETERS, PARAMETERS)
    assert PARAMETERS / 2 <= drawn[ours] < 0.6 * PARAMETERS
    assert calls[ours] < calls[opacus]
    # `fused` reduces only the sums, in as even parts as FSDP2.
    for trainer in ("fused@fsdp2", f"{APART}@fsdp2"):
        assert sent[trainer] == sent["standard@fsdp2"]
    # A sum is reduced while the next is computed; those of small parameters are reduced as one.
    orders = {pair: counts[pair]["order"].lstrip("m") for pair in COUNTED}
    assert orders["dpsgd@ddp"].strip("r") == orders["fused@ddp"].strip("r") == ""
    for trainer in (f"{APART}@ddp", f"{APART}@fsdp2"):
        assert re.fullmatch("r+(m+r+)+", orders[trainer]), (trainer, orders[trainer])
