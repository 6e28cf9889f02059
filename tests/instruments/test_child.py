"""One case's process: its command, its log, its time-out, and how its failures are told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dpbench import Case, ConfigurationError
from dpbench.gpu import MEASURING, WAITING
from dpbench.instruments.base import CaseFailed, CaseOutOfMemory, CaseTimedOut, InstrumentError
from dpbench.instruments.child import Child, Steps, log_tail, step_command

CASE = Case("dpsgd", 4, 32, "tiny")


def start(program: str, log: Path, timeout: float = 20.0) -> Child:
    command = [sys.executable, "-c", program]
    return Child(command, case=CASE, log=log, timeout=timeout, read=lambda _: [])


def fails(program: str, tmp_path: Path, timeout: float = 20.0) -> InstrumentError:
    with pytest.raises(InstrumentError) as caught:
        start(program, tmp_path / "log", timeout).record()
    return caught.value


def says(**record: object) -> str:
    return f"print({json.dumps({'dpbench': '0', **record})!r})"


def test_the_command_is_an_argument_list_that_names_every_field() -> None:
    assert step_command(CASE, Steps(1, 2), device="cuda", nvtx=True) == [
        sys.executable,
        "-m",
        "dpbench",
        "step",
        *("--trainer", "dpsgd"),
        *("--batch-size", "4"),
        *("--seq-len", "32"),
        *("--model-size", "tiny"),
        *("--device", "cuda"),
        *("--warmup", "1"),
        *("--active", "2"),
        "--nvtx",
    ]


@pytest.mark.parametrize(("warmup", "active"), [(-1, 1), (0, 0), (3, -2)])
def test_a_child_runs_at_least_one_active_step(warmup: int, active: int) -> None:
    with pytest.raises(ConfigurationError, match="active >= 1"):
        Steps(warmup, active)


def test_the_record_is_the_last_one_printed(tmp_path: Path) -> None:
    child = start(f"{says(loss=1)}; print('noise'); {says(loss=2)}", tmp_path / "log")
    assert child.record()["loss"] == 2


def test_the_log_and_the_terminal_show_a_command_to_paste(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    start(says(), log).record()
    first = log.read_text().splitlines()[0]
    assert first in capfd.readouterr().err
    pasted = subprocess.run(first.removeprefix("$ "), shell=True, capture_output=True, check=True)
    assert json.loads(pasted.stdout) == {"dpbench": "0"}


def test_pytest_and_xdist_variables_do_not_reach_the_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw7")
    program = "import os, json; print(json.dumps({'dpbench': '0', 'names': list(os.environ)}))"
    names = start(program, tmp_path / "log").record()["names"]
    assert not [name for name in names if name.startswith("PYTEST_")]


def test_what_a_child_says_of_its_failure_is_the_message(tmp_path: Path) -> None:
    program = f"{says(error={'kind': 'RuntimeError', 'message': 'no such layer'})}; exit(1)"
    error = fails(program, tmp_path)
    assert isinstance(error, CaseFailed)
    assert "no such layer" in str(error)


def test_running_out_of_memory_is_told_with_its_remedy(tmp_path: Path) -> None:
    program = f"{says(error={'kind': 'OutOfMemory', 'message': 'tried 61 GiB'})}; exit(1)"
    error = fails(program, tmp_path)
    assert isinstance(error, CaseOutOfMemory)
    assert "tried 61 GiB; use a smaller batch size" in str(error)


def test_running_out_of_memory_is_recognised_when_the_child_was_killed_meanwhile(
    tmp_path: Path,
) -> None:
    program = (
        "print('torch.OutOfMemoryError: CUDA out of memory'); import os; os.kill(0, 0); exit(9)"
    )
    assert isinstance(fails(program, tmp_path), CaseOutOfMemory)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("exit(7)", "exit code 7"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("pass", "printed no record"),
        ("""print('{"dpbench": "0", "trunc')""", "printed no record"),
    ],
)
def test_a_crash_is_told_in_words(program: str, words: str, tmp_path: Path) -> None:
    error = fails(program, tmp_path)
    assert isinstance(error, CaseFailed)
    assert words in str(error)


def test_the_tail_of_a_failed_case_is_the_end_of_its_log(tmp_path: Path) -> None:
    error = fails("print(*range(100), sep='\\n'); exit(1)", tmp_path)
    assert log_tail(error, lines=3).splitlines() == ["97", "98", "99"]


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
    monkeypatch.setattr("dpbench.instruments.child.GRACE_SECONDS", 0.2)
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" if stubborn else ""
    program = (
        f"print({WAITING!r}, flush=True);"  # stops the clock
        f"import subprocess, sys, time; {ignore}"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        f"print(p.pid); print({MEASURING!r}, flush=True); time.sleep(60)"
    )
    error = fails(program, tmp_path, timeout=0.8)
    assert isinstance(error, CaseTimedOut)
    assert "within 0.8 s" in str(error)
    grandchild = int((tmp_path / "log").read_text().splitlines()[2])
    deadline = time.monotonic() + 5
    while lives(grandchild) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not lives(grandchild)


def test_waiting_for_the_gpu_does_not_count_against_the_time_out(tmp_path: Path) -> None:
    program = (
        "import time;"
        f"print(*{WAITING.split()}, 'GPU-0', flush=True); time.sleep(1.0);"
        f"print(*{MEASURING.split()}, flush=True); {says(loss=3)}"
    )
    assert start(program, tmp_path / "log", timeout=0.8).record()["loss"] == 3


def test_cancelling_ends_a_child_at_once(tmp_path: Path) -> None:
    child = start("import time; time.sleep(60)", tmp_path / "log")
    child.cancel()
    assert child.process.returncode is not None
    child.cancel()  # and again does nothing
