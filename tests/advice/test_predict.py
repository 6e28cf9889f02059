"""Predicted times, against steps of one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dpbench.advice.footprint import Count, Footprint
from dpbench.advice.predict import (
    BANDWIDTH_SHARE,
    DRAWN_OPERATIONS,
    KERNEL_SECONDS,
    OPERATOR_SECONDS,
    measured_operator_seconds,
    predict,
)
from dpbench.core.case import Case
from dpbench.core.gpu import visible_gpus
from dpbench.results.roofline import CARDS, find_card, reachable

H200 = reachable(find_card("h200"))


def step(*calls: Any, in_graphs: bool = False, precision: str = "fp32") -> Footprint:
    case = Case("dpsgd", 2, 8, precision=precision)
    return Footprint(case, [Count(2, calls, [], 0, in_graphs)])


def call(
    times: int = 1, size: int = 0, flops: int = 0, dtype: str = "", phase: str = "clip",
    operator: str = "aten.mm",
) -> tuple[Any, ...]:  # fmt: skip
    return phase, operator, times, size, 0, flops, 0, dtype


def test_bytes_take_at_least_their_time_at_the_bandwidth_of_a_copy() -> None:
    seconds = predict(step(call(size=10**12)), H200)
    assert seconds.roofline == pytest.approx(1e12 / H200.bandwidth)
    assert seconds.predicted == pytest.approx(seconds.roofline / BANDWIDTH_SHARE + KERNEL_SECONDS)


def test_launches_take_the_time_of_the_host() -> None:
    seconds = predict(step(call(times=100)), H200, operator_seconds=1e-4)
    assert seconds.launches == seconds.predicted == pytest.approx(1e-2)


@pytest.mark.skipif(bool(visible_gpus()), reason="a GPU is visible")
def test_without_a_gpu_no_time_is_measured(tmp_path: Path) -> None:
    assert measured_operator_seconds(tmp_path) is None


@pytest.mark.parametrize(
    ("precision", "dtype", "operator", "rate"),
    [
        ("fp32", "float32", "aten.mm", "fp32"),
        ("tf32", "float32", "aten.mm", "tf32"),
        ("tf32", "float32", "aten._scaled_dot_product_efficient_attention", "fp32"),
        ("bf16", "bfloat16", "aten.mm", "bf16"),
        ("bf16-amp", "bfloat16", "aten.mm", "bf16"),
        ("bf16-amp", "float32", "aten.mm", "fp32"),
        ("fp32", "float16", "aten.mm", "bf16"),
        ("fp32", "float64", "aten.mm", "fp32"),
    ],
)
def test_products_run_at_the_rate_of_their_operands(
    precision: str, dtype: str, operator: str, rate: str
) -> None:
    one = step(call(flops=10**15, dtype=dtype, operator=operator), precision=precision)
    assert predict(one, H200).roofline == pytest.approx(1e15 / H200.flops[rate])


def test_each_call_is_bound_by_the_longer_of_the_two() -> None:
    apart = [call(size=10**12), call(flops=10**14, dtype="float32")]
    together = call(size=10**12, flops=10**14, dtype="float32")
    assert predict(step(*apart), H200).roofline > predict(step(together), H200).roofline


@pytest.mark.parametrize(("precision", "size"), [("fp32", 4), ("bf16", 2)])
def test_each_band_of_noise_takes_the_time_to_draw_it_once_more(precision: str, size: int) -> None:
    numbers, operator = 10**9, "dpbench.noisy_update"
    moved = numbers * (4 + size), numbers * size  # the sum is in float32
    update = "optimizer", operator, 1, *moved, 0, 0, ""

    def seconds(trainer: str) -> float:
        counts = [Count(2, [update], [], 0, True)]
        return predict(Footprint(Case(trainer, 2, 8, precision=precision), counts), H200).predicted

    many, fewer = (seconds(f"fused:bands={n},noise=banded") for n in (32, 31))
    assert many - fewer == pytest.approx(numbers * DRAWN_OPERATIONS / H200.flops["fp32"])
    assert many - seconds("fused") < 31 * (many - fewer)


def test_many_small_calls_wait_for_python_unless_they_are_in_graphs() -> None:
    calls = call(times=1000, size=4)
    eager, graphs = (predict(step(calls, in_graphs=each), H200) for each in (False, True))
    assert eager.predicted == eager.launches == pytest.approx(1000 * OPERATOR_SECONDS)
    assert graphs.launches == 0
    assert graphs.predicted == pytest.approx(1000 * KERNEL_SECONDS, rel=0.01)


def test_a_phase_that_waits_for_python_gains_nothing_from_another() -> None:
    small, large = call(times=1000, size=4), call(size=10**12, phase="backward")
    both = predict(step(small, large), H200).predicted
    parts = [predict(step(each), H200).predicted for each in (small, large)]
    assert both == pytest.approx(sum(parts))


@pytest.mark.parametrize("name", CARDS)
def test_what_a_card_reaches_is_below_its_data_sheet(name: str) -> None:
    card, reached = CARDS[name], reachable(CARDS[name])
    assert 0.8 < reached.bandwidth / card.bandwidth < 1
    assert all(0.6 < reached.flops[each] / card.flops[each] < 0.8 for each in card.flops)


def test_what_an_h200_reaches_was_measured() -> None:
    assert H200.bandwidth == pytest.approx(4283e9, rel=1e-3)
    assert H200.flops["bf16"] == pytest.approx(672.7e12, rel=1e-3)
