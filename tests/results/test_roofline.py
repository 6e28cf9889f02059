"""Which roof bounds a phase, from rows of counting, counters and clocks."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpbench import Case, ConfigurationError
from dpbench.core.subject import Script
from dpbench.results.roofline import (
    COUNTED_BYTES,
    MEASURED_BYTES,
    Roofs,
    apply_roofs,
    find_card,
    intensities,
)
from dpbench.results.rows import STEP, Measurement
from dpbench.results.summary import summary, to_frame
from dpbench.show.roofline import roofline_tables

HERE = "Card"
ROOFS = Roofs(HERE, (HERE,), 1e12, {"fp32": 1e13, "tf32": 1e14, "bf16": 2e14}, "a test")
NOWHERE = "logical (no hardware)"
CASE = Case("dpsgd", 8, 256)


def rows(
    instrument: str, device: str, phases: dict[str, dict[str, float]], case: Case = CASE
) -> list[Measurement]:
    """Rows by phase and metric, with the step's as their sum."""
    whole: dict[str, float] = {}
    for metrics in phases.values():
        for metric, value in metrics.items():
            whole[metric] = whole.get(metric, 0.0) + value
    return [
        Measurement(case, instrument, phase, metric, value, "", 0, device, "")
        for phase, metrics in {**phases, STEP: whole}.items()
        for metric, value in metrics.items()
    ]


def logical(case: Case = CASE, **phases: tuple[float, float]) -> list[Measurement]:
    """Operations and logical bytes by phase."""
    counted = {
        phase: {"flops": f, "logical_read_bytes": b / 2, "logical_write_bytes": b / 2}
        for phase, (f, b) in phases.items()
    }
    return rows("logical", NOWHERE, counted, case)


def dram(case: Case = CASE, device: str = HERE, **phases: float) -> list[Measurement]:
    counted = {p: {"dram_read_bytes": b, "dram_write_bytes": 0.0} for p, b in phases.items()}
    return rows("ncu", device, counted, case)


def times(case: Case = CASE, device: str = HERE, **phases: float) -> list[Measurement]:
    return rows("timing", device, {p: {"step_time_seconds": s} for p, s in phases.items()}, case)


def of(*parts: list[Measurement], roofs: Roofs = ROOFS) -> pd.DataFrame:
    """The roofline of rows, by phase."""
    rows = to_frame(row for part in parts for row in part)
    table = apply_roofs(intensities(summary(rows)), roofs)
    return table.set_index("phase")


def test_the_ridge_divides_what_arithmetic_bounds_from_what_bandwidth_does() -> None:
    """The roofs of the test meet at 10 FLOP/B at fp32."""
    found = of(logical(forward=(11e12, 1e12), clip=(9e12, 1e12), noise=(0.0, 1e12)))
    assert dict(found.bound.drop(STEP)) == {
        "forward": "arithmetic",
        "clip": "bandwidth",
        "noise": "bandwidth",
    }
    assert dict(found.intensity.drop(STEP)) == {"forward": 11.0, "clip": 9.0, "noise": 0.0}
    assert dict(found.least_seconds.drop(STEP)) == {"forward": 1.1, "clip": 1.0, "noise": 1.0}


def test_the_phases_run_one_after_the_other() -> None:
    """Together the step would be under the ridge, and its least time that of its bytes alone."""
    step = of(logical(forward=(20e12, 1e12), noise=(0.0, 2e12))).loc[STEP]
    assert step.bound == "bandwidth"
    assert step.least_seconds == 2.0 + 2.0


@pytest.mark.parametrize(("precision", "seconds"), [("fp32", 4.0), ("tf32", 1.0), ("bf16", 1.0)])
def test_the_precision_chooses_the_arithmetic_roof(precision: str, seconds: float) -> None:
    case = Case("dpsgd", 8, 256, precision=precision)
    assert of(logical(case, forward=(40e12, 1e12))).least_seconds["forward"] == seconds


def test_a_script_of_unknown_precision_has_no_roofline() -> None:
    script = logical(Script("train"), forward=(1e12, 1e12))
    assert {*of(script, logical(forward=(1e12, 1e12))).trainer} == {"dpsgd"}
    with pytest.raises(ConfigurationError, match="its precision is unknown"):
        of(script)


def test_measured_bytes_count_where_there_are_any() -> None:
    found = of(logical(forward=(1e12, 1e12)), dram(forward=4e12))
    assert set(found.bytes_are) == {MEASURED_BYTES}
    assert set(found.device) == {HERE}
    assert found.intensity["forward"] == 0.25


def test_a_measured_time_stands_beside_the_least() -> None:
    found = of(logical(forward=(1e12, 1e12)), dram(forward=1e12), times(forward=2.0)).loc["forward"]
    assert found.share == 0.5
    assert found.flops_per_second == 0.5e12


def test_a_phase_that_waits_for_its_launches_is_bound_no_roof() -> None:
    counted = {
        phase: {"dram_read_bytes": 1e12, "dram_write_bytes": 0.0}
        | {"gpu_busy_cycles": busy, "gpu_elapsed_cycles": 100.0}
        for phase, busy in {"forward": 69.0, "noise": 71.0}.items()
    }
    found = of(logical(forward=(1e12, 1e12), noise=(0.0, 1e12)), rows("cupti", HERE, counted))
    assert dict(found.bound) == {
        "forward": "launch-bound (69%)",
        "noise": "bandwidth",
        STEP: "bandwidth",
    }


def test_bytes_of_ncu_come_before_those_of_cupti() -> None:
    counted = rows("cupti", HERE, {"forward": {"dram_read_bytes": 1e12, "dram_write_bytes": 0.0}})
    found = of(logical(forward=(1e12, 1e12)), counted, dram(forward=4e12))
    assert found.bytes["forward"] == 4e12


def test_a_timed_case_without_counters_keeps_its_logical_bytes() -> None:
    found = of(logical(forward=(1e12, 1e12)), times(forward=4.0)).loc["forward"]
    assert (found.bytes_are, found.device, found.share) == (COUNTED_BYTES, HERE, 0.25)


def test_logical_bytes_alone_fit_under_any_card() -> None:
    found = of(logical(forward=(1e12, 1e12)), roofs=find_card("a100"))
    assert found.least_seconds["forward"] == pytest.approx(1e12 / 2039e9)
    assert found.seconds.isna().all()


@pytest.mark.parametrize("measured", [dram(forward=1e12), times(forward=1.0)])
def test_rows_of_one_card_are_refused_under_the_roofs_of_another(
    measured: list[Measurement],
) -> None:
    with pytest.raises(ConfigurationError, match="measured on Card, so the roofs of NVIDIA H200"):
        of(logical(forward=(1e12, 1e12)), measured, roofs=find_card("h200"))


@pytest.mark.parametrize("measured", [dram(forward=1e12), times(forward=1.0)])
def test_operations_that_were_not_counted_are_an_error(measured: list[Measurement]) -> None:
    with pytest.raises(ConfigurationError, match="no operations were counted for dpsgd-bs8-"):
        of(measured)


def test_operations_of_one_phase_that_were_not_counted_are_an_error() -> None:
    with pytest.raises(ConfigurationError, match="seq256-1b-fp32, phase clip: count the same case"):
        of(logical(forward=(1e12, 1e12)), dram(forward=1e12, clip=1e12))


positive = st.floats(1e3, 1e18)


@settings(max_examples=6, deadline=None)
@given(flops=positive, moved=positive)
def test_the_least_time_is_that_of_the_slower_roof(flops: float, moved: float) -> None:
    found = of(logical(forward=(flops, moved))).loc["forward"]
    assert found.least_seconds >= flops / ROOFS.flops["fp32"]
    assert found.least_seconds >= moved / ROOFS.bandwidth * (1 - 1e-12)
    assert (found.bound == "arithmetic") == (flops / 1e13 > moved / 1e12)


def printed(*parts: list[Measurement], roofs: Roofs = ROOFS) -> list[str]:
    rows = to_frame(row for part in parts for row in part)
    table = apply_roofs(intensities(summary(rows)), roofs)
    return [found.as_text() for found in roofline_tables(table, roofs)]


def test_measured_and_logical_bytes_never_share_a_table() -> None:
    other = Case("standard", 8, 256)
    counted: dict[str, Any] = {"forward": (1e12, 1e12)}
    texts = printed(
        logical(**counted), logical(other, **counted), dram(forward=1e12), times(other, forward=1.0)
    )
    assert len(texts) == 2
    assert any("roofline of measured DRAM bytes" in t and "dpsgd" in t for t in texts)
    assert any("roofline of logical bytes" in t and "standard" in t for t in texts)


def test_the_table_says_what_it_rests_on_and_fits_a_terminal() -> None:
    parts = [
        part
        for trainer in ("standard", "dpsgd_ghost")
        for case in [Case(trainer, 16, 1024)]
        for part in (
            logical(case, backward=(85.2e12, 1600e9), optimizer=(0.0, 16e9)),
            dram(case, device="NVIDIA H200", backward=1311.2e9, optimizer=16e9),
            times(case, device="NVIDIA H200", backward=2.8017, optimizer=0.0042),
        )
    ]
    [text] = printed(*parts, roofs=find_card("h200"))
    assert max(map(len, text.splitlines())) <= 80
    assert "NVIDIA H200: roofline of measured DRAM bytes" in text
    bounds = "4800 GB/s and 67 TFLOP/s at fp32, which are equal bounds at 14.0 FLOP/B"
    assert bounds in " ".join(text.split())
    assert "data sheet" in text
    first = text.splitlines()[5].split()
    assert first == ["standard", "85.2", "1327.2", "64.2", "arithmetic", "1275.0", "2805.9", "45%"]
