"""One case's process: its command, its log, its time-out, and how its failures are told."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
from pathlib import Path

import pytest

from dpbench import Case, ConfigurationError
from dpbench.child.messages import MEASURING, WAITING, Steps
from dpbench.child.task import Task
from dpbench.core.errors import (
    CaseFailed,
    CaseOutOfMemory,
    CaseRefused,
    CaseTimedOut,
    GpuBusy,
    InstrumentError,
)
from dpbench.instruments.timing import Timing
from dpbench.launch.case_process import CaseProcess
from dpbench.results.outcome import Outcome

CASE = Case("dpsgd", 4, 32, "tiny")


def start(program: str, log: Path, timeout: float = 20.0) -> CaseProcess:
    return CaseProcess(
        Task(CASE, Timing(log.parent)),
        ["/bin/sh", "-c", program],
        log=log,
        timeout=timeout,
    )


def ended(program: str, tmp_path: Path, timeout: float = 20.0) -> Outcome:
    return start(program, tmp_path / "log", timeout).outcome()


def says(**record: object) -> str:
    """What makes a shell append a record, as `append_record` does."""
    return f'echo {shlex.quote(json.dumps(record))} >>"$DPBENCH_RECORDS"'


def reports(**details: object) -> str:
    return says(**Outcome(CASE, (), details=details).as_json())


def reports_error(error: InstrumentError) -> str:
    return says(**Outcome.failed(CASE, error).as_json())


WAITS, GETS_IT = says(**{WAITING: "GPU-0"}), says(**{MEASURING: "a case"})


@pytest.mark.parametrize(("warmup", "active"), [(-1, 1), (0, 0), (3, -2)])
def test_a_child_runs_at_least_one_active_step(warmup: int, active: int) -> None:
    with pytest.raises(ConfigurationError, match="active >= 1"):
        Steps(warmup, active)


def test_the_record_is_the_last_one_printed(tmp_path: Path) -> None:
    program = f"{reports(loss=1)}; echo noise; {reports(loss=2)}"
    assert ended(program, tmp_path).details == {"loss": 2}


@pytest.mark.slow
def test_the_log_and_the_terminal_show_a_command_to_paste(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    instrument = Timing(tmp_path, "cpu", Steps(0, 2), 300.0)
    instrument.measure(case := Case("standard", 2, 8, "100x8x1x2"))
    first = instrument.log(case).read_text().splitlines()[0]
    assert first in capfd.readouterr().err
    pasted = subprocess.run(first.removeprefix("$ "), shell=True, capture_output=True, check=True)
    record = json.loads(pasted.stdout)
    assert record["case"]["batch_size"] == 2
    assert len(record["details"]["phase_seconds"]) == 2


def test_pytest_and_xdist_variables_do_not_reach_the_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw7")
    ended(f"env; {reports()}", tmp_path)
    log = (tmp_path / "log").read_text()
    assert "DPBENCH_RECORDS=" in log
    assert "\nPYTEST_" not in log


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (CaseFailed("no such layer"), "no such layer"),
        (CaseRefused("BatchNorm"), "BatchNorm"),
        (CaseOutOfMemory("tried 61 GiB"), "tried 61 GiB; use a smaller batch size"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_error_of_a_child_is_that_of_its_outcome(
    error: InstrumentError, message: str, tmp_path: Path
) -> None:
    outcome = ended(f"{reports_error(error)}; exit 1", tmp_path)
    assert outcome.error == type(error).__name__
    assert outcome.message.startswith(f"{CASE.id}: {message}")


def test_running_out_of_memory_is_recognised_when_the_child_was_killed_meanwhile(
    tmp_path: Path,
) -> None:
    program = "echo torch.OutOfMemoryError: CUDA out of memory; exit 9"
    assert ended(program, tmp_path).error == CaseOutOfMemory.__name__


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("exit 7", "exit code 7"),
        ("kill -s SEGV $$", "killed by SIGSEGV"),
        ("true", "left no result"),
        ('printf \'{"trunc\' >"$DPBENCH_RECORDS"', "left no result"),
        ("echo '{\"loss\": 1}'", "left no result"),
        ("kill -40 $$", "killed by signal 40"),
    ],
)
def test_a_crash_is_told_in_words(program: str, words: str, tmp_path: Path) -> None:
    outcome = ended(program, tmp_path)
    assert outcome.error == CaseFailed.__name__
    assert words in outcome.message


def test_the_tail_of_a_failed_case_is_the_end_of_its_log(tmp_path: Path) -> None:
    outcome = ended("seq 0 99; exit 1", tmp_path)
    assert outcome.log == str(tmp_path / "log")
    assert outcome.log_tail.splitlines() == [*map(str, range(80, 100))]


def lives(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{process_id}/stat")
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")


@pytest.mark.parametrize("stubborn", [False, True], ids=["ends when asked", "ignores SIGTERM"])
def test_a_time_out_ends_the_whole_process_group(
    stubborn: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpbench.launch.processes.GRACE_SECONDS", 0.2)
    ignore = "trap '' TERM;" if stubborn else ""
    program = f"{WAITS}; {ignore} sleep 60 & echo $!; {GETS_IT}; wait; sleep 60"
    outcome = ended(program, tmp_path, timeout=0.3)
    assert outcome.error == CaseTimedOut.__name__
    assert "within 0.3 s" in outcome.message
    grandchild = int((tmp_path / "log").read_text().splitlines()[1])
    deadline = time.monotonic() + 5
    while lives(grandchild) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not lives(grandchild)


def waits(seconds: float, holder: int, *more: str) -> str:
    """A program's text that waits for a GPU of another process's."""
    words = f"GPU-0, held by process {holder} (dpsgd) since 12:03:04"
    return "; ".join([says(**{WAITING: words}), f"sleep {seconds}", *more])


@pytest.mark.slow
def test_each_process_that_holds_the_gpu_may_take_as_long_as_the_case(tmp_path: Path) -> None:
    program = "; ".join([waits(0.5, 1), waits(0.5, 2), GETS_IT, "sleep 0.5", reports()])
    assert ended(program, tmp_path, timeout=0.9).error is None


def test_a_gpu_that_does_not_get_free_is_told_with_who_holds_it(tmp_path: Path) -> None:
    outcome = ended(waits(60, os.getpid()), tmp_path, timeout=0.3)
    assert outcome.error == GpuBusy.__name__
    held = f"waited 0.3 s for GPU-0, held by process {os.getpid()} (dpsgd) since"
    assert held in outcome.message
    assert "end that process, or raise the time-out" in outcome.message


def test_what_a_trainer_prints_is_no_record(tmp_path: Path) -> None:
    program = f"printf 'dpbench: {WAITING} '; {reports(loss=2)}; echo '{{\"loss\": 3}}'; sleep 0.2"
    assert ended(program, tmp_path).details == {"loss": 2}


def test_an_error_in_the_log_of_a_case_that_went_well_is_no_failure(tmp_path: Path) -> None:
    program = f"echo torch.OutOfMemoryError: retrying with less; {reports()}"
    assert ended(program, tmp_path).error is None


def test_what_an_orphan_still_prints_is_not_in_the_next_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as orphan:
        start(reports(), log).outcome()
        orphan.write("late\n")
    assert "late" not in log.read_text()


def test_a_record_that_lacks_something_fails_its_case_only(tmp_path: Path) -> None:
    outcome = ended(says(loss=2), tmp_path)
    assert outcome.error == CaseFailed.__name__
    assert "outcome cannot be read (ValidationError: " in outcome.message


def test_cancelling_ends_a_child_at_once(tmp_path: Path) -> None:
    child = start("sleep 60", tmp_path / "log")
    child.cancel()
    assert child.group.process.returncode is not None
    child.cancel()  # and again does nothing


def test_what_a_child_printed_last_is_said_if_it_could_not_say_more(tmp_path: Path) -> None:
    program = "echo first; echo ImportError: cannot import name; echo; exit 1"
    assert ended(program, tmp_path).message.startswith(
        f"{CASE.id}: the process ended with exit code 1: ImportError: cannot import name"
    )


def test_a_log_that_cannot_be_written_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "reports").touch()  # a file where a folder would be
    child = start(reports(), tmp_path / "reports" / "tiny-fp32" / "log")
    assert child.outcome().error is None
    child.cancel()
    assert not child.log.exists()
