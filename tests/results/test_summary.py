"""Sums, summaries, ratios and rates of the long table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpbench.core.case import Case
from dpbench.core.subject import Script
from dpbench.results.rows import COLUMNS, STEP, Measurement
from dpbench.results.summary import to_frame
from tests.results.figures import summarised

UNITS = {"bytes": "B", "cycles": "1", "seconds": "s", "second": "1/s"}

BYTES = st.floats(1.0, 1e13)
SECONDS = st.floats(1e-6, 1e3)
quickly = settings(deadline=None, max_examples=8)


def rows(
    trainer: str,
    metrics: Mapping[str, float | Iterable[float]],
    *,
    instrument: str = "ncu",
    phase: str = STEP,
    device: str = "H200",
    batch_size: int = 8,
    **case: Any,
) -> list[Measurement]:
    """Measurements of one case; several values of a metric are those of several steps."""
    return [
        Measurement(
            Case(trainer, batch_size, 256, **case),
            instrument,
            phase,
            metric,
            value,
            UNITS[metric.rpartition("_")[2]],
            repeat,
            device,
            "tool 1",
        )
        for metric, values in metrics.items()
        for repeat, value in enumerate(values if isinstance(values, Iterable) else [values])
    ]


def only(frame: pd.DataFrame, column: str = "value", **where: str) -> float:
    """The number in the one row that matches."""
    for name, value in where.items():
        frame = frame[frame[name] == value]
    [found] = frame[column]
    return float(found)


# --- the long table --------------------------------------------------------------------------


def test_frame_has_a_row_for_each_measurement() -> None:
    measurements = rows("dpsgd", {"dram_read_bytes": [5.0, 6.0], "l2_served_bytes": 7.0})
    frame = to_frame(measurements)
    assert list(frame.columns) == COLUMNS
    assert frame.to_dict("records") == [m.as_row() for m in measurements]


def test_frame_of_nothing_still_has_the_columns() -> None:
    assert list(to_frame([]).columns) == COLUMNS
    assert summarised([]).empty


@pytest.mark.parametrize(("sampling", "time", "peak"), [("fixed", 2.0, 9.0), ("poisson", 4.0, 9.0)])
def test_steps_take_their_largest_memory_and_poisson_batches_their_mean_time(
    sampling: str, time: float, peak: float
) -> None:
    of_steps = {"step_time_seconds": [1.0, 2.0, 9.0], "peak_memory_bytes": [1.0, 5.0, 9.0]}
    found = summarised(rows("dpsgd", of_steps, instrument="timing", sampling=sampling))
    assert only(found, metric="step_time_seconds") == time
    assert only(found, metric="peak_memory_bytes") == peak


def test_a_busy_share_of_poisson_batches_is_of_the_step_of_the_same_size() -> None:
    counted = {
        "gpu_busy_cycles": [5.0, 5.0, 5.0],
        "gpu_elapsed_cycles": [10.0, 10.0, 10.0],
        "range_time_seconds": [2.0, 4.0, 8.0],
        "step_time_seconds": [1.0, 4.0, 8.0],
    }
    found = summarised(rows("dpsgd", counted, instrument="cupti", sampling="poisson"))
    assert only(found, metric="gpu_busy_share") == pytest.approx((1.0 + 0.5 + 0.5) / 3)


# --- totals ----------------------------------------------------------------------------------


def test_dram_bytes_are_read_and_written_by_step_and_phase() -> None:
    found = summarised(
        [
            *rows("dpsgd", {"dram_read_bytes": [5.0, 6.0], "dram_write_bytes": [1.0, 2.0]}),
            *rows("dpsgd", {"dram_read_bytes": 3.0, "dram_write_bytes": 4.0}, phase="clip"),
        ]
    )
    totals = found[found.metric == "dram_bytes"]
    assert dict(zip(totals.phase, totals.value, strict=True)) == {STEP: 7.0, "clip": 7.0}
    assert set(totals.unit) == {"B"}


@pytest.mark.parametrize("present", ["dram_read_bytes", "dram_write_bytes", "l2_served_bytes"])
def test_no_total_where_a_part_was_not_measured(present: str) -> None:
    assert [*summarised(rows("dpsgd", {present: 5.0})).metric] == [present]


def test_totals_do_not_add_up_what_belongs_to_different_steps_or_cases() -> None:
    found = summarised(
        [
            *rows("standard", {"dram_read_bytes": 5.0}),
            *rows("dpsgd", {"dram_write_bytes": 5.0}),
            *rows("dpsgd", {"dram_read_bytes": 5.0}, phase="clip"),
            *rows("dpsgd", {"dram_read_bytes": 5.0}, batch_size=16),
            *rows("dpsgd", {"dram_read_bytes": 5.0}, device="A100"),
        ]
    )
    assert "dram_bytes" not in set(found.metric)


# --- summaries -------------------------------------------------------------------------------


@quickly
@given(st.lists(BYTES, min_size=2, max_size=5))
def test_bytes_are_the_mean_over_the_steps(values: list[float]) -> None:
    summary = summarised(rows("dpsgd", {"l2_served_bytes": values}))
    mean = sum(values) / len(values)
    assert only(summary) == pytest.approx(mean)
    assert only(summary, "spread") == pytest.approx((max(values) - min(values)) / mean)


@pytest.mark.parametrize("metric", ["step_time_seconds", "samples_per_second"])
def test_times_and_rates_are_the_median_over_the_steps(metric: str) -> None:
    frame = to_frame(rows("dpsgd", {metric: [1.0, 9.0, 2.0]}, instrument="timing"))
    summary = summarised(frame)
    assert only(summary) == 2.0
    assert only(summary, "spread") == 4.0


def test_equal_steps_have_no_spread_even_at_zero() -> None:
    frame = to_frame(rows("dpsgd", {"l2_served_bytes": [7.0, 7.0], "l2_atomic_bytes": [0.0, 0.0]}))
    assert list(summarised(frame).spread) == [0.0, 0.0]


def busy(forward: float | None = None, **metrics: float | list[float]) -> dict[str, float]:
    """Busy shares by phase; the GPU was busy for 60 of 120 ms in the counted step and forward."""
    counted = {"gpu_busy_cycles": 60.0, "gpu_elapsed_cycles": 120.0, "range_time_seconds": 0.12}
    of_step = rows("dpsgd", {**counted, **metrics}, instrument="cupti")
    timed = {} if forward is None else {"step_time_seconds": forward}
    of_phase = rows("dpsgd", {**counted, **timed}, instrument="cupti", phase="forward")
    summary = summarised([*of_step, *of_phase])
    shares = summary[summary.metric == "gpu_busy_share"]
    return dict(zip(shares.phase, shares.value, strict=True))


def test_a_step_is_busy_for_a_part_of_the_time_that_steps_take_which_are_not_counted() -> None:
    timed = busy(step_time_seconds=[0.08, 0.07, 5.0])
    assert timed == pytest.approx({STEP: 0.75, "forward": 0.5})


def test_so_is_a_phase_that_was_timed() -> None:
    """Its range waits for launches that overlap with earlier work while nothing is counted."""
    assert busy(forward=0.06)["forward"] == pytest.approx(1.0)
    assert busy(forward=0.24)["forward"] == pytest.approx(0.25)


def test_nobody_knows_how_busy_a_step_is_where_none_was_timed() -> None:
    assert busy() == {"forward": 0.5}


def test_no_step_is_busy_for_longer_than_it_takes() -> None:
    assert busy(step_time_seconds=0.0599)[STEP] == 1.0


# --- phases that only some steps have --------------------------------------------------------


def accumulation(instrument: str, metrics: Mapping[str, float]) -> list[Measurement]:
    """Two steps with a backward pass each, and an optimizer's phase in the second only."""
    found: list[Measurement] = []
    for metric, value in metrics.items():
        found += rows("dpsgd", {metric: [value, value]}, phase="backward", instrument=instrument)
        found += rows("dpsgd", {metric: [value, 3 * value]}, instrument=instrument)
        last = rows("dpsgd", {metric: [0, 2 * value]}, phase="optimizer", instrument=instrument)
        found.append(last[1])
    return [replace(row, case=Script("loop")) for row in found]


@pytest.mark.parametrize(
    ("instrument", "metrics", "metric"),
    [
        ("ncu", {"dram_read_bytes": 4.0, "dram_write_bytes": 6.0}, "dram_bytes"),
        ("ncu_kernels", {"kernel_time_seconds": 10.0}, "kernel_time_seconds"),
        ("timing", {"step_time_seconds": 10.0}, "step_time_seconds"),
    ],
)
def test_phases_add_up_to_the_step_if_one_is_in_some_steps_only(
    instrument: str, metrics: dict[str, float], metric: str
) -> None:
    summary = summarised(accumulation(instrument, metrics))
    found = {phase: only(summary, metric=metric, phase=phase) for phase in set(summary.phase)}
    assert found == {"backward": 10.0, "optimizer": 10.0, STEP: 20.0}
    assert only(summary, "spread", metric=metric, phase="optimizer") == 2.0
    assert only(summary, "steps", metric=metric, phase="optimizer") == 2


def test_a_case_of_which_a_step_lacks_a_phase_has_no_number_there() -> None:
    found = [
        *rows("dpsgd", {"dram_read_bytes": [4.0, 4.0]}),
        *rows("dpsgd", {"dram_read_bytes": 4.0}, phase="clip"),
        *rows("dpsgd", {"dram_read_bytes": [4.0, 4.0]}, phase="noise"),
    ]
    assert pd.isna(only(summarised(found), phase="clip"))


def test_a_peak_of_memory_is_no_mean_over_steps_without_the_phase() -> None:
    found = accumulation("torch_profiler", {"phase_peak_memory_bytes": 10.0})
    assert only(summarised(found), phase="optimizer") == 20.0
