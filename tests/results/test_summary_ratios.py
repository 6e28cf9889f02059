"""Ratios to the baseline, and throughputs, out of the long table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpbench.results.rows import STEP, Measurement
from dpbench.results.summary import summary, to_frame
from tests.results.figures import summarised
from tests.results.test_summary import BYTES, SECONDS, only, quickly, rows

# --- ratios ----------------------------------------------------------------------------------


def ratios(measurements: Iterable[Measurement]) -> pd.DataFrame:
    return summarised(measurements)


@quickly
@given(BYTES, BYTES)
def test_ratio_is_against_the_standard_trainer_whose_own_is_one(
    standard: float, dpsgd: float
) -> None:
    found = ratios(
        [
            *rows("dpsgd", {"l2_served_bytes": dpsgd}),
            *rows("standard", {"l2_served_bytes": standard}),
        ]
    )
    assert only(found, "ratio", trainer="standard") == 1.0
    assert only(found, "ratio", trainer="dpsgd") == pytest.approx(dpsgd / standard)


def test_every_metric_and_phase_has_its_own_ratio() -> None:
    found = ratios(
        [
            *rows("standard", {"dram_read_bytes": 2.0, "dram_write_bytes": 2.0}),
            *rows("dpsgd", {"dram_read_bytes": 4.0, "dram_write_bytes": 6.0}),
            *rows("standard", {"dram_read_bytes": 1.0}, phase="backward"),
            *rows("dpsgd", {"dram_read_bytes": 4.0}, phase="backward"),
            *rows("standard", {"step_time_seconds": 2.0}, instrument="timing"),
            *rows("dpsgd", {"step_time_seconds": 20.0}, instrument="timing"),
        ]
    )
    found = found[found.trainer == "dpsgd"]
    assert only(found, "ratio", phase=STEP, metric="dram_read_bytes") == 2.0
    assert only(found, "ratio", phase=STEP, metric="dram_write_bytes") == 3.0
    assert only(found, "ratio", phase=STEP, metric="dram_bytes") == 2.5
    assert only(found, "ratio", phase="backward", metric="dram_read_bytes") == 4.0
    assert only(found, "ratio", metric="step_time_seconds") == 10.0


@pytest.mark.parametrize(
    "baseline",
    [
        {"device": "A100"},
        {"attention": "dp_mha"},
        {"instrument": "logical"},
        {"phase": "forward"},
    ],
    ids=lambda difference: next(iter(difference)),
)
def test_what_was_measured_otherwise_is_no_baseline(baseline: dict[str, Any]) -> None:
    found = ratios(
        [
            *rows("standard", {"l2_served_bytes": 2.0}, **baseline),
            *rows("dpsgd", {"l2_served_bytes": 4.0}),
        ]
    )
    assert pd.isna(only(found, "ratio", trainer="dpsgd"))
    assert only(found, "ratio", trainer="standard") == 1.0


def test_no_ratio_without_a_baseline() -> None:
    assert ratios(rows("dpsgd", {"l2_served_bytes": 4.0})).ratio.isna().all()


def test_no_ratio_to_a_baseline_that_moved_nothing() -> None:
    found = ratios(
        [*rows("standard", {"l2_atomic_bytes": 0.0}), *rows("dpsgd", {"l2_atomic_bytes": 4.0})]
    )
    assert found.ratio.isna().all()


def test_ratios_are_to_the_trainer_that_is_the_baseline() -> None:
    values = {"dpsgd": 4.0, "standard": 2.0, "own": 8.0}
    named = [row for name, v in values.items() for row in rows(name, {"l2_served_bytes": v})]
    found = summary(to_frame(named), "dpsgd")
    ratios = found[found.metric == "l2_served_ratio"].set_index("trainer").value.to_dict()
    assert ratios == {"dpsgd": 1.0, "standard": 0.5, "own": 2.0}


# --- throughputs -----------------------------------------------------------------------------


def throughputs(measurements: Iterable[Measurement]) -> pd.DataFrame:
    every = summary(to_frame(measurements))
    return every[every.kind == "throughput"]


@quickly
@given(st.lists(BYTES, min_size=1, max_size=3), st.lists(SECONDS, min_size=3, max_size=3))
def test_throughput_is_mean_bytes_over_the_median_step_time(
    counted: list[float], seconds: list[float]
) -> None:
    rates = throughputs(
        [
            *rows("dpsgd", {"dram_read_bytes": counted}),
            *rows("dpsgd", {"step_time_seconds": seconds}, instrument="timing"),
        ]
    )
    mean, median = sum(counted) / len(counted), sorted(seconds)[1]
    assert only(rates, metric="dram_read_throughput") == pytest.approx(mean / median)


def test_throughput_says_that_its_factors_come_from_two_processes() -> None:
    rates = throughputs(
        [
            *rows("dpsgd", {"dram_read_bytes": 6.0, "dram_write_bytes": 4.0}),
            *rows("dpsgd", {"step_time_seconds": 2.0}, instrument="timing"),
        ]
    )
    assert dict(zip(rates.metric, rates.value, strict=True)) == {
        "dram_read_throughput": 3.0,
        "dram_write_throughput": 2.0,
        "dram_throughput": 5.0,
    }
    assert set(rates.unit) == {"B/s"}
    assert {*zip(rates.instrument, rates.timed_by, strict=True)} == {("ncu", "timing")}


def test_no_throughput_without_a_step_time() -> None:
    assert throughputs(rows("dpsgd", {"dram_read_bytes": 6.0})).empty


def test_no_throughput_from_the_time_of_a_phase_or_the_bytes_of_another_instrument() -> None:
    measurements = [
        *rows("dpsgd", {"dram_read_bytes": 6.0}, phase="clip"),
        *rows("dpsgd", {"peak_memory_bytes": 6.0}, instrument="timing"),
        *rows("dpsgd", {"step_time_seconds": 2.0}, instrument="timing"),
        *rows("standard", {"dram_read_bytes": 6.0}),
        *rows("standard", {"step_time_seconds": 2.0}, instrument="timing", phase="clip"),
    ]
    assert throughputs(measurements).empty


@pytest.mark.parametrize("other", [{"device": "A100"}, {"batch_size": 16}])
def test_no_throughput_from_the_time_of_another_case_or_device(other: dict[str, Any]) -> None:
    measurements = [
        *rows("dpsgd", {"dram_read_bytes": 6.0}),
        *rows("dpsgd", {"step_time_seconds": 2.0}, instrument="timing", **other),
    ]
    assert throughputs(measurements).empty
