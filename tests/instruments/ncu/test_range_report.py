"""Reading real reports, and refusing what is not one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dpbench import Case, CaseReport, InstrumentError
from dpbench.core.metrics import Counters, Metric
from dpbench.core.subject import Script
from dpbench.instruments.counters import CounterUnknown, on_chip, resolve
from dpbench.instruments.ncu.report import (
    ForeignReport,
    ReportUnreadable,
    case_of,
    load_actions,
    read,
    read_kernels,
    write_description,
)
from dpbench.results.rows import STEP

DATA = Path(__file__).parents[2] / "data" / "tiny-fp32"
STANDARD, DPSGD = (DATA / f"report_{t}_bs4_seq64.ncu-rep" for t in ("standard", "dpsgd"))


def report(path: Path) -> CaseReport:
    return CaseReport.of(case_of(path), read(path, case_of(path)))


@pytest.mark.parametrize(
    "case",
    [
        Case("dpsgd:clip=per_layer", 8, workload="resnet", set={"depth": 18}),
        Case("theirs", 1, 7, "32000x1024x12x16", "bf16", "dp_mha", "net", trainable="a-b/c?"),
        Script("train/one", 8),
    ],
    ids=lambda case: case.id,
)
def test_a_file_beside_a_report_says_its_case_whatever_its_path(case: Case, tmp_path: Path) -> None:
    report = tmp_path / "renamed.ncu-rep"
    write_description(report, case, {"instrument": "ncu"})
    assert case_of(report) == case
    report.with_suffix(".json").write_text('{"case": {"trainer": "dpsgd"}}')
    with pytest.raises(ForeignReport, match=r"renamed\.json does not describe a case"):
        case_of(report)


def test_a_report_without_such_a_file_is_called_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "1b-fp32/report_dpsgd_bs8_seq256.ncu-rep"
    assert case_of(path) == Script(str(path))


def test_a_report_holds_every_byte_metric_by_phase_and_for_the_step() -> None:
    rows = read(DPSGD, case_of(DPSGD))
    phases = {"forward", "backward", "clip", "noise", "optimizer", "outside"}
    found = {(row.phase, row.metric) for row in rows}
    assert found == {(phase, name) for phase in {*phases, STEP} for name in on_chip()}
    assert {row.repeat for row in rows} == {0}
    assert {row.device for row in rows} == {"NVIDIA H200"}
    assert {row.unit for row in rows} == {"B"}


@pytest.mark.parametrize("metric", list(on_chip()))
def test_phases_add_up_to_the_step(metric: str) -> None:
    measured = report(DPSGD)
    assert measured.phases[metric].sum() == pytest.approx(measured.value(metric), rel=1e-12)


def test_values_are_those_that_nsight_compute_saved() -> None:
    """Sectors of 32 bytes over the forward range, read here through the library itself."""
    import ncu_report

    context = ncu_report.load_report(str(STANDARD))
    total = 0
    for profiled in context:
        for action in profiled:
            state = action.nvtx_state()
            domains = [state.domain_by_id(i) for i in state.domains()]
            if any("0.forward" in domain.start_end_ranges() for domain in domains):
                total += action["lts__t_sectors_op_atom.sum"].value()
                total += action["lts__t_sectors_op_red.sum"].value()
    assert report(STANDARD).value("l2_atomic_bytes", "forward") == 32 * total > 0


def test_a_missing_counter_is_an_error_and_never_a_zero() -> None:
    with pytest.raises(CounterUnknown, match="sm__cycles_active"):
        read(DPSGD, case_of(DPSGD), resolve(["sm__cycles_active.sum"]))


def test_a_counter_without_a_value_is_an_error_and_never_saved() -> None:
    empty = Metric("rate_of_nothing", how=Counters(("dram__bytes_read.sum",), math.nan))
    with pytest.raises(CounterUnknown, match=r"rate_of_nothing of step 0, phase outside, is nan"):
        read(DPSGD, case_of(DPSGD), [empty])


def test_a_report_that_cannot_be_opened_is_named() -> None:
    unreadable = Path("/proc/self/mem")  # a file, whose first bytes nobody may read
    with pytest.raises(ReportUnreadable, match="/proc/self/mem: Input/output error"):
        load_actions(unreadable)
    with pytest.raises(ReportUnreadable, match="a folder"):
        load_actions(unreadable.parent)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 0.9999])
def test_a_truncated_report_is_an_error(share: float, tmp_path: Path) -> None:
    """NVIDIA's library reads it as a report with fewer ranges, and says nothing."""
    whole = DPSGD.read_bytes()
    path = tmp_path / "cut.ncu-rep"
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(InstrumentError, match=r"cut\.ncu-rep") as caught:
        read(path, Case("dpsgd", 1, 1))
    if share > 0.1:
        assert "the report is truncated" in str(caught.value)
        with pytest.raises(ReportUnreadable, match="is truncated"):
            read_kernels(path)


def test_something_that_is_no_report_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "text.ncu-rep"
    path.write_text("hello\n" * 1000)
    with pytest.raises(ReportUnreadable):
        read(path, Case("dpsgd", 1, 1))
