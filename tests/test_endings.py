"""Tests that ncu and its processes end with their session, whatever ends the session."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dpbench.results.run import Run
from tests.plugin.conftest import WITHOUT

NCU = """#!/bin/sh
[ "$1" = --version ] && exit
{trap}
exec 9>alive  # open in every process that this one starts
sleep 100 &   # in place of the profiled process
echo $PPID >started
wait
"""

PATIENCE = 300
"""Seconds after which a test gives up; on a busy machine everything takes long."""

GPU = """
import dpbench.core.gpu
dpbench.core.gpu.visible_gpus = lambda: [dpbench.core.gpu.Gpu("GPU-0", "NVIDIA H200", None, "580")]
"""
PATIENT = f"""
import dpbench.launch.processes
dpbench.launch.processes.GRACE_SECONDS = {2 * PATIENCE}
"""
COMMAND = [
    *(
        sys.executable,
        "-c",
        f"{GPU}\nimport sys, dpbench.commands.cli as cli; sys.exit(cli.main())",
    ),
    *("run", "--instrument=ncu", "--ncu-path=./ncu", "--trainer=standard"),
    *("--model-size=tiny", "--batch-size=4", "--seq-len=64"),
]
PYTEST = [
    *(sys.executable, "-m", "pytest", "-n1", *WITHOUT),
    *("--ncu", "--ncu-path=./ncu", "--dpbench-no-timing"),
]
SUITE = """
import pytest

@pytest.mark.parametrize("trainer", ["standard", "dpsgd"])
def test_hangs(ncu, trainer):
    ncu(trainer, batch_size=4, seq_len=64, model_size="tiny")
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # a killed session leaves files there
    (tmp_path / "conftest.py").write_text(GPU)
    (tmp_path / "test_suite.py").write_text(SUITE)
    os.mkfifo(tmp_path / "alive")
    return tmp_path


class Session:
    """A session whose ncu hangs.

    Args:
        command: command that starts the session.
        trap: shell code in ``ncu`` that handles signals.
        options: options of `subprocess.Popen`.
    """

    def __init__(self, command: list[str], trap: str = "", **options: object) -> None:
        Path("ncu").write_text(NCU.format(trap=trap))
        Path("ncu").chmod(0o755)
        self.alive = os.open("alive", os.O_RDONLY | os.O_NONBLOCK)
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        with Path("err").open("w") as stderr:
            self.process = subprocess.Popen(  # type: ignore[call-overload]
                command, **{**streams, "stderr": stderr, "start_new_session": True, **options}
            )

    def owner(self) -> int:
        """Wait until ncu has started its process; return the id of the process that started ncu."""
        return int(self.wait_for("started"))

    def wait_for(self, file: str) -> str:
        """Wait until a file has text, and return the text."""
        while not (Path(file).exists() and (text := Path(file).read_text())):
            assert self.process.poll() is None, Path("err").read_text()
            time.sleep(0.05)
        return text

    def is_gone(self, seconds: float = PATIENCE) -> bool:
        """Return True if ncu and all its processes end in time."""
        return bool(select.select([self.alive], [], [], seconds)[0])

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.is_gone()
        os.close(self.alive)


@pytest.fixture
def begin(project: Path) -> Iterator[Callable[..., Session]]:
    begun: list[Session] = []

    def begin(*arguments: object, **options: object) -> Session:
        begun.append(Session(*arguments, **options))  # type: ignore[arg-type]
        return begun[-1]

    yield begin
    for session in begun:
        session.close()


@pytest.mark.parametrize("command", [COMMAND, PYTEST], ids=["run", "xdist worker"])
def test_ncu_ends_when_the_process_that_started_it_is_killed(
    begin: Callable[..., Session], command: list[str]
) -> None:
    session = begin(command)
    os.kill(session.owner(), signal.SIGKILL)
    assert session.is_gone()


@pytest.mark.slow
def test_ncu_ends_when_the_controller_of_workers_is_killed(begin: Callable[..., Session]) -> None:
    session = begin(PYTEST)
    assert session.owner() != session.process.pid
    session.process.kill()
    assert session.is_gone()


@pytest.mark.slow
def test_ncu_ends_at_hangup(begin: Callable[..., Session]) -> None:
    session = begin(COMMAND)
    session.owner()
    session.process.send_signal(signal.SIGHUP)
    assert session.process.wait(PATIENCE) == 130
    assert session.is_gone()


def test_ncu_ends_with_its_terminal(begin: Callable[..., Session]) -> None:
    master, slave = pty.openpty()
    shell = [
        "sh",
        "-c",
        'exec "$@" <>"$0" >&0 2>&0',
        os.ttyname(slave),
    ]  # controls the shell
    session = begin([*shell, *COMMAND])
    os.close(slave)
    session.owner()
    os.close(master)
    assert session.is_gone()
    session.process.wait(PATIENCE)


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ([*COMMAND, "--trainer=dpsgd", "--save=ended"], 130),
        ([*PYTEST, "-n0", "--dpbench-save=ended"], 2),
    ],
    ids=["run", "pytest"],
)
def test_a_second_ctrl_c_ends_ncu_and_leaves_the_run_interrupted(
    begin: Callable[..., Session], command: list[str], status: int
) -> None:
    """After the first Ctrl-C dpbench waits for ncu, and this ncu does not end by itself."""
    Path("conftest.py").write_text(GPU + PATIENT)
    command = [argument.replace(GPU, GPU + PATIENT) for argument in command]
    fails_once = "[ -e begun ] || { touch begun; exit 1; }"  # so the run contains one case
    goes_on = "exec 9>alive; trap 'echo TERM >asked' TERM; echo $PPID >started"
    forever = "while :; do sleep 100 & wait; done"
    session = begin(command, trap=f"{fails_once}; {goes_on}; {forever}")
    session.owner()
    session.process.send_signal(signal.SIGINT)
    session.wait_for("asked")
    session.process.send_signal(signal.SIGINT)
    assert session.is_gone()
    assert session.process.wait(PATIENCE) == status
    [path] = Path(".dpbench").rglob("0001_ended.json")
    run = Run.load(path)
    assert (run.status, len(run.outcomes)) == ("interrupted", 1)


@pytest.mark.slow
def test_a_session_under_nohup_survives_a_hangup(begin: Callable[..., Session]) -> None:
    session = begin(["nohup", *COMMAND])
    session.owner()
    session.process.send_signal(signal.SIGHUP)
    assert not session.is_gone(0.5)
    assert session.process.poll() is None
