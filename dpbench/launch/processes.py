"""Programs that end together with their own processes, and with whoever started them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any

from dpbench.child.hang_report import ASKED
from dpbench.child.messages import POLL_SECONDS
from dpbench.launch.fork_server import fork

ANSWER_SECONDS = 30.0  # a program has to answer a question; it takes a second or two
FRAMES_SECONDS = 0.5  # a rank has to write down where it is, which takes milliseconds
GRACE_SECONDS = 5.0  # how long a process group has to end by itself before it is killed
GUARD = f"""
read -r group || exit
read -r ended && exit
kill -s TERM -- "-$group" && sleep {GRACE_SECONDS:g} && kill -s KILL -- "-$group"
"""
"""A shell that reads the number of a process group, and then waits for a second line. If its input
ends before that line comes, its parent is gone, by ``kill -9`` for example, and it ends the group.
ncu starts further processes, so a signal at the parent's death for its own children
(``PR_SET_PDEATHSIG``) is not enough."""


@contextmanager
def ctrl_c_later() -> Iterator[None]:
    """Handle Ctrl-C, and signals that end a process as it does, when what is in here is done.

    Python handles a signal between any two instructions, so also between a program's start and the
    assignment that keeps it; whoever does not know of the program cannot end it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are handled in the main thread
        return
    heard = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers: dict[int, Any] = {n: h for n in heard if callable(h := signal.getsignal(n))}
    arrived: list[tuple[int, FrameType | None]] = []
    inside = True

    def handle(number: int, frame: FrameType | None) -> None:
        if inside:
            arrived.append((number, frame))
        else:  # before the handler was restored
            handlers[number](number, frame)

    try:
        for number in handlers:
            signal.signal(number, handle)
        yield
    finally:
        inside = False
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in arrived:
            handlers[number](number, frame)


class ProcessGroup:
    """A program in a process group of its own, with a guard that outlives this process."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", GUARD],
            stdin=subprocess.PIPE,  # no other child inherits our end of it
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
            text=True,
        )
        self._ended = False
        try:
            self.process: Any = fork(command, options, self._announce)
            if self.process is None:
                with ctrl_c_later():  # or nobody would know of the program
                    self.process = subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, start_new_session=True, **options
                    )
                    self._announce(self.process.pid)
        except BaseException:
            assert self._guard.stdin
            self._guard.stdin.close()  # it ends what it knows of
            raise

    def _announce(self, process_id: int) -> None:
        print(process_id, file=self._guard.stdin, flush=True)

    def poll(self) -> int | None:
        """The exit code, negative if a signal ended it; None as long as the program runs."""
        with ctrl_c_later():  # which could leave the lock of `subprocess.Popen.poll` taken
            code: int | None = self.process.poll()
        return code

    def ask_ranks(self) -> None:
        """Have ranks write down where they are."""
        self._signal(signal.Signals[ASKED])
        time.sleep(FRAMES_SECONDS)

    def end(self) -> None:
        """End what is left of the group: first politely, then for good, at once if interrupted."""
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
            self.process.wait()
            self._guard.communicate("ended\n")
            self._ended = True

    def _signal(self, number: int) -> bool:
        """Send a signal, 0 for none; returns whether the group is alive."""
        self.poll()  # reap the leader, which counts as a member until then
        try:
            os.killpg(self.process.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True


def run(command: Sequence[str], *, timeout: float) -> tuple[int, str]:
    """Exit code and output of a program; or 1 and why there is no output."""
    try:
        group = ProcessGroup(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
    except OSError as error:
        return 1, str(error)
    try:
        output: str = group.process.communicate(timeout=timeout)[0]
    except subprocess.TimeoutExpired:
        return 1, f"it took longer than {timeout:g} s"
    finally:
        group.end()
    return group.process.returncode, output


@cache
def version_of(path: str) -> str:
    """The version that an ``ncu`` or ``nsys`` says it has, e.g. ``2025.3.1``, or ``unknown``."""
    code, answer = run([path, "--version"], timeout=ANSWER_SECONDS)
    match = None if code else re.search(r"[Vv]ersion (\d+\.\d+\.\d+)", answer)
    return match[1] if match else "unknown"  # made for another machine, say, or it hangs
