"""What the pages say of several GPUs without a number, held to the committed runs."""

from __future__ import annotations

from itertools import product

import pytest

from bench.cells import busy, gb, ms, peak, ratio
from bench.rank_tables import COUNTED_RANKS, PLACES, SENT, TRAINERS, of_8b, payload
from bench.runs import of_rank, value

DDP = {"precision": "fp32", "parallel": "ddp"}


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_the_payload_is_what_was_counted(parallel: str) -> None:
    for trainer in ("standard", *TRAINERS[parallel]):
        counted = value(COUNTED_RANKS, SENT, gpus=2, trainer=trainer, parallel=parallel)
        for place in PLACES[parallel]:
            share = {"fp32": 1.0, "bf16": 0.5}[place.precision]
            assert payload(place, trainer) == pytest.approx(share * counted, rel=0.005)


def test_the_payload_of_an_8b_model_is_what_is_counted() -> None:
    [place] = PLACES["8b"]
    for trainer in ("standard", "fused"):
        *_, counted = of_8b("fsdp2", 4096, 2, trainer)
        assert payload(place, trainer) == pytest.approx(counted, rel=0.01)


def test_with_lora_opacus_sends_twice_the_payload_of_standard_and_fused_the_same() -> None:
    place = PLACES["ddp_lora"][-1]
    assert ratio(payload, place, "fused") == pytest.approx(1, abs=0.01)
    for trainer in ("dpsgd", "dpsgd_ghost"):
        assert ratio(payload, place, trainer) == pytest.approx(2, rel=0.05)


def seconds(metric: str, trainer: str, rank: int) -> float:
    return of_rank("ranks-profile-ddp", metric, rank, trainer=trainer, **DDP)


def test_standard_training_and_fused_hide_their_collectives_and_opacus_exposes_all() -> None:
    for rank in (0, 1):
        shares = {
            trainer: seconds("exposed_communication_seconds", trainer, rank)
            / seconds("communication_seconds", trainer, rank)
            for trainer in ("standard", *TRAINERS["ddp"])
        }
        assert max(shares["standard"], shares["fused"]) < 0.05
        assert min(shares["dpsgd"], shares["dpsgd_ghost"]) > 0.99


def test_under_fsdp2_standard_training_and_fused_hide_their_collectives() -> None:
    for rank, trainer in product((0, 1), ("standard", "fused")):
        together, exposed = (
            of_rank("ranks-profile-fsdp2", metric, rank, trainer=trainer)
            for metric in ("communication_seconds", "exposed_communication_seconds")
        )
        assert exposed < 0.1 * together


def test_rank_0_draws_the_noise() -> None:
    for trainer in ("dpsgd", "dpsgd_ghost"):
        written = [
            of_rank("ranks-ddp-256", "dram_write_bytes", rank, "noise", trainer=trainer, **DDP)
            for rank in (0, 1)
        ]
        assert written[0] > 3 * written[1]


def test_rank_1_reads_and_writes_each_gradient_once_in_noise() -> None:
    gradients = value(COUNTED_RANKS, SENT, gpus=2, trainer="standard", parallel="ddp")
    for trainer, side in product(("dpsgd", "dpsgd_ghost"), ("read", "write")):
        axes = {"trainer": trainer, **DDP}
        moved = of_rank("ranks-ddp-256", f"dram_{side}_bytes", 1, "noise", **axes)
        assert moved == pytest.approx(gradients, rel=0.01)


def test_rank_1_waits_for_the_noise_unless_its_python_is_slower() -> None:
    waited = {t: [seconds("communication_seconds", t, r) for r in (0, 1)] for t in TRAINERS["ddp"]}
    python = {t: [seconds("cpu_time_seconds", t, r) for r in (0, 1)] for t in waited}
    assert waited["dpsgd"][1] > 2 * waited["dpsgd"][0]
    assert waited["dpsgd_ghost"][0] > 2 * waited["dpsgd_ghost"][1]
    assert python["dpsgd_ghost"][1] > python["dpsgd_ghost"][0]


def test_fused_moves_fewer_bytes_than_standard_training_in_less_memory() -> None:
    for place in PLACES["ddp"]:
        assert ratio(gb, place, "fused") < 1
        assert ratio(peak, place, "fused") < 1


def test_at_bf16_private_steps_wait_for_python_but_not_those_of_fused() -> None:
    for parallel in ("ddp", "fsdp2"):
        [place] = [p for p in PLACES[parallel] if (p.cell, p.precision) == ("8x256", "bf16")]
        for trainer in TRAINERS[parallel]:
            assert (busy(place, trainer) > 0.9) == (trainer == "fused"), trainer


def test_under_fsdp2_opacus_waits_at_fp32_and_fused_does_not() -> None:
    place = PLACES["fsdp2"][0]
    shares = {trainer: busy(place, trainer) for trainer in ("standard", *TRAINERS["fsdp2"])}
    assert shares.pop("dpsgd_ghost") < 0.7
    assert min(shares.values()) > 0.95
    assert ratio(ms, place, "dpsgd_ghost") > 2 * ratio(ms, place, "fused")


def test_under_fsdp2_fused_sends_what_standard_sends_in_at_most_1_15_times_its_time() -> None:
    for place in PLACES["fsdp2"]:
        assert ratio(ms, place, "fused") <= 1.15
        sent = [payload(place, t) for t in ("fused", "standard")]
        assert sent[0] == pytest.approx(sent[1], rel=0.02)


def test_fused_keeps_whole_gradients_of_8b_under_fsdp2_so_more_ranks_save_less_memory() -> None:
    peaks = {
        t: [of_8b("fsdp2", 4096, gpus, t)[1] for gpus in (4, 64)] for t in ("standard", "fused")
    }
    few, many = (fused / of for of, fused in zip(*peaks.values(), strict=True))
    assert many > few > 1
    layers = 32 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336)
    assert peaks["fused"][1] > 2 * layers > peaks["standard"][1]


def test_float32_sums_of_fused_double_the_bytes_of_sums_of_8b() -> None:
    lora, shards = (
        [of_8b(parallel, 4096, 64, trainer)[2] for trainer in ("standard", "fused")]
        for parallel in ("ddp", "fsdp2")
    )
    assert lora[1] == pytest.approx(2 * lora[0], rel=0.001)
    of_three = shards[0] / 3  # parameters are gathered twice, and gradients are summed once
    assert shards[1] - shards[0] == pytest.approx(of_three, rel=0.05)
