"""One measured case as the object that a test asserts on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from dpbench.core.case import Case
from dpbench.core.errors import ConfigurationError
from dpbench.results.kernels import OperatorCount
from dpbench.results.outcome import Outcome
from dpbench.results.report import CaseReport
from dpbench.results.rows import STEP, Measurement

UNITS = {"bytes": "B", "seconds": "s", "second": "1/s"}
STEP_METRICS = {"dram_read_bytes": [5e9, 7e9], "dram_write_bytes": [2e9, 4e9]}


def rows(
    case: Case, metrics: dict[str, list[float]], *, phase: str = STEP, device: str = "H200"
) -> list[Measurement]:
    return [
        Measurement(
            case,
            "timing" if "second" in metric else "ncu",
            phase,
            metric,
            value,
            UNITS[metric.rpartition("_")[2]],
            repeat,
            device,
            "tool 1",
        )
        for metric, values in metrics.items()
        for repeat, value in enumerate(values)
    ]


def report(
    trainer: str = "dpsgd",
    metrics: dict[str, list[float]] = STEP_METRICS,
    *,
    device: str = "H200",
    **case: Any,
) -> CaseReport:
    chosen = Case(trainer, **{"batch_size": 8, "seq_len": 256, **case})
    return CaseReport.of(chosen, rows(chosen, metrics, device=device))


def phased(trainer: str, **phases: float) -> CaseReport:
    """A report with DRAM bytes and times by phase."""
    case = Case(trainer, batch_size=8, seq_len=256)
    measured = [
        row
        for phase, value in phases.items()
        for row in rows(
            case,
            {"dram_read_bytes": [value], "dram_write_bytes": [value], "step_time_seconds": [value]},
            phase=phase,
        )
    ]
    return CaseReport.of(case, measured)


def refusal(attempt: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        attempt()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_value_is_the_mean_over_the_steps() -> None:
    assert report().value("dram_read_bytes") == 6e9


def test_time_is_the_median_over_the_steps() -> None:
    assert report(metrics={"step_time_seconds": [1.0, 9.0, 2.0]}).value("step_time_seconds") == 2.0


def test_dram_bytes_are_read_and_written() -> None:
    assert report().dram_bytes == 9e9


def test_metric_that_was_not_measured_is_refused_with_those_that_were() -> None:
    assert refusal(lambda: report().value("l2_bytes")) == (
        "dpsgd-bs8-seq256-1b-fp32: 'l2_bytes' was not measured for 'step'; "
        "measured: dram_bytes, dram_read_bytes, dram_write_bytes"
    )


def test_dram_bytes_without_one_of_the_parts_are_refused() -> None:
    half = report(metrics={"dram_read_bytes": [5e9]})
    assert refusal(lambda: half.dram_bytes).endswith("measured: dram_read_bytes")


def test_phase_that_was_not_measured_is_refused() -> None:
    assert refusal(lambda: report().value("dram_bytes", "clip")).endswith(
        "'dram_bytes' was not measured for 'clip'; measured: nothing"
    )


def test_empty_report_is_refused_not_read_as_zero() -> None:
    assert "measured: nothing" in refusal(lambda: report(metrics={}).dram_bytes)


# --- phases ----------------------------------------------------------------------------------


def test_phases_come_in_the_order_of_a_step() -> None:
    phases = phased("dpsgd", outside=1, noise=2, optimizer=3, clip=4, backward=5, forward=6).phases
    assert list(phases.index) == ["forward", "backward", "clip", "noise", "optimizer", "outside"]
    assert list(phases.dram_bytes) == [12, 10, 8, 4, 6, 2]


def test_phases_have_what_was_counted_and_no_times() -> None:
    phases = phased("dpsgd", forward=1, backward=2).phases
    assert set(phases.columns) == {"dram_read_bytes", "dram_write_bytes", "dram_bytes"}


def test_phases_leave_out_the_whole_step_and_what_did_not_happen() -> None:
    case = Case("standard", batch_size=8, seq_len=256)
    measured = [*rows(case, STEP_METRICS), *rows(case, STEP_METRICS, phase="forward")]
    assert list(CaseReport.of(case, measured).phases.index) == ["forward"]


def test_counter_that_one_phase_lacks_is_not_a_number_there() -> None:
    case = Case("standard", batch_size=8, seq_len=256)
    measured = [
        *rows(case, {"l2_served_bytes": [3.0]}, phase="forward"),
        *rows(case, {"dram_read_bytes": [5.0]}, phase="backward"),
    ]
    phases = CaseReport.of(case, measured).phases
    assert phases.loc["forward", "l2_served_bytes"] == 3.0
    assert pd.isna(phases.loc["backward", "l2_served_bytes"])


# --- ratios ----------------------------------------------------------------------------------


def test_ratio_is_how_many_times_the_baseline() -> None:
    baseline = report("standard", {"dram_read_bytes": [1e9], "dram_write_bytes": [2e9]})
    assert report().ratio_to(baseline) == 3.0
    assert report().ratio_to(baseline, "dram_read_bytes") == 6.0
    assert baseline.ratio_to(baseline) == 1.0


def test_ratio_can_be_that_of_a_phase() -> None:
    dpsgd, standard = phased("dpsgd", backward=6), phased("standard", backward=2)
    assert dpsgd.ratio_to(standard, phase="backward") == 3.0


def test_two_private_trainers_can_be_compared() -> None:
    assert report("dpsgd_ghost").ratio_to(report("dpsgd")) == 1.0


@pytest.mark.parametrize(
    "other",
    [
        {"batch_size": 16},
        {"seq_len": 512},
        {"model_size": "small"},
        {"precision": "bf16"},
        {"attention": "dp_mha"},
    ],
    ids=lambda difference: next(iter(difference)),
)
def test_no_ratio_between_different_configurations(other: dict[str, Any]) -> None:
    baseline = report("standard", **other)
    message = refusal(lambda: report().ratio_to(baseline))
    assert message.startswith(f"{report().case.id} and {baseline.case.id} differ")


def test_no_ratio_between_different_devices() -> None:
    message = refusal(lambda: report().ratio_to(report("standard", device="A100")))
    assert "H200" in message
    assert "A100" in message


@pytest.mark.parametrize("missing", ["dpsgd", "standard"])
def test_no_ratio_of_a_metric_that_one_of_them_lacks(missing: str) -> None:
    full = {**STEP_METRICS, "l2_served_bytes": [5.0]}
    reports = {
        name: report(name, STEP_METRICS if name == missing else full)
        for name in ("dpsgd", "standard")
    }
    message = refusal(lambda: reports["dpsgd"].ratio_to(reports["standard"], "l2_served_bytes"))
    assert message.startswith(f"{missing}-bs8-seq256-1b-fp32: 'l2_served_bytes' was not measured")


def test_no_ratio_to_a_baseline_that_moved_nothing() -> None:
    idle = report("standard", {"l2_atomic_bytes": [0.0]})
    busy = report("dpsgd", {"l2_atomic_bytes": [5.0]})
    assert "standard-bs8" in refusal(lambda: busy.ratio_to(idle, "l2_atomic_bytes"))


# --- counted, not measured -------------------------------------------------------------------


def counted(trainer: str = "dpsgd", clone_bytes: int = 30) -> CaseReport:
    """A report of logical bytes: those of one clone and one product."""
    case = Case(trainer, batch_size=8, seq_len=256)
    operators = (
        OperatorCount("backward", "aten.mm", 1, 6, 4, 100),
        OperatorCount("clip", "aten.clone", 3, clone_bytes, clone_bytes, 0),
    )
    metrics = {
        phase: {"logical_read_bytes": [c.read_bytes], "logical_write_bytes": [c.write_bytes]}
        for c in operators
        for phase in (c.phase,)
    }
    metrics[STEP] = {
        "logical_read_bytes": [6 + clone_bytes],
        "logical_write_bytes": [4 + clone_bytes],
    }
    measured = [
        replace(row, instrument="logical", device="logical (no hardware)")
        for phase, values in metrics.items()
        for row in rows(case, values, phase=phase)
    ]
    return CaseReport.of_outcome(
        Outcome(case, tuple(measured), 1.0, operators=operators, notes=("a note",))
    )


def test_counted_bytes_are_logical_bytes_by_phase_too() -> None:
    assert counted().logical_bytes == 70
    assert dict(counted().phases.logical_bytes) == {"backward": 10, "clip": 60}
    assert counted().notes == ("a note",)


def test_ratio_of_counted_reports_is_that_of_their_logical_bytes() -> None:
    assert counted().ratio_to(counted("standard", clone_bytes=0)) == 7


def test_counted_and_measured_have_no_ratio() -> None:
    message = refusal(lambda: counted().ratio_to(report("standard"), "logical_bytes"))
    assert "standard-bs8-seq256-1b-fp32: 'logical_bytes' was not measured" in message


def both(trainer: str, measured: dict[str, list[float]]) -> CaseReport:
    """A report of a case that was counted and measured."""
    case = Case(trainer, batch_size=8, seq_len=256)
    logical = {"logical_read_bytes": [3.0], "logical_write_bytes": [1.0]}
    rows_of_counting = [
        replace(row, instrument="logical", device="logical (no hardware)")
        for row in rows(case, {**logical, "peak_memory_bytes": [1.0]})
    ]
    return CaseReport.of(case, [*rows_of_counting, *rows(case, {**STEP_METRICS, **measured})])


def test_case_that_was_measured_and_counted_has_the_measured_peak_and_both_ratios() -> None:
    dpsgd = both("dpsgd", {"peak_memory_bytes": [60.0]})
    standard = both("standard", {"peak_memory_bytes": [12.0]})
    assert dpsgd.value("peak_memory_bytes") == 60.0
    assert dpsgd.ratio_to(standard, "peak_memory_bytes") == 5.0
    assert dpsgd.ratio_to(standard) == 1.0
    assert dpsgd.ratio_to(standard, "logical_bytes") == 1.0


def test_no_ratio_of_a_measured_peak_to_a_predicted_one() -> None:
    dpsgd, standard = both("dpsgd", {"peak_memory_bytes": [60.0]}), both("standard", {})
    message = refusal(lambda: dpsgd.ratio_to(standard, "peak_memory_bytes"))
    assert message.endswith("different devices, H200 and logical (no hardware)")


def test_value_by_two_devices_is_refused() -> None:
    case = report().case
    two = [*rows(case, STEP_METRICS), *rows(case, STEP_METRICS, device="A100")]
    message = refusal(lambda: CaseReport.of(case, two).dram_bytes)
    assert "ncu on H200" in message
    assert "ncu on A100" in message


def test_operators_are_a_table_by_phase_and_operator_the_largest_first() -> None:
    table = counted().operators
    assert list(table.index) == [("clip", "aten.clone"), ("backward", "aten.mm")]
    assert table.logical_bytes["clip", "aten.clone"] == 60
    assert dict(table.loc["backward", "aten.mm"]) == {
        "calls": 1,
        "logical_read_bytes": 6,
        "logical_write_bytes": 4,
        "flops": 100,
        "collective_bytes": 0,
        "logical_bytes": 10,
    }


def test_operators_of_a_measured_case_are_refused() -> None:
    assert refusal(lambda: report().operators).endswith(
        "operators were not counted; the logical instrument counts them"
    )


# --- for people ------------------------------------------------------------------------------


def test_printed_report_is_every_metric_by_phase() -> None:
    head, phases, *lines = str(report()).splitlines()
    assert head == "dpsgd-bs8-seq256-1b-fp32, per step and phase:"
    assert phases.split() == ["phase", "step"]
    assert lines[1].split() == ["ncu", "H200", "dram_bytes", "B", "9e+09"]


def test_report_in_an_assertion_is_one_line() -> None:
    assert repr(report()).startswith("CaseReport(case=Case(trainer='dpsgd', batch_size=8")
    assert "\n" not in repr(report())
