"""Running one case in a process of its own: command, environment, log, time-out."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpbench.case import Case
from dpbench.errors import ConfigurationError
from dpbench.gpu import MEASURING, WAITING, child_environment
from dpbench.instruments.base import (
    CaseFailed,
    CaseOutOfMemory,
    CaseTimedOut,
    InstrumentError,
    Running,
)
from dpbench.registry import MODELS, TRAINERS, arguments, child_python_path
from dpbench.results.rows import Measurement

POLL_SECONDS = 0.05
GRACE_SECONDS = 5.0
"""How long a process group has to end by itself before it is killed."""


@dataclass(frozen=True)
class Steps:
    """How many steps a child runs before it is observed, and how many while it is.

    Raises:
        ConfigurationError: no active step, or fewer than no warm-up steps.
    """

    warmup: int
    active: int

    def __post_init__(self) -> None:
        if self.warmup < 0 or self.active < 1:
            raise ConfigurationError(
                f"steps: needs warm-up >= 0 and active >= 1, not {self.warmup} and {self.active}"
            )


def step_command(case: Case, steps: Steps, *, device: str, nvtx: bool = False) -> list[str]:
    """The argument list that runs one case: ``python -m dpbench step …``."""
    command = [sys.executable, "-m", "dpbench", "step", *arguments(case)]
    command += ["--device", device, "--warmup", str(steps.warmup), "--active", str(steps.active)]
    return [*command, "--nvtx"] if nvtx else command


def environment(case: Case) -> dict[str, str]:
    """What a case's process needs in its environment beyond this process's."""
    added = child_environment()
    path = child_python_path(TRAINERS.import_path(case.trainer), MODELS.import_path(case.model))
    return {**added, "PYTHONPATH": path} if path else added


class Child(Running):
    """The process of one case, from its start to its record.

    Everything that it prints goes to ``log``, after its command. Its whole process group ends
    with it, with its time-out, and with `cancel`.

    Args:
        command: an argument list; never a shell string, because ids may hold brackets.
        case: whose command it is.
        log: the file to write.
        timeout: seconds from when the child has its GPU until it is ended; setting up before
            that (imports) has as many seconds of its own, waiting for the GPU any number.
        read: makes rows of the record that the child printed.
        watch: is given each new piece of the log while the child is waited for.
    """

    def __init__(
        self,
        command: list[str],
        *,
        case: Case,
        log: Path,
        timeout: float,
        read: Callable[[Child], list[Measurement]],
        watch: Callable[[str], None] | None = None,
    ) -> None:
        self.case, self.log, self.timeout, self.read = case, log, timeout, read
        self.watch = watch
        self._ended = False
        added = environment(case)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        pasteable = shlex.join(["env", *(f"{k}={v}" for k, v in added.items()), *command])
        print(f"$ {pasteable}", file=sys.stderr, flush=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as stream:
            stream.write(f"$ {pasteable}\n")
            stream.flush()
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**inherited, **added},
                start_new_session=True,
            )

    def rows(self) -> list[Measurement]:
        """Wait for the process, and make rows of its record; see `Running.rows`."""
        return self.read(self)

    def record(self) -> dict[str, Any]:
        """Wait for the process, and return the record that it printed.

        Raises:
            CaseOutOfMemory, CaseTimedOut, CaseFailed: what the name says; each names the log.
        """
        try:
            in_time = self._wait()
        finally:
            self.cancel()
        if not in_time:
            message = f"{self.case.id} did not finish within {self.timeout:g} s"
            raise CaseTimedOut(message, log=self.log)
        return _record(self.case, self.process.returncode, self.log)

    def _wait(self) -> bool:
        """Wait for the process; False if it outlasts its time-out."""
        deadline = time.monotonic() + self.timeout
        waiting = started = False
        with self.log.open(encoding="utf-8", errors="replace") as stream:
            while self.process.poll() is None:
                text = stream.read()
                if self.watch and text:
                    self.watch(text)
                if MEASURING in text and not started:
                    started, deadline = True, time.monotonic() + self.timeout
                waiting = not started and (waiting or WAITING in text)
                if not waiting and time.monotonic() > deadline:
                    return False
                time.sleep(POLL_SECONDS)
        return True

    def cancel(self) -> None:
        """End what is left of the process group: first politely, then for good."""
        if self._ended:
            return
        self._ended = True
        for ending in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, ending)
            except ProcessLookupError:
                break
            deadline = time.monotonic() + GRACE_SECONDS
            while time.monotonic() < deadline and self._group_lives():
                time.sleep(POLL_SECONDS)
        self.process.wait()

    def _group_lives(self) -> bool:
        self.process.poll()  # reap the leader, which counts as a member until then
        try:
            os.killpg(self.process.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True


def _record(case: Case, returncode: int, log: Path) -> dict[str, Any]:
    """The record in the log, or the error that the log describes."""
    records = [line for line in log_lines(log) if line.startswith('{"dpbench"')]
    try:
        record: dict[str, Any] = json.loads(records[-1]) if records else {}
    except json.JSONDecodeError:
        record = {}
    error = record.get("error")
    text = log.read_text(encoding="utf-8", errors="replace")
    if (error or {}).get("kind") == "OutOfMemory" or "torch.OutOfMemoryError" in text:
        detail = error["message"] if error else "CUDA out of memory"
        raise CaseOutOfMemory(f"{case.id}: {detail}", log=log)
    if error:
        raise CaseFailed(f"{case.id}: {error['message']}", log=log)
    if returncode or not record:
        raise CaseFailed(f"{case.id}: the process {describe_exit(returncode)}", log=log)
    return record


def describe_exit(returncode: int) -> str:
    """An exit status in words."""
    if returncode < 0:
        return f"was killed by {signal.Signals(-returncode).name}"
    return f"ended with exit code {returncode}" if returncode else "printed no record"


def log_lines(log: Path) -> list[str]:
    """The lines of a log file."""
    return log.read_text(encoding="utf-8", errors="replace").splitlines()


def log_tail(error: InstrumentError, lines: int = 20) -> str:
    """The end of a failed case's log, or nothing if it has none."""
    if error.log is None or not error.log.exists():
        return ""
    return "\n".join(deque(log_lines(error.log), maxlen=lines))
