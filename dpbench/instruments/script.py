"""Measures the steps of a script with one instrument, in a new process that runs the script.

The new process runs the code `START`. Its first arguments are the paths of the task file and of
the guard. The path of the script (or the name of a module) and the script's arguments follow.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dpbench.child.messages import RECORDS, STACK, reported, where_stuck
from dpbench.child.script_ranks import Rank
from dpbench.child.task import Program, Task
from dpbench.core import gpu
from dpbench.core.errors import (
    CaseFailed,
    CaseTimedOut,
    ConfigurationError,
    InstrumentError,
    ScriptInterrupted,
)
from dpbench.core.files import check_is_file
from dpbench.core.subject import Subject
from dpbench.instruments.interface import InstrumentWrapper
from dpbench.launch.case_process import PendingMeasurement, describe_exit
from dpbench.launch.processes import GRACE_SECONDS, Guard
from dpbench.results.outcome import Outcome

START = """
import sys
del sys.path[:not sys.flags.safe_path]
from dpbench.child.program import add_to
add_to(sys.argv.pop(2))
from dpbench.child.script import main
main()
"""
"""Python code that the new process runs.

The current directory is removed from ``sys.path``, because a file in this directory could shadow a
module.
"""


@dataclass(frozen=True)
class ScriptRun(Program, InstrumentWrapper):
    """An instrument that runs an unmodified script and measures some of its steps."""

    def check(self) -> None:
        """Raise an error if the script, an option or the instrument cannot be used."""
        if Rank.here():
            self.instrument.check_ranks("this is one of several ranks")
        self.instrument.check()
        if self.skip < 0 or self.steps < 1:
            raise ConfigurationError(
                f"--skip must be at least 0 and --steps at least 1, but --skip is {self.skip} and "
                f"--steps is {self.steps}"
            )
        if self.timeout is not None and not self.timeout > 0:
            raise ConfigurationError(f"the time-out must be positive, not {self.timeout:g} s")
        if not self.is_module:
            check_is_file(Path(self.program[0]))

    def start(self, case: Subject) -> PendingScript:
        return PendingScript(self, case)


class PendingScript(PendingMeasurement):
    """A measurement of a script that runs in a new process and prints to this terminal."""

    def __init__(self, script: ScriptRun, case: Subject) -> None:
        self.script, self.case = script, case
        self._directory = tempfile.TemporaryDirectory(prefix="dpbench-")
        self._records = Path(self._directory.name) / "records"
        task = Path(self._directory.name) / "task.json"
        Task(case, script.instrument, script).write(task)
        self._guard = Guard()
        command = [sys.executable, "-c", START, str(task), self._guard.path, *script.program]
        command = [*script.instrument.profiler_command(case), *command]
        told = {**gpu.child_environment(), RECORDS: str(self._records)}
        self._process = subprocess.Popen(command, env={**os.environ, **told})

    def outcome(self) -> Outcome:
        code, interrupted = self._wait()
        outcome, why = reported(self._records), ""
        outcome = outcome or Outcome(self.case, (), details={"under_way": True})
        steps = outcome.details.get("observed") or "no"
        kind: type[InstrumentError] = CaseFailed
        left = self._records.with_name(STACK)
        if stack := left.read_text() if left.exists() else "":
            print(stack, file=sys.stderr)
            kind, limit = CaseTimedOut, f"{self.script.timeout:g} s"
            why = f"did not finish within {limit}: {where_stuck(stack)[1]}"
        elif outcome.details.get("under_way"):
            how = describe_exit(code) if code else "ended early with exit status 0"
            why = f"the script {how} after {steps} counted step(s)"
        if interrupted:
            kind = ScriptInterrupted
            why = "the script was interrupted, but the steps that were counted before are kept"
        if why:
            outcome = outcome.with_error(kind(f"{self.case.id}: {why}"))
        return self.script.instrument.read_report(outcome)

    def _wait(self) -> tuple[int, bool]:
        """Return the exit code, and whether Ctrl-C interrupted the script.

        The terminal sends Ctrl-C to the script's process too.
        """
        try:
            return self._process.wait(), False
        except KeyboardInterrupt:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_SECONDS)
            self.cancel()
            return self._process.wait(), True

    def cancel(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._guard.close()
