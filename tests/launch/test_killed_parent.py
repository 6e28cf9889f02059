"""What dpbench starts ends with dpbench, also if ``kill -9`` ends that at any time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.test_endings import PATIENCE

DPBENCH = [sys.executable, "-m", "dpbench"]
SLOW = """
import signal, sys, time, torch
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
while True:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    open("trained", "w").close()
    time.sleep(0.1)
"""
WORKER = """
import time
from dpbench.launch.processes import new_process
if __name__ == "__main__":
    with new_process() as pool:
        pool.submit(time.sleep, 0).result()
        open("trained", "w").close()
        time.sleep(1000)
"""


class Family:
    """A process and all processes that come from it, which have its mark in their environment."""

    def __init__(self, command: list[str]) -> None:
        self.mark = f"FAMILY_OF_TEST={os.getpid()}-{time.monotonic_ns()}"
        name, _, value = self.mark.partition("=")
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.first = subprocess.Popen(command, env=os.environ | {name: value}, **quiet)  # type: ignore[call-overload]

    def alive(self) -> list[int]:
        """The processes that are left; a guard sleeps for some seconds after it has ended them."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has just ended
                if self.mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def wait_until(self, is_so: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not is_so():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def python(self) -> list[int]:
        """The processes other than the first that run Python, from their first line on."""
        found = []
        for number in {*self.alive()} - {self.first.pid}:
            with suppress(OSError):
                found += [number] if "python" in str(Path(f"/proc/{number}/exe").readlink()) else []
        return found


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Family]]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # a killed session leaves files there
    Path("slow.py").write_text(SLOW)
    Path("worker.py").write_text(WORKER)
    begun: list[Family] = []

    def begin(*command: str) -> Family:
        begun.append(Family([*command]))
        return begun[-1]

    yield begin
    for family in begun:
        family.first.kill()
        family.first.wait()
        for left in family.alive():
            with suppress(ProcessLookupError):
                os.kill(left, 9)


EXEC = [*DPBENCH, "exec", "--instrument=timing", "--steps=1000"]


@pytest.mark.parametrize(
    ("command", "has_trained"),
    [
        ([*EXEC, "slow.py"], False),
        ([*EXEC, "slow.py", "stubborn"], True),
        ([sys.executable, "worker.py"], False),
        ([sys.executable, "worker.py"], True),
        ([*DPBENCH, "run", "--instrument=timing", "--trainer=dpsgd", "--device=cpu"], False),
    ],
    ids=["script begins", "script trains", "worker begins", "worker", "case"],
)
def test_nothing_is_left_of_a_killed_process(
    begin: Callable[..., Family], command: list[str], has_trained: bool
) -> None:
    family = begin(*command)
    family.wait_until(family.python)
    if has_trained:
        family.wait_until(Path("trained").exists)
    family.first.kill()
    family.first.wait()
    family.wait_until(lambda: not family.python())
