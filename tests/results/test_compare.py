"""Two runs side by side."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpbench.case import Case
from dpbench.errors import ConfigurationError
from dpbench.results.compare import compare, describe, judge, unapplied
from dpbench.results.frame import to_frame
from dpbench.results.rows import STEP, Measurement
from dpbench.results.run import Run
from dpbench.results.threshold import Threshold

H200 = "NVIDIA H200"
GRID1 = Run.load(Path(__file__).parents[2] / "docs/results/h200-grid1.json").frame
AGAIN = Run.load(Path(__file__).parents[2] / "docs/results/h200-grid1-two-steps.json").frame


def measured(
    values: dict[tuple[str, str, str], float], instrument: str = "ncu", device: str = H200
) -> pd.DataFrame:
    """A long table of {(trainer, metric, phase): value}."""
    return to_frame(
        Measurement(Case(t, 8, 256), instrument, phase, metric, value, "B", 0, device, "")
        for (t, metric, phase), value in values.items()
    )


def dram(trainer: str, value: float, phase: str = STEP) -> dict[tuple[str, str, str], float]:
    """DRAM bytes, half of them read."""
    names = ("dram_read_bytes", "dram_write_bytes")
    return {(trainer, name, phase): value / 2 for name in names}


BEFORE = dram("standard", 100) | dram("dpsgd", 400) | dram("dpsgd", 90, "clip")


def changes(before: pd.DataFrame, after: pd.DataFrame) -> dict[tuple[str, str, str], float]:
    found = compare(before, after)
    keys = zip(found.trainer, found.metric, found.phase, strict=True)
    return dict(zip(keys, found.relative, strict=True))


def test_each_metric_ratio_and_phase_is_compared() -> None:
    found = changes(measured(BEFORE), measured(BEFORE | dram("dpsgd", 500)))
    assert found["standard", "dram_bytes", STEP] == 0
    assert found["dpsgd", "dram_bytes", STEP] == 0.25
    assert found["dpsgd", "dram_write_bytes", STEP] == 0.25
    assert found["dpsgd", "dram_ratio", STEP] == 0.25
    assert found["dpsgd", "dram_bytes", "clip"] == 0
    assert ("standard", "dram_ratio", STEP) not in found


def test_only_cases_that_both_measured_are_compared() -> None:
    found = compare(
        measured(BEFORE | dram("dpsgd_fgc", 5)), measured(BEFORE | dram("dpsgd_ghost", 5))
    )
    assert set(found.trainer) == {"standard", "dpsgd"}


@pytest.mark.parametrize("across", [False, True])
def test_nothing_is_compared_with_nothing(across: bool) -> None:
    nothing, something = to_frame([]), measured(BEFORE)
    for pair in ((nothing, something), (something, nothing)):
        found = compare(*pair, across=across, checked=True)
        assert found.empty
        assert judge(found, [Threshold.parse("dram_ratio:5%")]).empty


def test_regressions_are_those_beyond_their_threshold() -> None:
    found = compare(measured(BEFORE), measured(BEFORE | dram("dpsgd", 500)))
    thresholds = [
        Threshold.parse(text)
        for text in ("dram_bytes:25%", "dram_bytes:24%", "dram_ratio:0.5", "dram_bytes@clip:0%")
    ]
    verdict = judge(found, thresholds)
    assert {(row.trainer, row.threshold) for row in verdict[verdict.regressed].itertuples()} == {
        ("dpsgd", "dram_bytes:24%"),
        ("dpsgd", "dram_ratio:0.5"),
    }
    assert len(verdict) == 2 + 2 + 1 + 1
    dpsgd = verdict[verdict.trainer == "dpsgd"]
    assert dict(zip(dpsgd.threshold, dpsgd.limit, strict=True)) == {
        "dram_bytes:25%": 100,
        "dram_bytes:24%": 96,
        "dram_ratio:0.5": 0.5,
        "dram_bytes@clip:0%": 0,
    }


def test_number_that_is_gone_is_a_regression_and_no_zero() -> None:
    after = {key: value for key, value in BEFORE.items() if key[2] != "clip"}
    verdict = judge(
        compare(measured(BEFORE), measured(after)), [Threshold.parse("dram_bytes@clip:5%")]
    )
    [row] = verdict.itertuples()
    assert row.regressed
    assert math.isnan(row.after)


def test_ratio_without_its_baseline_cannot_pass() -> None:
    alone = {key: value for key, value in BEFORE.items() if key[0] == "dpsgd"}
    verdict = judge(compare(measured(BEFORE), measured(alone)), [Threshold.parse("dram_ratio:5%")])
    assert verdict.regressed.all()


def test_threshold_that_nothing_is_measured_for_is_named() -> None:
    found = compare(measured(BEFORE), measured(BEFORE))
    thresholds = [Threshold.parse("dram_bytes:5%"), Threshold.parse("step_time_seconds:5%")]
    assert unapplied(found, thresholds) == thresholds[1:]


# --- different premises ----------------------------------------------------------------------


def test_different_devices_and_instruments_are_refused() -> None:
    before = measured(BEFORE)
    for other in (
        measured(BEFORE, device="NVIDIA A100"),
        measured(BEFORE, "logical", device="logical (no hardware)"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            compare(before, other)
        assert describe(other) in str(caught.value)
        assert "--across" in str(caught.value)


def test_devices_are_compared_on_request_and_labelled() -> None:
    found = compare(measured(BEFORE), measured(BEFORE, device="NVIDIA A100"), across=True)
    assert set(found.device) == {"NVIDIA H200 -> NVIDIA A100"}
    assert (found.change == 0).all()


def test_logical_bytes_are_compared_with_measured_ones_on_request_and_labelled() -> None:
    logical = {
        (trainer, metric.replace("dram", "logical"), phase): value * 0.9
        for (trainer, metric, phase), value in BEFORE.items()
    }
    found = compare(measured(BEFORE), measured(logical, "logical", "none"), across=True)
    assert set(found.instrument) == {"ncu -> logical"}
    assert set(found.device) == {"NVIDIA H200 -> none"}
    step = found[(found.metric == "dram_bytes") & (found.phase == STEP)]
    assert dict(zip(step.trainer, step.after, strict=True)) == {"standard": 90, "dpsgd": 360}
    assert found[found.metric == "dram_ratio"].relative.abs().max() < 1e-12


def test_shared_instrument_is_compared_with_itself() -> None:
    both = pd.concat([measured(BEFORE), measured(BEFORE, "timing")])
    assert set(compare(both, measured(BEFORE, "timing")).instrument) == {"timing"}
    assert set(compare(both, measured(BEFORE, "timing"), across=True).instrument) == {"timing"}


# --- what always holds -----------------------------------------------------------------------

some_numbers = st.fixed_dictionaries(
    {
        (trainer, metric, phase): st.floats(1, 1e15)
        for trainer in ("standard", "dpsgd")
        for metric in ("dram_read_bytes", "dram_write_bytes", "l2_total_bytes")
        for phase in (STEP, "backward")
    }
)
STRICT = [
    Threshold.parse(f"{name}{where}:±0%")
    for name in ("dram_bytes", "dram_ratio", "l2_total_bytes", "l2_ratio")
    for where in ("", "@backward")
]


@settings(deadline=None, max_examples=15)
@given(values=some_numbers)
def test_run_compared_with_itself_never_regresses(
    values: dict[tuple[str, str, str], float],
) -> None:
    run = measured(values)
    verdict = judge(compare(run, run), STRICT)
    assert len(verdict) == 12
    assert not verdict.regressed.any()


@settings(deadline=None, max_examples=15)
@given(before=some_numbers, after=some_numbers, power=st.integers(-10, 10))
def test_unit_of_measurement_does_not_matter(
    before: dict[tuple[str, str, str], float],
    after: dict[tuple[str, str, str], float],
    power: int,
) -> None:
    scaled = [measured({k: v * 2.0**power for k, v in run.items()}) for run in (before, after)]
    assert changes(*scaled) == changes(measured(before), measured(after))


def test_two_runs_of_grid1_on_one_gpu_agree() -> None:
    thresholds = [Threshold.parse("dram_bytes:±1%"), Threshold.parse("dram_ratio:±1%")]
    verdict = judge(compare(GRID1, AGAIN), thresholds)
    assert len(verdict) == 16 + 12
    assert not verdict.regressed.any()
