"""Cases in forks of a server: each as if its process were new."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from opacus import PrivacyEngine

from dpbench import Case
from dpbench.child.messages import Steps
from dpbench.core.errors import CaseFailed, CaseTimedOut, InstrumentError
from dpbench.core.registry import TRAINERS
from dpbench.instruments.logical.logical import Logical
from dpbench.instruments.timing import Timing
from dpbench.launch import fork_server
from dpbench.launch.case_process import CaseProcess
from dpbench.launch.fork_server import COMMAND, ForkedProcess, ForkServer, environment_of_cases
from dpbench.runner import measure_at_once
from tests.launch import misbehaving

PATIENCE = 300
"""Seconds after which what should have happened will not; on a busy machine all takes long."""


SEEN: dict[int, str] = {}
"""What the first case saw that a server has forked, by the server's process."""


@pytest.fixture(scope="module")
def servers() -> Iterator[list[ForkServer]]:
    started: list[ForkServer] = []
    yield started
    for server in started:
        server.close()


@pytest.fixture
def server(servers: list[ForkServer], monkeypatch: pytest.MonkeyPatch) -> ForkServer:
    """One that the tests share until they kill it."""
    folder = Path(tempfile.gettempdir(), "torchinductor")  # or torch sets it, whenever it is asked
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    if not servers or servers[-1].process.poll() is not None:
        servers.append(ForkServer(environment_of_cases()))
    monkeypatch.setattr(fork_server, "fork_server", lambda: servers[-1])
    return servers[-1]


def case_of(trainer: str | type = "standard") -> Case:
    if isinstance(trainer, type):
        TRAINERS.register(trainer.__name__, trainer)
        trainer = trainer.__name__
    return Case(trainer, 4, 16, "200x32x1x2")


def timing(folder: Path, timeout: float = PATIENCE) -> Timing:
    return Timing(folder, device="cpu", steps=Steps(1, 2), timeout=timeout)


def error_of(trainer: type, folder: Path, timeout: float = PATIENCE) -> InstrumentError:
    with pytest.raises(InstrumentError) as caught:
        timing(folder, timeout).measure(case_of(trainer))
    return caught.value


def ended(process: CaseProcess) -> CaseProcess:
    process.cancel()
    return process


def test_a_fork_measures_a_case_as_a_new_process_does(server: ForkServer, tmp_path: Path) -> None:
    running = timing(tmp_path).start(case_of())
    forks = isinstance(running.group.process, ForkedProcess)
    rows = running.outcome().rows
    ended(running)
    assert forks
    assert {row.metric for row in rows} == {"step_time_seconds", "samples_per_second"}
    tasks = Path(f"/proc/{server.process.pid}/task")
    assert len([*tasks.iterdir()]) == 1


@pytest.mark.repeats
@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        (misbehaving.Crashes, "was killed by SIGSEGV"),
        (misbehaving.Exits, "ended with exit code 3"),
        (misbehaving.Hangs, "did not finish within 2 s"),
        (misbehaving.FillsMemory, "MemoryError"),
        (misbehaving.ChangesAll, "all has changed"),
    ],
)
def test_what_one_does_the_next_does_not_see(
    trainer: type, words: str, server: ForkServer, tmp_path: Path
) -> None:
    if server.process.pid not in SEEN:
        SEEN[server.process.pid] = str(error_of(misbehaving.Looks, tmp_path))
    error = error_of(trainer, tmp_path, timeout=2 if trainer is misbehaving.Hangs else PATIENCE)
    assert words in str(error)
    assert isinstance(error, CaseTimedOut if trainer is misbehaving.Hangs else CaseFailed)
    after = str(error_of(misbehaving.Looks, tmp_path))
    assert f"child of {server.process.pid}: " in after
    assert after == SEEN[server.process.pid]


def test_a_fork_has_the_directory_and_imports_of_its_case(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        text = Path(misbehaving.__file__).read_text()
        (folder / "own_trainers.py").write_text(text.replace("child of", f"{name}, child of"))
        monkeypatch.chdir(folder)
        monkeypatch.setenv("PYTHONPATH", str(folder))
        case = Case("own_trainers:Looks", 4, 16, "200x32x1x2")
        with pytest.raises(CaseFailed, match=f"{name}, child of {server.process.pid}: .*{folder}"):
            timing(tmp_path).measure(case)


@pytest.mark.slow
def test_opacus_is_whole_for_a_trainer_that_uses_it(server: ForkServer, tmp_path: Path) -> None:
    accountant = PrivacyEngine(accountant="gdp").accountant
    accountant.step(noise_multiplier=1.0, sample_rate=0.01)
    expected = f"early: False, epsilon: {accountant.get_epsilon(1e-5):.3f}"
    assert expected in str(error_of(misbehaving.Accounts, tmp_path))


@pytest.mark.parametrize("differs", ["a variable", "a library"])
def test_what_is_read_when_python_starts_makes_a_new_process(
    differs: str, server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if differs == "a variable":
        monkeypatch.setenv("MKL_NUM_THREADS", "1")
    else:
        (tmp_path / "opacus.py").touch()
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    running = timing(tmp_path).start(case_of())
    assert isinstance(ended(running).group.process, subprocess.Popen)


def is_gone_now(process_id: int) -> bool:
    """Whether a process has ended; one whose parent died first may stay as a zombie."""
    try:
        status = Path(f"/proc/{process_id}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return status.rpartition(")")[2].split()[0] == "Z"


def is_gone(process_id: int) -> bool:
    """Whether a process ends soon."""
    deadline = time.monotonic() + PATIENCE
    while not (gone := is_gone_now(process_id)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return gone


@pytest.mark.repeats
@pytest.mark.parametrize("how", ["sys.exit()", "os.kill(os.getpid(), 9)"])
def test_the_server_ends_with_its_session(how: str) -> None:
    program = (
        "import os, sys; from dpbench.launch.fork_server import fork_server;"
        f"print(fork_server().process.pid, flush=True); {how}"
    )
    session = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=False, timeout=PATIENCE
    )
    assert is_gone(int(session.stdout))


def test_cases_are_counted_at_once_and_their_outcomes_are_in_order(server: ForkServer) -> None:
    wrong = case_of(misbehaving.Exits)
    right = [replace(case_of(misbehaving.Idle), batch_size=size) for size in (1, 2, 3)]
    cases = [right[0], wrong, *right[1:]]
    outcomes = [*measure_at_once(cases, [Logical()], number=2)]
    assert [outcome.case for outcome in outcomes] == cases
    assert [outcome.error for outcome in outcomes] == [None, "CaseFailed", None, None]
    for outcome in (outcomes[0], *outcomes[2:]):
        assert outcome.rows == Logical().count(outcome.case).rows


def test_what_takes_too_long_is_ended_while_others_are_counted(server: ForkServer) -> None:
    [hanging] = measure_at_once([case_of(misbehaving.Hangs)], [Logical(timeout=1)], number=2)
    assert hanging.error == "CaseTimedOut"


def test_closing_ends_those_that_are_still_counted(server: ForkServer) -> None:
    quick, hangs = case_of(misbehaving.Idle), case_of(misbehaving.Hangs)
    outcomes = measure_at_once([quick, hangs], [Logical()], number=2)
    assert next(outcomes).error is None
    tasks = Path(f"/proc/{server.process.pid}/task/{server.process.pid}")
    children = [*map(int, (tasks / "children").read_text().split())]
    assert not all(map(is_gone_now, children))  # the quick one may not be waited for yet
    outcomes.close()
    assert all(map(is_gone, children))


def test_without_its_server_a_case_has_a_new_process(server: ForkServer, tmp_path: Path) -> None:
    forked = timing(tmp_path).start(case_of())
    assert isinstance(forked.group.process, ForkedProcess)
    os.kill(server.process.pid, signal.SIGKILL)
    assert forked.outcome().rows  # which has a process of its own
    assert is_gone(ended(forked).group.process.pid)
    running = timing(tmp_path).start(case_of())
    assert isinstance(ended(running).group.process, subprocess.Popen)


@pytest.mark.slow
def test_a_fork_tells_its_guard_before_anybody_can_lose_sight_of_it(
    server: ForkServer, tmp_path: Path
) -> None:
    guard, told = os.pipe()
    with (tmp_path / "log.txt").open("w") as output, os.fdopen(told, "w") as stdin:
        options = {"stdout": output, "stdin": stdin, "env": environment_of_cases()}
        forked = server.fork([*COMMAND, "list"], options)
    assert forked
    with os.fdopen(guard) as said:
        assert said.read() == f"-{forked.pid}\n"  # and the pipe has an end
    assert forked.wait() == 0
    assert (tmp_path / "log.txt").read_text() == "no runs in .dpbench\n"
