"""What the findings and the guide say of their tables without a number, held to the same runs."""

from __future__ import annotations

import pytest

from bench import upstream
from bench.cells import Place, gb, ms, peak, ratio
from bench.rank_tables import COUNTED_RANKS, SENT
from bench.runs import collectives, printed, value
from bench.tables import METHODS, MODELS, OPACUS, OWN, PLACES, PRIVATE, over_counted, seen, spread


def test_fused_costs_little_more_than_a_standard_step() -> None:
    times = [ratio(ms, place, "fused") for place in METHODS]
    assert (f"{min(times):.2f}", f"{max(times):.2f}") == ("1.03", "1.17")
    assert [ratio(peak, place, "fused") < 1.1 for place in METHODS] == [True, True, False, True]


def test_one_example_at_a_time_saves_memory_at_long_sequences() -> None:
    place = METHODS[1]
    found = [f"{ratio(metric, place, 'micro_batch'):.2f}" for metric in (ms, peak)]
    assert (place.shown, found) == ("8 × 1024, fp32", ["1.18", "0.47"])


def test_one_copy_accounts_for_most_bytes_that_diffs_save_of_flat_clipping() -> None:
    opacus, every, kept = (
        printed("upstream.txt", n, "dpsgd")[1] for n in ("Opacus", "all", "kept")
    )
    assert opacus - kept > 0.5 * (opacus - every)


def test_no_diff_changes_an_update() -> None:
    changed = {*upstream.SHARDED, "norms", "all"}
    for page in {*upstream.names()} - changed:
        for trainer in ("dpsgd", "dpsgd_ghost"):
            assert printed("upstream.txt", page, trainer)[0] < 1e-5


def test_ghost_clipping_saves_memory_but_hardly_time_or_long_sequences_bytes() -> None:
    for place in PLACES:
        time, moved, memory = (ratio(m, place, "dpsgd_ghost", "dpsgd") for m in (ms, gb, peak))
        assert memory < 0.7
        assert (time < 1) == (place.shown == "8 × 256, tf32")
        assert moved == pytest.approx(1, abs=0.1) or not place.cell.endswith("1024")


@pytest.mark.slow
def test_fast_gradient_clipping_moves_the_most_bytes_in_every_model() -> None:
    for file in MODELS:
        moved = {trainer: gb(Place(file), trainer) for trainer in OPACUS}
        assert max(moved, key=moved.__getitem__) == "dpsgd_fgc"


def test_flat_clippings_ratio_falls_as_batches_grow() -> None:
    pairs = [(f"{model}-256", f"{model}-512") for model in ("gpt2", "llama")]
    for small, large in (*pairs, ("vit-32", "vit-64")):
        assert ratio(gb, Place(large), "dpsgd") < ratio(gb, Place(small), "dpsgd")


@pytest.mark.slow
def test_counts_are_close_in_small_batches_of_short_sequences_and_otherwise_a_floor() -> None:
    for name, ratios in over_counted().items():
        if name.endswith("8 × 256"):
            assert ratios == pytest.approx([1] * len(OPACUS), abs=0.14), name
            assert (max(ratios) < 0.91) == name.startswith("GPT-2"), name
        else:
            assert min(ratios) > 1, name


def test_forward_and_optimizer_are_the_same_for_all() -> None:
    for phase in ("forward", "optimizer"):
        moved = [gb(METHODS[0], trainer, phase) for trainer in (*OPACUS, "fused")]
        assert max(moved) / min(moved) < 1.01


@pytest.mark.slow
def test_sessions_differ_in_bytes_by_less_than_1_percent() -> None:
    for place in PLACES:
        assert (spread(seen(gb, place, trainer) for trainer in OPACUS) or 0) < 0.01


def test_under_ddp_all_send_the_same_and_opacus_in_more_calls() -> None:
    for trainer in ("dpsgd", "dpsgd_ghost", "fused"):
        sent, standard = (
            value(COUNTED_RANKS, SENT, trainer=name, parallel="ddp", gpus=64)
            for name in (trainer, "standard")
        )
        assert sent == standard
    calls = {
        trainer: collectives(COUNTED_RANKS, trainer=trainer, parallel="ddp", gpus=64)
        for trainer in ("standard", "dpsgd", "fused")
    }
    assert calls["standard"] < calls["fused"] < calls["dpsgd"]


def test_every_private_trainer_was_measured_in_four_cells() -> None:
    assert all(ms(place, trainer) > 0 for place in METHODS for trainer in (*PRIVATE, *OWN))


def test_drawing_noise_again_moves_no_bytes_and_needs_no_memory() -> None:
    place = Place("banded-256", "8x256", "fp32")
    for metric in (gb, peak):
        assert abs(metric(place, "fused:bands=8,noise=banded") - metric(place, "fused")) < 0.1
