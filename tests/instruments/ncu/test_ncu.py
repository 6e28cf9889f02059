"""The ncu instrument: its exact command, and what it makes of ncu's complaints."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dpbench import Case, ConfigurationError, InstrumentError
from dpbench.child.messages import Steps
from dpbench.core.errors import CaseFailed
from dpbench.core.settings import Settings
from dpbench.instruments import choose, counters
from dpbench.instruments.ncu.ncu import Ncu, NcuNotFound, diagnose, find_ncu
from dpbench.instruments.ncu.report import NothingProfiled
from dpbench.launch.processes import version_of
from dpbench.results.outcome import Outcome
from dpbench.runner import measure
from tests.programs import program, reports

OUTPUT = Path(__file__).parents[2] / "data" / "ncu_output"
CASE = Case("dpsgd", 8, 256)


def test_the_whole_argument_list() -> None:
    instrument = Ncu(Path("reports"), path="/opt/ncu", steps=Steps(warmup=1, active=2))
    assert instrument.profiler_command(CASE) == [
        "/opt/ncu",
        *("--config-file", "off"),
        *("--replay-mode", "app-range"),
        *("--cache-control", "none"),
        *("--clock-control", "none"),
        *("--import-sass", "no"),
        "--nvtx",
        *("--nvtx-include", "regex:dpbench@.*"),
        "--metrics",
        "dram__bytes_read.sum,dram__bytes_write.sum,"
        "lts__t_sectors_op_atom.sum,lts__t_sectors_op_red.sum,"
        "l1tex__t_bytes_pipe_lsu_mem_global_op_ld.sum,"
        "l1tex__t_bytes_pipe_lsu_mem_global_op_st.sum",
        "--force-overwrite",
        *("--export", "reports/1b-fp32/report_dpsgd_bs8_seq256.ncu-rep"),
    ]


def test_a_report_that_could_not_be_read_is_refused_before_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpbench.instruments.ncu.ncu.find_spec", lambda _: None)
    with pytest.raises(ConfigurationError, match="pip install ncu-report`, or add the folder"):
        Ncu(tmp_path).check()


def test_metrics_of_the_command_line_reach_ncu() -> None:
    chosen = choose(
        ["ncu"],
        Settings(
            own={
                "ncu_path": sys.executable,
                "ncu_metrics": ["gld_throughput, sm__cycles_active.sum", "global_store_bytes"],
            },
        ),
    )
    assert isinstance(chosen[0], Ncu)
    asked = chosen[0].profiler_command(CASE)
    assert asked[asked.index("--metrics") + 1].split(",") == [
        "dram__bytes_read.sum",
        "dram__bytes_write.sum",
        "l1tex__t_bytes_pipe_lsu_mem_global_op_ld.sum",
        "sm__cycles_active.sum",
        "l1tex__t_bytes_pipe_lsu_mem_global_op_st.sum",
    ]


def test_a_list_of_no_metrics_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="names no metric; try dram_read_bytes"):
        choose(["ncu"], Settings(own={"ncu_path": sys.executable, "ncu_metrics": [" ,"]}))


@pytest.mark.parametrize(
    ("recorded", "error", "remedy"),
    [
        ("counters_forbidden", counters.CountersForbidden, "NVreg_RestrictProfilingToAdminUsers=0"),
        ("counters_busy", counters.CountersBusy, "dcgmi profile --pause"),
        ("library_not_loaded", counters.ProfilerNotLoaded, "driver"),
        ("metric_unknown", counters.CounterUnknown, "ncu --query-metrics"),
        ("no_ranges", NothingProfiled, "train_step"),
    ],
)
def test_each_complaint_of_ncu_has_its_own_error_and_remedy(
    recorded: str, error: type[InstrumentError], remedy: str
) -> None:
    found = diagnose(CASE, OUTPUT / f"{recorded}.txt")
    assert type(found) is error
    assert remedy in str(found)
    assert CASE.id in str(found)
    assert found.log == OUTPUT / f"{recorded}.txt"


def test_a_failure_of_the_application_itself_is_not_ncus() -> None:
    assert diagnose(CASE, OUTPUT / "application_failed.txt") is None


def test_only_what_ncu_says_counts(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("a trainer prints: Failed to find metric\n")
    assert diagnose(CASE, log) is None


def stand_in(tmp_path: Path, text: str) -> Ncu:
    """An instrument whose ``ncu`` is a script: for what happens when ncu itself goes wrong."""
    return Ncu(tmp_path, path=str(program(tmp_path / "ncu", text)), timeout=20)


def test_an_exit_code_of_0_without_a_report_is_an_error(tmp_path: Path) -> None:
    outcome = Outcome(CASE, (), details={"torch": "2", "observed": 1})
    broken = stand_in(tmp_path, reports(outcome))
    with pytest.raises(NothingProfiled, match="ncu wrote no report"):
        broken.measure(CASE)


def test_a_report_of_an_earlier_run_is_never_read_again(tmp_path: Path) -> None:
    old = tmp_path / CASE.report_path
    old.parent.mkdir()
    old.write_bytes(b"old")
    with pytest.raises(CaseFailed):
        stand_in(tmp_path, "exit(5)").measure(CASE)
    assert not old.exists()


def test_a_crash_of_the_case_counts_more_than_that_nothing_was_profiled(tmp_path: Path) -> None:
    text = (
        reports(Outcome.failed(CASE, CaseFailed("it fell over")))
        + "\nprint('==WARNING== No ranges were profiled.'); exit(1)"
    )
    with pytest.raises(CaseFailed, match="it fell over"):
        stand_in(tmp_path, text).measure(CASE)


def test_without_ncu_the_message_says_where_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(NcuNotFound, match=r"no program 'nowhere/ncu'.*--ncu-path"):
        find_ncu("nowhere/ncu")
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(NcuNotFound, match="CUDA toolkit"):
        find_ncu()


def test_a_program_that_cannot_be_started_fails_its_case_and_has_no_version(tmp_path: Path) -> None:
    ncu_of_another_machine = program(tmp_path / "ncu", "")
    ncu_of_another_machine.write_bytes(b"\x7fELF of another machine")
    assert version_of(str(ncu_of_another_machine)) == "unknown"
    outcome = measure(CASE, [Ncu(tmp_path, path=str(ncu_of_another_machine))])
    assert outcome.message.startswith(f"{CASE.id}: ")
    assert "Exec format error" in outcome.message
