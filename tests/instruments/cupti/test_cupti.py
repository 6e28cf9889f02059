"""The instrument, from the steps of a case to the tables: on the CPU, beside a fake library."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpbench import Case, CaseReport
from dpbench.child import recorder as recorders
from dpbench.child.case import run_case
from dpbench.child.messages import Steps
from dpbench.child.task import Task
from dpbench.commands.cli import main
from dpbench.core.errors import CaseFailed, InstrumentError, as_instrument_error
from dpbench.core.settings import Settings
from dpbench.instruments import choose
from dpbench.instruments.counters import CountersForbidden
from dpbench.instruments.cupti.cupti import Cupti
from dpbench.instruments.cupti.library import CuptiUnusable
from dpbench.instruments.cupti.ranges import MAX_RANGES
from dpbench.instruments.cupti.recorder import CuptiRecorder, Target, cupti_rows
from dpbench.results.outcome import Outcome
from dpbench.results.rows import STEP
from dpbench.workloads.transformer import SimpleBigModel
from tests.instruments.cupti.fake import FakeCupti, target
from tests.programs import program, reports
from tests.results.figures import column, tables_of

CASE = Case("dpsgd", 2, 16, "tiny")
GB = 1e9
BUSY = 0.4
"""Of the time in which the fake GPU runs."""


def counted_case(
    case: Case, names: list[str] | None, cupti: FakeCupti, *, warmup: int, active: int
) -> dict[str, Any]:
    """The record of a case's process; without a GPU, beside a library that is not there."""
    recorder = CuptiRecorder(active, names, alike=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "of_torch", lambda: target(cupti))
        patch.setattr(recorder, "prepare", lambda: None)
        patch.setattr("dpbench.instruments.cupti.recorder.on_cuda", lambda: True)
        return dict(run_case(case, recorder, device="cpu", warmup=warmup, active=active).details)


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    """What the process of a case prints; its forward pass does all that the GPU sees."""
    cupti = FakeCupti()
    forward = SimpleBigModel.forward

    def counted(self: SimpleBigModel, *batch: Any) -> Any:
        cupti.work(5 * GB)
        cupti.now["gr__cycles_active.sum"] = BUSY * cupti.now["gr__cycles_elapsed.sum"]
        return forward(self, *batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimpleBigModel, "forward", counted)
        found = counted_case(CASE, None, cupti, warmup=1, active=2)
    took = found["counted"][1][STEP]["range_time_seconds"]  # as long as the fake GPU's steps
    for step in found["phase_seconds"]:
        step.update(dict.fromkeys(step, took * 1e-9), forward=took)
    return found


def test_steps_are_timed_and_then_counted_in_one_process(record: dict[str, Any]) -> None:
    assert (record["cupti"], record["chip"], record["passes"]) == ("13.0", "GH100", 1)
    assert len(record["phase_seconds"]) == record["active"] == 2
    by_phase, *whole = record["counted"]
    assert by_phase["forward"]["dram_read_bytes"] == 5 * GB
    assert {"clip", "noise", "backward"} < by_phase.keys()
    assert [step[STEP]["dram_read_bytes"] for step in whole] == 3 * [5 * GB]


def test_a_step_of_many_micro_batches_has_room_for_all_its_ranges() -> None:
    case = replace(CASE, batch_size=16, micro_batches=16)
    record = counted_case(case, [], FakeCupti(), warmup=0, active=1)
    assert record["ranges"] > 2 * MAX_RANGES
    assert {"forward", "clip", "noise"} < record["counted"][0].keys()


def test_a_long_step_is_counted_once_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorders, "SHORT_SECONDS", 0.0)
    found = counted_case(CASE, [], FakeCupti(), warmup=0, active=1)
    _, whole = found["counted"]
    assert "l2_atomic_bytes" not in whole[STEP]


def test_the_report_has_times_and_bytes_of_the_step_and_its_phases(record: dict[str, Any]) -> None:
    report = CaseReport.of(CASE, cupti_rows(CASE, record))
    assert set(report.frame.instrument) == {"cupti"}
    assert set(report.frame.tool) == {f"cupti 13.0, torch {record['torch']}"}
    assert report.dram_bytes == report.value("dram_bytes", "forward") == 10 * GB
    assert report.value("dram_bytes", "clip") == 0
    assert report.value("gpu_busy_share") == pytest.approx(BUSY)
    assert report.value("gpu_busy_share", "forward") == pytest.approx(BUSY)
    assert report.value("step_time_seconds") > report.value("step_time_seconds", "forward") > 0
    assert report.phases.dram_bytes["forward"] == 10 * GB


def test_tables_show_how_busy_the_gpu_was_and_say_that_a_step_waits(record: dict[str, Any]) -> None:
    step, *others = tables_of(cupti_rows(CASE, record))
    assert column(step, "busy") == {"dpsgd": "40%"}
    waits = "Busy below 70%: the step of dpsgd is launch-bound, so bytes do not explain its time."
    assert waits in step.notes
    [by_phase] = [table for table in others if "busy by phase" in table.title]
    assert by_phase.headers == ["trainer", "forward", "step"]
    assert by_phase.cells == [["dpsgd", "40%", "40%"]]
    [rates] = [table for table in others if table.title.endswith("GB/s")]
    assert rates.cells


# --- its process ---------------------------------------------------------------------------------


def test_options_reach_the_child(tmp_path: Path) -> None:
    settings = Settings(ncu_dir=tmp_path, warmup=1, active=2, timeout=60.0)
    [usual] = choose(["cupti"], settings)
    assert isinstance(usual, Cupti)
    assert usual.timeout == 60.0
    assert (usual.device, usual.steps, usual.names) == ("cuda", Steps(1, 2), ())
    asked = Settings(ncu_dir=tmp_path, own={"ncu_metrics": ["global_load_bytes,dram_bytes__x.sum"]})
    chosen = Cupti.from_settings(asked)
    assert chosen.names == ("global_load_bytes", "dram_bytes__x.sum")
    Task(CASE, chosen).write(tmp_path / "task.json")
    assert Task.read(tmp_path / "task.json").instrument == chosen


def measure(says: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> CaseReport:
    replay = program(directory / "replay", says)
    monkeypatch.setattr(sys, "executable", str(replay))
    return CaseReport.of(CASE, Cupti(directory).measure(CASE).rows)


def test_rows_come_from_what_the_process_printed(
    record: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = Outcome(CASE, tuple(cupti_rows(CASE, record)))
    report = measure(reports(outcome), tmp_path, monkeypatch)
    assert report.dram_bytes == 10 * GB
    assert (tmp_path / CASE.report_path).with_suffix(".cupti.log").exists()


def test_what_no_rank_counts_is_noted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = "NVLink payload is not counted: NVML reports 'Not Supported' for GPU-1"
    with closing(CuptiRecorder(1, [], alike=True)) as recorder:
        monkeypatch.setattr(Target, "of_torch", lambda: target(FakeCupti(), peers=True, note=note))
        monkeypatch.setattr(recorder, "prepare", lambda: None)
        monkeypatch.setattr("dpbench.instruments.cupti.recorder.on_cuda", lambda: True)
        found = run_case(CASE, recorder, device="cpu", warmup=0, active=1)
    outcome = Outcome.of_ranks([found, found])
    assert {row.rank for row in outcome.rows} == {0, 1}
    assert outcome.notes == (note,)


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (CountersForbidden("not allowed"), CountersForbidden),
        (CuptiUnusable("too old"), CuptiUnusable),
        (ValueError("odd"), CaseFailed),
    ],
)
def test_an_error_of_the_process_is_raised_here_with_its_remedy_once(
    raised: Exception, kind: type[InstrumentError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = as_instrument_error(raised)
    with pytest.raises(InstrumentError) as caught:
        measure(reports(Outcome.failed(CASE, error)), tmp_path, monkeypatch)
    assert type(caught.value) is kind
    assert str(caught.value) == f"{CASE.id}: {error}"
    assert caught.value.log is not None


def test_without_a_gpu_it_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["step", "--trainer=dpsgd", "--model-size=tiny", "--device=cpu"]
    assert main([*command, "--instrument=cupti"]) == 2
    assert "cupti needs a GPU, but the case runs on the CPU" in capsys.readouterr().err
