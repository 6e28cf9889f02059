"""The instrument, from its argument list to its rows, beside a stand-in for nsys."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpbench import Case
from dpbench.child.messages import Steps
from dpbench.core.errors import CaseFailed
from dpbench.instruments.nsys import nsys
from dpbench.instruments.nsys.nsys import Nsys, timeline_of, timeline_rows
from dpbench.instruments.nsys.timeline import NothingTraced
from dpbench.results.outcome import Outcome
from dpbench.results.rows import STEP
from dpbench.results.summary import own_values, summary, to_frame
from tests.instruments.nsys.recording import Recording, case_recording
from tests.programs import program, reports

CASE = Case("dpsgd", 2, 16, "tiny")
STAND_IN = """
import shutil, sys
from pathlib import Path
command, *arguments = sys.argv[1:]
if command == "export":
    shutil.copy(arguments[-1], arguments[arguments.index("--output") + 1])
elif command == "profile":
    recorded = {recorded!r}
    [output] = [a.partition("=")[2] for a in arguments if a.startswith("--output=")]
    if recorded:
        shutil.copy(recorded, output)
    {report}
    sys.exit({code})
else:
    print("NVIDIA Nsight Systems version 2025.3.1.90-test")
"""
OUTCOME = Outcome(
    CASE,
    (),
    details={"torch": "2.13.0", "device": "NVIDIA H200", "untraced_seconds": 290e-6},
)


def stand_in(
    folder: Path,
    recorded: Recording | None,
    *,
    outcome: Outcome = OUTCOME,
    code: int = 0,
) -> Nsys:
    """The instrument with an ``nsys`` that leaves what was recorded, as its own export."""
    left = str(recorded.write(folder / "recorded")) if recorded else ""
    text = STAND_IN.format(recorded=left, report=reports(outcome), code=code)
    return Nsys(folder / "reports", path=str(program(folder / "nsys", text)), timeout=60)


def test_the_argument_list_records_cuda_and_nvtx_between_the_marks_alone() -> None:
    command = Nsys(Path("a%b"), path="/nsys", steps=Steps(warmup=2, active=4)).profiler_command(
        CASE
    )
    assert command[:9] == [
        *("/nsys", "profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none"),
        *("--cuda-graph-trace=node", "--capture-range=cudaProfilerApi"),
        *("--capture-range-end=stop", "--force-overwrite=true"),
    ]
    assert command[9] == "--output=a%%b/tiny-fp32/report_dpsgd_bs2_seq16.nsys-rep"
    assert len(command) == 10


def test_rows_are_times_and_launches_by_phase_and_of_whole_steps(tmp_path: Path) -> None:
    instrument = stand_in(tmp_path, case_recording())
    outcome = instrument.measure(CASE)
    rows = outcome.rows
    assert {row.tool for row in rows} == {"nsys 2025.3.1, torch 2.13.0"}
    assert {row.device for row in rows} == {"NVIDIA H200"}
    found = own_values(summary(to_frame(rows))).set_index(["phase", "metric"])
    assert found.value["forward", "timeline_busy_share"] == pytest.approx(0.75)
    assert found.value["clip", "timeline_launches"] == 1
    assert found.value[STEP, "timeline_seconds"] == pytest.approx(310e-6)
    assert found.value[STEP, "timeline_busy_share"] == pytest.approx((160 / 300 + 0.5) / 2)
    assert found.steps[STEP, "timeline_busy_share"] == 2
    export = instrument.report(CASE).with_suffix(".sqlite")
    slowed = "a step took 0.3 ms while nsys recorded, and 0.3 ms before"
    assert outcome.notes == (slowed, f"dpbench show {export}")
    assert list(timeline_rows(CASE, timeline_of(export)[0], "NVIDIA H200", rows[0].tool)) == [*rows]


def test_what_an_earlier_run_left_is_not_read(tmp_path: Path) -> None:
    stand_in(tmp_path, case_recording()).measure(CASE)
    with pytest.raises(NothingTraced, match="dpsgd-bs2-seq16-tiny-fp32: nsys wrote no report"):
        stand_in(tmp_path, None).measure(CASE)


def test_a_recording_without_whole_steps_is_refused(tmp_path: Path) -> None:
    made = Recording()
    made.kernel(0, 1)
    with pytest.raises(NothingTraced, match="contains no step that dpbench marked"):
        stand_in(tmp_path, made).measure(CASE)


def test_a_case_that_fails_says_why(tmp_path: Path) -> None:
    failed = Outcome.failed(CASE, CaseFailed("ValueError: no such thing"))
    instrument = stand_in(tmp_path, case_recording(), outcome=failed, code=1)
    with pytest.raises(CaseFailed, match="no such thing"):
        instrument.measure(CASE)
    (tmp_path / "recorded").unlink()
    with pytest.raises(CaseFailed, match="ended with exit code 7"):
        stand_in(tmp_path, case_recording(), code=7).measure(CASE)


def test_a_report_takes_an_nsys_to_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    instrument = stand_in(tmp_path, None)
    report = case_recording().write(tmp_path / "other.nsys-rep")
    monkeypatch.setattr(nsys, "find_nsys", lambda: instrument.path)
    assert [step.step for step in timeline_of(report)[0].whole_steps] == [1, 2]
    assert not report.with_suffix(".sqlite").exists()
    idle = Recording().write(tmp_path / "idle.nsys-rep")
    with pytest.raises(NothingTraced, match=r"idle.nsys-rep contains no kernel"):
        timeline_of(idle)
