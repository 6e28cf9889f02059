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
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from itertools import takewhile
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from dpbench.child.failures import (
    CaseFailed,
    CaseOutOfMemory,
    CaseTimedOut,
    GpuBusy,
    InstrumentError,
)
from dpbench.child.messages import (
    MEASURING,
    POLL_SECONDS,
    RECORDS,
    WAITING,
    read_records,
    result_of,
)
from dpbench.child.task import Task
from dpbench.core.gpu import child_environment, visible_to_case
from dpbench.core.registry import is_builtin, names_of
from dpbench.core.subject import Subject
from dpbench.launch.fork_server import COMMAND, environment_of_cases
from dpbench.launch.pending import PendingMeasurement
from dpbench.launch.processes import ProcessGroup
from dpbench.results.rows import Measurement


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
        read: a function that makes rows from the result.
    """

    def __init__(
        self,
        task: Task,
        before: Sequence[str] = (),
        *,
        log: Path | None,
        timeout: float,
        read: Callable[[CaseProcess], list[Measurement]],
    ) -> None:
        self._scratch = ExitStack()
        if log is not None:
            with suppress(OSError):
                log.parent.mkdir(parents=True, exist_ok=True)
        log_is_kept = log is not None and os.access(log.parent, os.W_OK)
        scratch = self._scratch.enter_context(tempfile.TemporaryDirectory(prefix="dpbench-"))
        if log is None or not log_is_kept:
            log = Path(scratch, "log")
        case, task_file = task.case, log.with_suffix(".task.json")
        task.write(task_file)
        command = [*before, sys.executable, *COMMAND[1:], "step", "--task", str(task_file)]
        self.case, self.log, self.timeout, self.read = case, log, timeout, read
        self.records = Path(scratch, "records")
        added = child_environment() | visible_to_case(case.gpus)
        if path := python_path(case):
            added["PYTHONPATH"] = path
        shell_command = shlex.join(["env", *(f"{k}={v}" for k, v in added.items()), *command])
        if log_is_kept:
            print(f"$ {shell_command}", file=sys.stderr, flush=True)
        self._start = time.monotonic()
        log.unlink(missing_ok=True)  # a process of an earlier run may still write to the old log
        with log.open("x", encoding="utf-8") as stream:
            stream.write(f"$ {shell_command}\n")
            stream.flush()
            self.group = ProcessGroup(
                command,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**environment_of_cases(), **added, RECORDS: str(self.records)},
            )

    def rows(self) -> list[Measurement]:
        try:
            return self.read(self)
        except InstrumentError as error:
            error.log = self.log
            raise
        except (KeyError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            message = f"{self.case.id}: the process's record cannot be read ({reason})"
            raise CaseFailed(message, log=self.log) from error

    def record(self) -> dict[str, Any]:
        """Wait for the process and return its result, or raise an error with the reason."""
        timeout_message = ""
        try:
            self._wait()
        except CaseTimedOut as time_out:
            timeout_message = time_out.args[0]
            if self.case.gpus > 1:
                self.group.request_stacks()
        finally:
            self.group.end()
        lines = log_lines(self.log)
        record, code = result_of(read_records(self.records)), self.group.process.returncode
        error = record.get("error")
        if timeout_message:  # the error's message says where each rank was
            where = f": {error['message']}" if error else ""
            raise CaseTimedOut(f"{timeout_message}{where}", log=self.log)
        if record and not error and not code:
            self.labels, self.notes = record.get("labels", {}), record.get("about", ())
            self.imported = record.get("imported", {})
            return record
        if not error:  # the process ended without reporting an error
            ended = f"the process {describe_exit(code)}"
            last = next(filter(None, reversed(lines[1:])), "")
            error = {"kind": "", "message": ": ".join(filter(None, (ended, last[:200])))}
            if any("torch.OutOfMemoryError" in line for line in lines):
                error = {"kind": name_of(CaseOutOfMemory), "message": "CUDA out of memory"}
        kind = _error_class(error["kind"])
        message = error["message"].removesuffix(f"; {kind.remedy}")
        raise kind(f"{self.case.id}: {message}", log=self.log)

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative if a signal ended the process. None while it runs."""
        return self.group.poll()

    @property
    def runs(self) -> bool:
        """True if the process runs, and started at most ``timeout`` seconds ago."""
        return self.exit_code is None and time.monotonic() - self._start <= self.timeout

    def _wait(self) -> None:
        """Wait until the process has ended. Raise an error if the process takes too long.

        The time-out applies separately to the imports, to waiting for each process that holds the
        GPU, and to the measurement.
        """
        since, number_read, last = self._start, 0, dict[str, Any]()
        while self.exit_code is None:
            records = read_records(self.records)
            if len(records) > number_read and MEASURING not in last:
                since, number_read, last = time.monotonic(), len(records), records[-1]
            if time.monotonic() - since > self.timeout:
                case, limit = self.case, f"{self.timeout:g} s"
                if holder := last.get(WAITING):
                    raise GpuBusy(f"{case.id} waited {limit} for {holder}", log=self.log)
                raise CaseTimedOut(f"{case.id} did not finish within {limit}", log=self.log)
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


def name_of(kind: type[Exception]) -> str:
    """Return the name of an error's class in a record: ``module:Class``."""
    return f"{kind.__module__}:{kind.__qualname__}"


def _error_class(name: str) -> type[InstrumentError]:
    """Return the named class if it is an `InstrumentError`, otherwise `CaseFailed`."""
    with suppress(ImportError, AttributeError, ValueError):
        found = resolve_name(name)
        if isinstance(found, type) and issubclass(found, InstrumentError):
            return found
    return CaseFailed


def describe_exit(returncode: int) -> str:
    """Describe an exit code as a predicate of a sentence."""
    if returncode < 0:  # real-time signals have no names
        names = {number.value: number.name for number in signal.Signals}
        return f"was killed by {names.get(-returncode, f'signal {-returncode}')}"
    return f"ended with exit code {returncode}" if returncode else "left no result"


def log_lines(log: Path) -> list[str]:
    """Return the lines of a log file."""
    return log.read_text(encoding="utf-8", errors="replace").splitlines()


def log_tail(error: InstrumentError, lines: int = 20) -> str:
    """Return the last lines of a failed case's log, or "" if the case has no log."""
    if error.log is None or not error.log.exists():
        return ""
    return "\n".join(log_lines(error.log)[-lines:])
