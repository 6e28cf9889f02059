"""Measuring a script's steps with one instrument, in a process that runs the script.

That process runs `START`. Its first argument is JSON that describes the task; the program's own
arguments follow. The program has the terminal, so the record is written to a file.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from dpbench import gpu
from dpbench.case import OUTSIDE, Case
from dpbench.errors import ConfigurationError, DpbenchError
from dpbench.files import check_is_file, write_text
from dpbench.instruments.case_process import describe_exit
from dpbench.instruments.elsewhere import watch_elsewhere
from dpbench.instruments.interface import (
    CaseFailed,
    CaseTimedOut,
    Delegating,
    InstrumentError,
    Running,
    ScriptInterrupted,
)
from dpbench.instruments.processes import GRACE_SECONDS, POLL_SECONDS
from dpbench.instruments.recorder import Recorder
from dpbench.instruments.script_faults import what_is_wrong
from dpbench.instruments.script_ranks import Rank
from dpbench.process.fork_server import end
from dpbench.process.messages import WAITING
from dpbench.process.places import STACK, place
from dpbench.process.program import print_error, run_program
from dpbench.process.step_finder import StepFinder, Stop
from dpbench.process.watched import watch
from dpbench.registry import INSTRUMENTS
from dpbench.results.outcome import Outcome
from dpbench.results.rows import Measurement

PR_SET_PDEATHSIG = 1  # of linux/prctl.h

START = (
    "import sys; del sys.path[:not sys.flags.safe_path]; "  # the current directory
    "from dpbench.instruments.script_process import main; main()"
)
"""The code of that process; the current directory must not shadow modules of dpbench."""


OFTEN = 100
"""The record is written after each of the first steps, then every so many, in case of a kill."""


@dataclass(frozen=True)
class ScriptRun(Delegating):
    """Runs a script, unmodified, and has an instrument's recorder hear some of its steps."""

    program: tuple[str, ...]  # a script or module, and its arguments
    is_module: bool = False
    skip: int = 3  # steps that come before those that count
    steps: int = 5  # that count
    go_on: bool = False  # after them, instead of being ended
    timeout: float | None = None  # seconds on its GPU after which it is ended all the same
    baseline: str | None = None  # the script by whose numbers those of this one are divided

    def check(self) -> None:
        """Check that the script exists and that the numbers of steps make sense."""
        if Rank.here():
            self.instrument.check_ranks("this is one of several ranks")
        self.instrument.check_script()
        if self.skip < 0 or self.steps < 1:
            raise ConfigurationError(
                f"needs --skip >= 0 and --steps >= 1, not {self.skip} and {self.steps}"
            )
        if self.timeout is not None and not self.timeout > 0:
            raise ConfigurationError(f"the time-out must be positive, not {self.timeout:g} s")
        if not self.is_module:
            check_is_file(Path(self.program[0]))

    def start(self, case: Case) -> RunningScript:
        return RunningScript(self, case)


class RunningScript(Running):
    """A script that runs in a process of its own, on this terminal."""

    def __init__(self, script: ScriptRun, case: Case) -> None:
        self.script, self.case = script, case
        self._directory = tempfile.TemporaryDirectory(prefix="dpbench-")
        self._record = Path(self._directory.name) / "record.json"
        path = INSTRUMENTS.import_path(INSTRUMENTS.canonical(type(script.instrument)))
        task = {
            "script": b64encode(pickle.dumps(script)).decode(),
            "path": [str(path)] if path else [],
            "case": asdict(case),
            "record": str(self._record),
        }
        command = [sys.executable, "-c", START, json.dumps(task), *script.program]
        command = [*script.instrument.before_script(case), *command]
        self._process = subprocess.Popen(command, env={**os.environ, **gpu.child_environment()})

    def rows(self) -> list[Measurement]:
        code, interrupted = self._wait()
        instrument = self.script.instrument
        record: dict[str, Any] = {"heard": 0, "under_way": True}
        try:
            record = json.loads(self._record.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            if not interrupted and (said := instrument.complaint(self.case)):
                raise said from None
        left = self._record.with_name(STACK)
        if stack := left.read_text() if left.exists() else "":
            print(stack, file=sys.stderr)
            record["message"] = (
                f"did not finish within {self.script.timeout:g} s: {place(stack)[1]}"
            )
        elif record.get("under_way"):
            how = describe_exit(code) if code else "ended at once with exit status 0"
            kept = f"; {n} steps were counted until then" if (n := record["heard"]) else ""
            record["message"] = f"the script {how}{kept or ', and nothing was counted'}"
        outcome = Outcome.from_json(asdict(self.case) | record)
        rows, error = list(outcome.rows), outcome.message
        if interrupted:
            error = "interrupted; what was counted until then is kept"
        if record.get("heard"):
            with suppress(*[InstrumentError] if error else []):  # which came before the report's
                rows += instrument.script_rows(self.case, record)
        self.operators, self.notes = outcome.operators, outcome.notes
        if error:
            kind = ScriptInterrupted if interrupted else CaseTimedOut if stack else CaseFailed
            failure = kind(f"{self.case.id}: {error}")
            failure.rows = rows
            raise failure
        return rows

    def _wait(self) -> tuple[int, bool]:
        """The exit code, and whether it was interrupted; Ctrl-C reaches the process by itself."""
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


# --- in the process of the script ------------------------------------------------------------


def run(
    script: ScriptRun,
    case: Case,
    record: Path,
    stopped: Callable[[], object] = lambda: None,
) -> int | str | None:
    """Run a script and write the record of its steps; returns its exit status, as for `sys.exit`.

    ``stopped`` is called at the end if the script was ended before its own.
    """
    process, raised = os.getpid(), ""
    code: int | str | None = 0
    recorder = script.instrument.recorder(case, script.steps)

    def keep() -> None:
        heard = recorder.heard
        if recorder.quick and (recorder.finished or heard <= OFTEN or heard % OFTEN == 0):
            _write_down(record, case, finder, recorder, under_way=True)

    finder = StepFinder(recorder, skip=script.skip, go_on=script.go_on, keep=keep)
    with ExitStack() as held:
        _lock_gpus(case, held)
        if script.timeout:
            stack = held.enter_context(record.with_name(STACK).open("w"))
            held.callback(faulthandler.cancel_dump_traceback_later)
            longest = min(script.timeout, threading.TIMEOUT_MAX)
            faulthandler.dump_traceback_later(longest, file=stack, exit=True)
        held.callback(recorder.close)
        watch(finder)
        if not script.instrument.hardware:
            watch_elsewhere(finder)
        write_down = partial(_write_down, record, case, finder, recorder)
        held.callback(setattr, os, "_exit", os._exit)
        os._exit = _exit_after(write_down)  # type: ignore[assignment]
        try:
            run_program(script.program, is_module=script.is_module)
        except Stop:
            held.callback(stopped)
        except SystemExit as error:
            code = error.code
        except BaseException as error:
            print_error(error)
            code = 130 if isinstance(error, KeyboardInterrupt) else 1
            raised = f"{type(error).__name__}: {error}".partition("\n")[0].removesuffix(": ")
        if os.getpid() != process:  # a fork of the script's own: all that is held is its parent's
            held.pop_all()
            if script.timeout:  # its thread, which no fork has, Python would wait for at its end
                if isinstance(code, str):
                    print(code, file=sys.stderr)
                end(code if isinstance(code, int) else int(code is not None))
            return code
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        write_down(code, raised)
    return code


def _lock_gpus(case: Case, held: ExitStack) -> None:
    """Lock the GPU of this process; those of all ranks as the first, for which the others wait."""
    rank = Rank.here()
    cards = gpu.visible_gpus()[: rank.ranks if rank else 1]
    if rank and rank.number:
        while cards and not rank.locked.exists():
            time.sleep(POLL_SECONDS)
        return

    def say(_: gpu.Gpu, holder: str) -> None:
        print(f"{WAITING} the GPU, held by {holder}", file=sys.stderr, flush=True)

    held.enter_context(gpu.all_exclusive(cards, case.id, say))
    if rank:
        write_text(rank.locked, "")


def _exit_after(write_down: Callable[[int], object]) -> Callable[[int], NoReturn]:
    """An ``os._exit`` that first writes the record, except in forks of the script."""
    exit_at_once, here = os._exit, (os.getpid(), threading.get_ident())

    def exit_later(status: int) -> NoReturn:
        if (os.getpid(), threading.get_ident()) == here:
            write_down(status)
        exit_at_once(status)

    return exit_later


def _write_down(
    path: Path,
    case: Case,
    finder: StepFinder,
    recorder: Recorder,
    code: int | str | None = 0,
    raised: str = "",
    *,
    under_way: bool = False,
) -> None:
    """Write the record, rows and what went wrong, for the process that started this one."""
    if not under_way:
        finder.close()
    recorder.wait = not under_way
    torch = str(getattr(sys.modules.get("torch"), "__version__", "not loaded"))
    try:
        outcome = recorder.outcome(case)
        outcome = replace(
            outcome,
            notes=(*outcome.notes, *_notes(finder, recorder, {row.phase for row in outcome.rows})),
            message=what_is_wrong(finder, recorder, raised, code),
        )
    except DpbenchError as error:
        outcome = Outcome(case, (), message=str(error), notes=tuple(finder.notes))
    # The report of ncu may have a further step, which did not end.
    more = {"torch": torch, "heard": recorder.heard, "under_way": under_way}
    write_text(path, json.dumps({**outcome.as_json(), **more}))


def _notes(finder: StepFinder, recorder: Recorder, phases: Collection[str]) -> Iterator[str]:
    yield from finder.remarks()
    if "backward" in phases and "forward" not in phases:
        yield f"no module was called before backward: forward is in {OUTSIDE!r}, or compiled"
    if recorder.heard and not recorder.finished:
        yield f"steps that count: {recorder.heard}, where {recorder.wanted} were asked for"


def leave_threads(seconds: float = GRACE_SECONDS) -> None:
    """Exit after some seconds even if threads of the script still run.

    The seconds end when `atexit` functions are called, which may take as long as they like.
    """

    def leave() -> None:
        sys.stdout.flush()
        print("dpbench exec: a thread of the script's did not end with it", file=sys.stderr)
        sys.stderr.flush()
        os._exit(0)

    waiting = threading.Timer(seconds, leave)
    waiting.daemon = True
    waiting.start()
    atexit.register(waiting.cancel)


def main() -> NoReturn:
    """Run the script that the first argument describes."""
    if sys.platform == "linux":  # this process shall end with its parent, however that ends
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    task = json.loads(sys.argv[1])
    script, case = unpacked(task)
    sys.exit(run(script, case, Path(task["record"]), leave_threads))


def unpacked(task: Mapping[str, Any]) -> tuple[ScriptRun, Case]:
    """The script and the case of a task; an instrument from outside is imported from its path."""
    path = [*sys.path]
    sys.path += task["path"]
    try:
        return pickle.loads(b64decode(task["script"])), Case.from_row(task["case"])
    finally:
        sys.path[:] = path
