"""Runs an unmodified script while a recorder observes the script's steps."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from dpbench.child.imported import imported_files
from dpbench.child.messages import POLL_SECONDS, RECORDS, STACK, WAITING, append_record
from dpbench.child.patches import watch, watch_threads_and_forks
from dpbench.child.program import exit_process, print_error, run_program
from dpbench.child.recorder import Recorder
from dpbench.child.script_ranks import Rank
from dpbench.child.step_finder import MOST_TURNS, StepFinder, Stop
from dpbench.child.task import Program, Task
from dpbench.core import gpu
from dpbench.core.case import OUTSIDE
from dpbench.core.errors import CaseFailed, DpbenchError
from dpbench.core.files import write_text
from dpbench.core.subject import Subject
from dpbench.results.outcome import Outcome

PR_SET_PDEATHSIG = 1  # from linux/prctl.h

OFTEN = 100
"""A `quick` recorder writes a record after each of the first `OFTEN` steps, and later after every
`OFTEN` steps. So a record exists even if the process is killed."""


def run(task: Task, script: Program, records: str) -> tuple[int | str | None, bool]:
    """Run a script, and append records of its steps to the file ``records``.

    Returns:
        The script's exit status, as for `sys.exit`, and whether dpbench ended the script early.
    """
    process, raised, case = os.getpid(), "", task.case
    code, stopped = None, False
    recorder = task.instrument.recorder(case, script.steps)

    def keep() -> None:
        observed = recorder.observed
        if recorder.quick and (recorder.finished or observed <= OFTEN or observed % OFTEN == 0):
            _write_down(records, case, finder, recorder, under_way=True)

    finder = StepFinder(recorder, skip=script.skip, go_on=script.go_on, keep=keep)
    with ExitStack() as held:
        _lock_gpus(case, held)
        if script.timeout:
            stack = held.enter_context(Path(records).with_name(STACK).open("w"))
            held.callback(faulthandler.cancel_dump_traceback_later)
            longest = min(script.timeout, threading.TIMEOUT_MAX)
            faulthandler.dump_traceback_later(longest, file=stack, exit=True)
        held.callback(recorder.close)
        watch(finder)
        if not task.instrument.hardware:
            watch_threads_and_forks(finder)
        try:
            run_program(script.program, is_module=script.is_module)
        except SystemExit as error:
            code, stopped = error.code, isinstance(error, Stop)
        except BaseException as error:
            print_error(error)
            code = 130 if isinstance(error, KeyboardInterrupt) else 1
            raised = f"{type(error).__name__}: {error}".partition("\n")[0].removesuffix(": ")
        if os.getpid() != process:  # a fork of the script; the parent releases the resources
            held.pop_all()
            if isinstance(code, str):
                print(code, file=sys.stderr)
            # `sys.exit` would wait for the time-out's thread, which does not exist in a fork.
            exit_process(code if isinstance(code, int) else int(code is not None))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _write_down(records, case, finder, recorder, code, raised)
    return code, stopped


def _lock_gpus(case: Subject, held: ExitStack) -> None:
    """Lock this process's GPU. If there are several ranks, rank 0 locks the GPUs of all ranks."""
    rank = Rank.here()
    cards = gpu.visible_gpus()[: rank.ranks if rank else 1]
    if rank and rank.number:
        while cards and not rank.locked.exists():
            time.sleep(POLL_SECONDS)
        return

    def say(_: gpu.Gpu, holder: str) -> None:
        print(f"dpbench: {WAITING} the GPU, held by {holder}", file=sys.stderr, flush=True)

    held.enter_context(gpu.lock_gpus(cards, case.id, say))
    if rank:
        write_text(rank.locked, "")


def _write_down(
    path: str,
    case: Subject,
    finder: StepFinder,
    recorder: Recorder,
    code: int | str | None = 0,
    raised: str = "",
    *,
    under_way: bool = False,
) -> None:
    """Append the outcome with the rows and any error, for the parent process."""
    if not under_way:
        finder.close()
    recorder.wait = not under_way
    try:
        outcome = recorder.outcome(case)
        phases = {row.phase for row in outcome.rows}
        notes = (*outcome.notes, *_notes(finder, recorder, phases))
        outcome = replace(outcome, notes=notes, examples=finder.examples, labels=finder.labels)
        if why := _failure_message(finder, recorder, raised, code):
            outcome = outcome.with_error(CaseFailed(f"{case.id}: {why}"))
    except DpbenchError as error:
        why = str(error).removeprefix(f"{case.id}: ")
        failed = Outcome.failed(case, CaseFailed(f"{case.id}: {why}"))
        outcome = replace(failed, notes=tuple(finder.notes))
    if under_way:
        outcome = replace(outcome, details={**outcome.details, "under_way": True})
    else:
        outcome = replace(outcome, imported=imported_files())
    append_record(outcome.as_json(), path)


def _failure_message(
    finder: StepFinder, recorder: Recorder, raised: str, code: int | str | None
) -> str:
    """Return why the script failed, or why no step was observed; an empty string otherwise."""
    kept = f"; steps counted until then: {recorder.observed}" if recorder.observed else ""
    if raised:
        return f"the script failed with {raised}{kept}"
    if finder.failure is not None:
        return f"the script's steps could not be recorded: {finder.failure}{kept}"
    if code:
        kept = kept or ", before any step was counted"
        return f"the script ended by itself with exit status {code!r}{kept}"
    if recorder.observed:
        return ""
    if finder.turns.turns_taken and not finder.steps:
        return (
            f"the script ended before each of its optimizers had stepped once (they took turns "
            f"{finder.turns.turns_taken} times): let it run for more than {MOST_TURNS} turns"
        )
    if finder.steps:
        enough = max(0, finder.steps - (recorder.wanted or 0))
        return (
            f"the script's number of steps is {finder.steps}, and the first {finder.skip} do not "
            f"count: let it take more steps, or use --skip {enough}"
        )
    return (
        "the script took no step that can be found: no torch.optim optimizer stepped after a "
        "backward in the main thread of the script's process, outside torch.compile"
    )


def _notes(finder: StepFinder, recorder: Recorder, phases: Collection[str]) -> Iterator[str]:
    yield from finder.remarks()
    if "backward" in phases and "forward" not in phases:
        yield f"no module was called before backward: forward is compiled, or in {OUTSIDE!r}"
    if recorder.observed and not recorder.finished:
        yield f"{recorder.observed} steps were counted, and {recorder.wanted} were requested"


def main() -> NoReturn:
    """Run the script of the task whose file is the first argument."""
    # The kernel ends this process when the parent ends, even if the parent is killed.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    task = Task.read(Path(sys.argv[1]))
    assert task.program
    code, stopped = run(task, task.program, os.environ.pop(RECORDS))
    if stopped:  # the script's threads may wait for work that the script has not finished
        exit_process(0, wait=False)
    sys.exit(code)
