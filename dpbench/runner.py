"""Cases in, outcomes out: one failure leaves the others running."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, ClassVar

from dpbench.case import Case
from dpbench.errors import ConfigurationError, DpbenchError
from dpbench.files import Locked, locked
from dpbench.gpu import Gpu
from dpbench.instruments.base import CaseFailed, CaseRefused, Instrument, InstrumentError, Running
from dpbench.instruments.child import Child, describe_exit, log_tail
from dpbench.instruments.logical.instrument import Logical
from dpbench.instruments.processes import POLL_SECONDS
from dpbench.instruments.terminal import tell
from dpbench.registry import is_builtin, resolve
from dpbench.results.kernels import guesses
from dpbench.results.outcome import Outcome
from dpbench.results.rows import Measurement, checked


class DoesNotFit(InstrumentError):
    """The case needs more memory than the GPU has; it was not measured."""

    remedy: ClassVar[str] = "use a smaller case or a larger GPU, or try anyway"


def check_fits(case: Case, gpu: Gpu | None, measuring: Sequence[Running] = ()) -> None:
    """Refuse a case whose tensors alone need more than the GPU's whole memory.

    The peak is counted without hardware (`dpbench.instruments.logical`), without the CUDA
    context and fragmentation, so a case that passes may still run out of memory. Nothing is
    refused without a GPU that says how much memory it has, of what cannot be counted, nor where
    operators without a rule of their own weigh in the count; nor once a process has measured the
    case, which takes less time than counting it if that is small.
    """
    if gpu is None or gpu.memory_bytes is None:
        return
    counting = Logical(timeout=60).start(case)  # a 1b case takes up to 7 s
    try:
        while isinstance(counting, Child) and counting.exit_code is None:
            if any(isinstance(each, Child) and each.exit_code == 0 for each in measuring):
                return
            time.sleep(POLL_SECONDS)
        rows = counting.rows()
    except CaseRefused as error:  # as it would be on the GPU
        error.log = None
        raise
    except ConfigurationError as error:
        raise CaseRefused(f"{case.id}: {error}") from error
    except DpbenchError:
        return
    finally:
        counting.cancel()
    needed = max(row.value for row in rows if row.metric == "peak_memory_bytes")
    if needed > gpu.memory_bytes and not guesses(counting.operators):
        raise DoesNotFit(
            f"{case.id} does not fit: needs about {needed / 1e9:.0f} GB of "
            f"{gpu.memory_bytes / 1e9:.0f} GB ({gpu.name})"
        )


def measure(case: Case, instruments: Sequence[Instrument], *, gpu: Gpu | None = None) -> Outcome:
    """Measure one case with each instrument; an error ends the case, not the caller.

    A case that cannot fit a GPU that is given is ended, see `check_fits`.
    """
    start = time.monotonic()
    seen: dict[str, list[Any]] = {"operators": [], "kernels": [], "notes": []}
    rows: list[Measurement] = []
    labels: dict[str, str] = {}
    failure: dict[str, Any] = {}
    running: list[Running] = []
    try:
        case = resolve(case)
        with _files_of(case, instruments), ExitStack() as ending:
            # All start at once and take turns on the GPU: one imports while another measures.
            for instrument in instruments:
                running.append(instrument.start(case))
                ending.callback(running[-1].cancel)  # each, even if another's is interrupted
            check_fits(case, gpu, running)
            for measurement in running:
                try:
                    rows += checked(case, measurement.rows())
                finally:  # what it saw until it failed
                    for part, entries in seen.items():
                        entries += getattr(measurement, part)
                    labels |= measurement.labels
    except DpbenchError as error:
        failure = {"error": type(error).__name__, "message": str(error)}
        rows += getattr(error, "rows", ())
        if isinstance(error, InstrumentError) and isinstance(error.log, Path):
            failure |= {"log": str(error.log), "log_tail": log_tail(error)}
    except Exception as error:  # a full disk, or whatever an outside instrument can raise
        kind = type(error).__name__
        failure = {"error": kind, "message": f"{case.id}: {kind}: {error}"}
    return Outcome(
        case,
        tuple(rows),
        time.monotonic() - start,
        instruments=tuple(instrument.name for instrument in instruments),
        labels=labels,
        **failure,
        **dict[str, Any]((part, tuple(entries)) for part, entries in seen.items()),
    )


class Forks:
    """Measures cases that need no hardware in forks of this process, one a core.

    A fork has what this process has imported, measures one case, and ends: its memory is free then,
    and one that crashes leaves the others as they are. Closing ends them all.
    """

    def __init__(self, cases: Sequence[Case], instruments: Sequence[Instrument]) -> None:
        self._instruments = instruments
        self._waiting = deque(dict.fromkeys(cases))
        self._running: dict[Any, tuple[Case, Any]] = {}
        self._ended: dict[Case, Outcome] = {}
        for case in filter(is_builtin, cases):
            from dpbench.process.step import import_needed  # loads torch

            with suppress(DpbenchError):  # the fork says so of its case
                import_needed(case)

    def measure(self, case: Case) -> Outcome:
        """Wait for the outcome of one of the cases, while the next are measured too."""
        while case not in self._ended:
            while self._waiting and len(self._running) < cores():
                self._start(self._waiting.popleft())
            for pipe in wait([*self._running]):
                self._end(pipe)
        return self._ended[case]

    def _start(self, case: Case) -> None:
        context = get_context("fork")
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(target=_send_outcome, args=(writer, case, self._instruments))
        process.start()
        writer.close()  # or the reader would not end with the process
        self._running[reader] = case, process

    def _end(self, pipe: Any) -> None:
        case, process = self._running.pop(pipe)
        try:
            outcome = pipe.recv()
        except EOFError:
            process.join()
            message = f"{case.id}: the process that measured it {describe_exit(process.exitcode)}"
            names = tuple(instrument.name for instrument in self._instruments)
            failed = CaseFailed.__name__
            outcome = Outcome(case, (), error=failed, message=message, instruments=names)
        process.join()
        self._ended[case] = outcome

    def close(self) -> None:
        """End the forks."""
        for _, process in self._running.values():
            process.terminate()
        for _, process in self._running.values():
            process.join()


def _send_outcome(pipe: Connection, case: Case, instruments: Sequence[Instrument]) -> None:
    if torch := sys.modules.get("torch"):  # threads of its pool, if it has any, are the parent's
        torch.set_num_threads(1)
    with suppress(KeyboardInterrupt, BrokenPipeError):  # whoever started it has been ended
        pipe.send(measure(case, instruments))


def cores() -> int:
    """How many processes can work at once; 1 where processes do not fork."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


@contextmanager
def _files_of(case: Case, instruments: Sequence[Instrument]) -> Iterator[None]:
    """Hold the reports, logs and profiles of a case: another session may write the same.

    Without this, its report could be replaced by the other's before it was read.
    """
    named = [getattr(instrument, "directory", None) for instrument in instruments]
    with ExitStack() as held:
        # Each once, and in order, or a session would wait for itself, or two for each other.
        for directory in sorted({path.resolve() for path in named if path is not None}):
            directory.mkdir(parents=True, exist_ok=True)
            lock = directory / f".{case.id}.lock"
            try:
                held.enter_context(locked(lock, wait=False))
            except Locked:
                tell(f"waiting for a session that measures {case.id} in {directory}")
                held.enter_context(locked(lock))
        yield
