"""Runs one case in its own process: command, environment, log, time-out."""

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

    The log has the command, then everything that the process prints. The whole process group is
    ended when the process ends, at its time-out, by `cancel`, and when this process ends.

    Args:
        task: the case and the instrument.
        before: a profiler that starts ``dpbench step``, with its arguments; by default none.
        log: the log file; if None or not writable, a temporary file that `cancel` deletes.
        timeout: seconds until the child is ended, counted from when it has its GPU. Its imports
            before that may take as long, and so may each process that holds the GPU meanwhile.
        read: makes rows from the result.
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
        keeps_log = log is not None and os.access(log.parent, os.W_OK)
        scratch = self._scratch.enter_context(tempfile.TemporaryDirectory(prefix="dpbench-"))
        if log is None or not keeps_log:
            log = Path(scratch, "log")
        case, told = task.case, log.with_suffix(".task.json")
        task.write(told)
        command = [*before, sys.executable, *COMMAND[1:], "step", "--task", str(told)]
        self.case, self.log, self.timeout, self.read = case, log, timeout, read
        self.records = Path(scratch, "records")
        added = child_environment() | visible_to_case(case.gpus)
        if path := python_path(case):
            added["PYTHONPATH"] = path
        pasteable = shlex.join(["env", *(f"{k}={v}" for k, v in added.items()), *command])
        if keeps_log:
            print(f"$ {pasteable}", file=sys.stderr, flush=True)
        self._begun = time.monotonic()
        log.unlink(missing_ok=True)  # a leftover writer of an earlier log must not write here
        with log.open("x", encoding="utf-8") as stream:
            stream.write(f"$ {pasteable}\n")
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
            what = f"{type(error).__name__}: {error}"
            message = f"{self.case.id}: its record cannot be read ({what})"
            raise CaseFailed(message, log=self.log) from error

    def record(self) -> dict[str, Any]:
        """Wait for the process; return its result or raise an error that says why it failed."""
        late = ""
        try:
            self._wait()
        except CaseTimedOut as time_out:
            late = time_out.args[0]
            if self.case.gpus > 1:
                self.group.ask_ranks()
        finally:
            self.group.end()
        lines = log_lines(self.log)
        record, code = result_of(read_records(self.records)), self.group.process.returncode
        error = record.get("error")
        if late:  # its message has the places from the ranks' stacks
            where = f": {error['message']}" if error else ""
            raise CaseTimedOut(f"{late}{where}", log=self.log)
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
        kind = _error_named(error["kind"])
        message = error["message"].removesuffix(f"; {kind.remedy}")
        raise kind(f"{self.case.id}: {message}", log=self.log)

    @property
    def exit_code(self) -> int | None:
        """The exit status, negative if a signal ended the process; None while it runs."""
        return self.group.poll()

    @property
    def runs(self) -> bool:
        """Whether it runs and is within its time-out."""
        return self.exit_code is None and time.monotonic() - self._begun <= self.timeout

    def _wait(self) -> None:
        """Read records until the process has ended, and end it if it takes too long.

        Setting up, waiting for each process that holds its GPU, and measuring may each take as
        long as the time-out says.
        """
        since, heard, last = self._begun, 0, dict[str, Any]()
        while self.exit_code is None:
            records = read_records(self.records)
            if len(records) > heard and MEASURING not in last:
                since, heard, last = time.monotonic(), len(records), records[-1]
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
    """``PYTHONPATH`` with which a child can import the case's classes; None if all are built in.

    Its entries are the ones of ``sys.path`` before the standard library (pytest adds some there)
    and the directories from which the case's classes were imported.
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
    """The name by which a process's record refers to an error's class, ``module:Class``."""
    return f"{kind.__module__}:{kind.__qualname__}"


def _error_named(name: str) -> type[InstrumentError]:
    """The error class with this name, if it is an `InstrumentError`."""
    with suppress(ImportError, AttributeError, ValueError):
        found = resolve_name(name)
        if isinstance(found, type) and issubclass(found, InstrumentError):
            return found
    return CaseFailed


def describe_exit(returncode: int) -> str:
    """An exit status in words."""
    if returncode < 0:  # a real-time signal has no name
        names = {number.value: number.name for number in signal.Signals}
        return f"was killed by {names.get(-returncode, f'signal {-returncode}')}"
    return f"ended with exit code {returncode}" if returncode else "left no result"


def log_lines(log: Path) -> list[str]:
    """The lines of a log file."""
    return log.read_text(encoding="utf-8", errors="replace").splitlines()


def log_tail(error: InstrumentError, lines: int = 20) -> str:
    """The end of a failed case's log, or nothing if it has none."""
    if error.log is None or not error.log.exists():
        return ""
    return "\n".join(log_lines(error.log)[-lines:])
