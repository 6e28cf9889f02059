"""Runs one case in its own process, with a log and a time-out."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from dpbench.child.messages import (
    MEASURING,
    POLL_SECONDS,
    RECORDS,
    WAITING,
    read_records,
    reported,
)
from dpbench.child.task import Task
from dpbench.core.errors import (
    CaseFailed,
    CaseOutOfMemory,
    CaseTimedOut,
    GpuBusy,
    InstrumentError,
)
from dpbench.core.gpu import child_environment, visible_to_case
from dpbench.core.registry import is_builtin, names_of
from dpbench.core.subject import Subject
from dpbench.launch.processes import ProcessGroup
from dpbench.results.outcome import Outcome

MODULE = ("-P", "-m", "dpbench")  # -P keeps the current directory out of sys.path

LOG_LINES = 20
"""Number of lines at the end of a failed case's log that its outcome has."""


class PendingMeasurement(ABC):
    """A measurement in progress, in this or another process."""

    @abstractmethod
    def outcome(self) -> Outcome:
        """Wait until the measurement ends, and return its outcome.

        If the measurement failed, the outcome has the error, or the method raises it.
        """

    def cancel(self) -> None:  # noqa: B027
        """End the measurement and its processes, unless it has ended."""


class CaseProcess(PendingMeasurement):
    """The process of one case, from its start to its record.

    The log contains the command, then everything that the process prints. The process group
    of the case is ended when the case's process ends, at the time-out, by `cancel`, and when this
    process ends.

    Args:
        task: the case and the instrument.
        before: the command of a profiler that starts ``dpbench step``; empty by default.
        log: the log file. If it is None or cannot be written, the log is a temporary file that
            `cancel` deletes.
        timeout: limit in seconds for the measurement, from the time when the process has its GPU.
            The same limit applies, separately, to the imports and to the wait for each process that
            holds the GPU.
        complete: adds to the outcome that the process has reported, or to the outcome with the
            error of a process that failed.
    """

    def __init__(
        self,
        task: Task,
        before: Sequence[str] = (),
        *,
        log: Path | None,
        timeout: float,
        complete: Callable[[Outcome], Outcome] = lambda outcome: outcome,
    ) -> None:
        self._scratch = ExitStack()
        if log is not None:
            with suppress(OSError):
                log.parent.mkdir(parents=True, exist_ok=True)
        self.keeps_log = log is not None and os.access(log.parent, os.W_OK)
        scratch = self._scratch.enter_context(tempfile.TemporaryDirectory(prefix="dpbench-"))
        if log is None or not self.keeps_log:
            log = Path(scratch, "log")
        case, task_file = task.case, log.with_suffix(".task.json")
        task.write(task_file)
        command = [*before, sys.executable, *MODULE, "step", "--task", str(task_file)]
        self.case, self.log, self.timeout, self.complete = case, log, timeout, complete
        self.records = Path(scratch, "records")
        added = child_environment() | visible_to_case(case.gpus)
        if path := python_path(case):
            added["PYTHONPATH"] = path
        shell_command = shlex.join(["env", *(f"{k}={v}" for k, v in added.items()), *command])
        if self.keeps_log:
            print(f"$ {shell_command}", file=sys.stderr, flush=True)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        self._start = time.monotonic()
        log.unlink(missing_ok=True)  # a process of an earlier run may still write to the old log
        with log.open("x", encoding="utf-8") as stream:
            stream.write(f"$ {shell_command}\n")
            stream.flush()
            self.group = ProcessGroup(
                command,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**inherited, **added, RECORDS: str(self.records)},
            )

    def outcome(self) -> Outcome:
        """Return the outcome that the process has reported, or the reason of its failure."""
        try:
            outcome = self.complete(self._reported())
        except InstrumentError as error:
            outcome = Outcome.failed(self.case, error)
        except (KeyError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            message = f"{self.case.id}: the process's outcome cannot be read ({reason})"
            outcome = Outcome.failed(self.case, CaseFailed(message))
        if outcome.error is None:
            return outcome
        tail = "\n".join(log_lines(self.log)[-LOG_LINES:])
        return replace(outcome, log=str(self.log) if self.keeps_log else None, log_tail=tail)

    def _reported(self) -> Outcome:
        """Wait for the process and return its outcome, which contains any error."""
        failure: InstrumentError | None = None
        try:
            self._wait()
        except (CaseTimedOut, GpuBusy) as error:
            failure = error
            if isinstance(error, CaseTimedOut) and self.case.gpus > 1:
                self.group.request_stacks()
        finally:
            self.group.end()
        outcome, code = reported(self.records), self.group.process.returncode
        if failure:  # the message of the process says where each rank was
            where = f": {outcome.message}" if outcome and outcome.error else ""
            return Outcome.failed(self.case, type(failure)(f"{failure.args[0]}{where}"))
        if outcome and outcome.error:
            message = f"{self.case.id}: {outcome.message}"
            return replace(outcome, message=message).with_case(self.case)
        if outcome and not code:
            return outcome.with_case(self.case)
        lines = log_lines(self.log)  # the process ended without reporting an error
        last = next(filter(None, reversed(lines[1:])), "")
        why = ": ".join(filter(None, (f"the process {describe_exit(code)}", last[:200])))
        kind: type[InstrumentError] = CaseFailed
        if any("torch.OutOfMemoryError" in line for line in lines):
            kind, why = CaseOutOfMemory, "CUDA out of memory"
        return Outcome.failed(self.case, kind(f"{self.case.id}: {why}"))

    @property
    def runs(self) -> bool:
        """True if the process runs, and started at most ``timeout`` seconds ago."""
        return self.group.process.poll() is None and time.monotonic() - self._start <= self.timeout

    def _wait(self) -> None:
        """Wait until the process has ended. Raise an error if the process takes too long.

        The time-out applies separately to the imports, to waiting for each process that holds the
        GPU, and to the measurement.
        """
        since, number_read, last = self._start, 0, dict[str, Any]()
        while self.group.process.poll() is None:
            records = read_records(self.records)
            if len(records) > number_read and MEASURING not in last:
                since, number_read, last = time.monotonic(), len(records), records[-1]
            if time.monotonic() - since > self.timeout:
                case, limit = self.case, f"{self.timeout:g} s"
                if holder := last.get(WAITING):
                    raise GpuBusy(f"{case.id} waited {limit} for {holder}")
                raise CaseTimedOut(f"{case.id} did not finish within {limit}")
            time.sleep(POLL_SECONDS)

    def cancel(self) -> None:
        with self._scratch:
            self.group.end()


def python_path(case: Subject) -> str | None:
    """Return a ``PYTHONPATH`` with which a child can import the case's classes.

    Return None if all classes are built in. The result has three kinds of entries: the entries of
    ``sys.path`` before the standard library, to which pytest adds its own; the directories from
    which the case's classes were imported; and the entries of the current ``PYTHONPATH``.
    """
    if is_builtin(case):
        return None
    own = sysconfig.get_paths()
    added = takewhile(lambda entry: entry != own["stdlib"], sys.path)
    others = [(known, name) for _, known, name in names_of(case) if not known.is_builtin(name)]
    imported = [str(path) for known, name in others if (path := known.import_path(name))]
    entries = [*added, *imported, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    wanted = [e for e in entries if e and e not in own.values() and Path(e).exists()]
    return os.pathsep.join(dict.fromkeys(wanted))


def describe_exit(returncode: int) -> str:
    """Describe an exit code as a predicate of a sentence."""
    if returncode < 0:  # real-time signals have no names
        names = {number.value: number.name for number in signal.Signals}
        return f"was killed by {names.get(-returncode, f'signal {-returncode}')}"
    return f"ended with exit code {returncode}" if returncode else "left no result"


def log_lines(log: Path) -> list[str]:
    """Return the lines of a log file."""
    return log.read_text(encoding="utf-8", errors="replace").splitlines()
