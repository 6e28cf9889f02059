"""Starts programs in process groups, which end with the program or with this process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import cache
from multiprocessing import get_context
from typing import Any

from dpbench.child.messages import POLL_SECONDS, STACK_SIGNAL
from dpbench.child.program import add_to

ANSWER_SECONDS = 30.0  # limit for ``--version``, which takes one or two seconds
STACKS_SECONDS = 0.5  # time for ranks to write their stacks, which takes milliseconds
GRACE_SECONDS = 5.0  # time between SIGTERM and SIGKILL for a process group
GUARD = f"""
ids=
while read -r line; do
    [ "$line" = ended ] && exit
    ids="$ids $line"
done
kill -s TERM -- $ids; sleep {GRACE_SECONDS:g}; kill -s KILL -- $ids
"""
"""A shell script that reads ids of processes, or of groups with a minus, and waits for the line
``ended``. If the input ends first, the parent has died, e.g. by ``kill -9``, and the script ends
the processes. ``PR_SET_PDEATHSIG`` would reach only direct children, but ncu starts further
processes."""


STARTER = 'echo "-$$" >&0; exec "$@" </dev/null'
"""A shell script that sends the id of its group to the guard and then becomes the program. So the
guard knows the id even if the parent is interrupted while the program starts."""


class Guard:
    """A shell that ends processes if this process dies before it calls `close`."""

    def __init__(self) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", GUARD],
            stdin=subprocess.PIPE,  # no other child inherits this end of the pipe
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
            text=True,
        )
        assert self._shell.stdin
        self.pipe = self._shell.stdin
        self.path = f"/proc/{os.getpid()}/fd/{self.pipe.fileno()}"
        """The path at which a process adds itself, see `dpbench.child.program.add_to`."""

    def fire(self) -> None:
        """End the processes now."""
        self.pipe.close()

    def close(self) -> None:
        """End the guard. The processes continue."""
        if not self.pipe.closed:
            self._shell.communicate("ended\n")


@contextmanager
def new_process() -> Iterator[ProcessPoolExecutor]:
    """Yield a pool with one newly started process, which ends on Ctrl-C and with this process."""
    with (
        closing(Guard()) as guard,
        ProcessPoolExecutor(1, get_context("spawn"), _begin, (guard.path,)) as pool,
    ):
        yield pool


def _begin(guard: str) -> None:
    add_to(guard)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # on Ctrl-C the process prints no traceback


class ProcessGroup:
    """A program in its own process group, with a guard that ends the group if this process dies."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        self._guard = Guard()
        self._ended = False
        try:
            options |= {"stdin": self._guard.pipe}
            started = ["/bin/sh", "-c", STARTER, "sh", *command]
            self.process = subprocess.Popen(started, start_new_session=True, **options)
        except BaseException:
            self._guard.fire()
            raise

    def request_stacks(self) -> None:
        """Ask the ranks to write their stacks, and give them `STACKS_SECONDS` to do so."""
        self._signal(signal.Signals[STACK_SIGNAL])
        time.sleep(STACKS_SECONDS)

    def end(self) -> None:
        """End the group with SIGTERM. After `GRACE_SECONDS`, or on Ctrl-C, send SIGKILL."""
        if self._ended:
            return
        if self.process.stdout:
            self.process.stdout.close()
        try:
            self._signal(signal.SIGTERM)
            deadline = time.monotonic() + GRACE_SECONDS
            while self._signal(0) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
        finally:
            self._signal(signal.SIGKILL)
            # Ctrl-C in `Popen.poll` may leave a lock held, so waiting may time out.
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=GRACE_SECONDS)
            self._guard.close()
            self._ended = True

    def _signal(self, number: int) -> bool:
        """Send a signal to the group. If ``number`` is 0, send nothing.

        Return True if the group still has processes.
        """
        self.process.poll()  # poll reaps the leader, which otherwise counts as alive
        try:
            os.killpg(self.process.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True


def run(command: Sequence[str], *, timeout: float | None, **options: Any) -> tuple[int, str]:
    """Run a program. Return its exit code and output.

    If the program cannot start, or takes too long, return 1 and the reason.

    ``options`` are arguments of `subprocess.Popen`, such as ``cwd`` and ``env``.
    """
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        group = ProcessGroup(command, text=True, errors="replace", **options)
    except OSError as error:
        return 1, str(error)
    try:
        output: str = group.process.communicate(timeout=timeout)[0]
    except subprocess.TimeoutExpired:
        return 1, f"the program took longer than {timeout:g} s"
    finally:
        group.end()
    return group.process.returncode, output


@cache
def version_of(path: str) -> str:
    """Return the version of an ``ncu`` or ``nsys`` program, e.g. ``2025.3.1``, or ``unknown``."""
    code, answer = run([path, "--version"], timeout=ANSWER_SECONDS)
    match = None if code else re.search(r"[Vv]ersion (\d+\.\d+\.\d+)", answer)
    return match[1] if match else "unknown"  # the program may hang, or be for another machine
