"""Cases in, outcomes out: one failure leaves the others running."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

from dpbench.case import Case
from dpbench.errors import ConfigurationError, DpbenchError
from dpbench.files import Locked, locked
from dpbench.fit import needed_by
from dpbench.gpu import Gpu, number_of_gpus
from dpbench.instruments.case_process import Child, log_tail
from dpbench.instruments.interface import CaseRefused, Instrument, InstrumentError, Running
from dpbench.instruments.logical.logical import Logical
from dpbench.instruments.processes import POLL_SECONDS
from dpbench.process.imported import imported_files
from dpbench.registry import resolve
from dpbench.results.outcome import Outcome
from dpbench.results.rows import Measurement, checked


class RowsRefused(InstrumentError):
    """An instrument recorded numbers that cannot be; the others are kept."""


class DoesNotFit(InstrumentError):
    """The case needs more memory than the GPU has; it was not measured."""

    remedy: ClassVar[str] = "use a smaller case or a larger GPU, or try anyway"


MOST_REFUSED = 3
"""How many refused rows a case's error names."""


def check_fits(case: Case, gpu: Gpu | None, measuring: Sequence[Running] = ()) -> None:
    """Refuse a case whose tensors alone need more than the GPU's whole memory.

    The peak is counted without hardware (`dpbench.instruments.logical`), without the CUDA
    context and fragmentation, so a case that passes may still run out of memory. Nothing is
    refused without a GPU that says how much memory it has, of what cannot be counted, nor where
    operators without a rule of their own weigh in the count; nor once a process has measured the
    case, which takes less time than counting it if that is small. Of several ranks the first
    is counted.
    """
    if gpu is None or gpu.memory_bytes is None:
        return
    counting = Logical(timeout=60).start(case)  # a 1b case takes up to 7 s
    try:
        while isinstance(counting, Child) and counting.exit_code is None:
            if any(isinstance(each, Child) and each.exit_code == 0 for each in measuring):
                return
            time.sleep(POLL_SECONDS)
        needs = needed_by(case, counting)
    except CaseRefused as error:  # as it would be on the GPU
        error.log = None
        raise
    except DpbenchError:
        return
    finally:
        counting.cancel()
    if needs.memory > gpu.memory_bytes and not needs.guessed:
        raise DoesNotFit(
            f"{case.id} does not fit: needs about {needs.memory / 1e9:.0f} GB of "
            f"{gpu.memory_bytes / 1e9:.0f} GB ({gpu.name})"
        )


def check_ranks(case: Case, instruments: Sequence[Instrument]) -> None:
    """Refuse several GPUs where there are fewer, or an instrument can measure but one process."""
    if case.gpus < 2:
        return
    for instrument in instruments:
        instrument.check_ranks(f"{case.id} has one a GPU")
    number = number_of_gpus()
    if number < case.gpus and any(getattr(i, "device", "") == "cuda" for i in instruments):
        raise ConfigurationError(
            f"{case.id} needs {case.gpus} GPUs, and {number} can be used (CUDA_VISIBLE_DEVICES)"
        )


def measure(case: Case, instruments: Sequence[Instrument], *, gpu: Gpu | None = None) -> Outcome:
    """Measure one case with each instrument; an error ends the case, not the caller.

    A case that cannot fit a GPU that is given is ended, see `check_fits`.
    """
    return Measuring(case, instruments, gpu).outcome()


def measure_at_once(
    cases: Iterable[Case], instruments: Sequence[Instrument], number: int
) -> Generator[Outcome]:
    """The outcomes of cases in their order, while processes measure so many at once."""
    waiting, started = deque(cases), deque[Measuring]()
    try:
        while waiting or started:
            while waiting and sum(each.runs for each in started) < number:
                started.append(Measuring(waiting.popleft(), instruments))
            if started[0].runs:
                time.sleep(POLL_SECONDS)
            else:
                yield started.popleft().outcome()
    finally:
        for each in started:
            each.cancel()


class Measuring:
    """A case that its instruments have begun to measure.

    All start at once and take turns on the GPU: one imports while another measures.
    """

    def __init__(
        self, case: Case, instruments: Sequence[Instrument], gpu: Gpu | None = None
    ) -> None:
        self.case, self.gpu = case, gpu
        self._names = tuple(instrument.name for instrument in instruments)
        self._start = time.monotonic()
        self._running: list[Running] = []
        self._rows: list[Measurement] = []
        self._failure: dict[str, Any] = {}
        with self._ending_errors() as held:
            self.case = resolve(case)
            check_ranks(self.case, instruments)
            held.enter_context(_files_of(self.case, instruments))
            for instrument in instruments:
                self._running.append(instrument.start(self.case))
                held.callback(self._running[-1].cancel)  # each, even if another's is interrupted
            self._held = held.pop_all()

    @property
    def runs(self) -> bool:
        """Whether a process measures the case; False if `outcome` does so in this one."""
        return any(isinstance(each, Child) and each.runs for each in self._running)

    def outcome(self) -> Outcome:
        """Wait for what was measured, or for what went wrong."""
        seen: dict[str, list[Any]] = {"operators": [], "kernels": [], "notes": []}
        labels: dict[str, str] = {}
        imported: dict[str, str] = {}
        refused: list[str] = []
        with self._ending_errors() as held:
            if not self._failure:
                held.push(self._held)
                check_fits(self.case, self.gpu, self._running)
                for measurement in self._running:
                    try:
                        rows, wrong = checked(self.case, measurement.rows())
                        self._rows += rows
                        refused += wrong
                    finally:  # what it saw until it failed
                        for part, entries in seen.items():
                            entries += getattr(measurement, part)
                        labels |= measurement.labels
                        is_own = not type(measurement).__module__.startswith("dpbench.")
                        imported |= imported_files() if is_own else measurement.imported
            if refused:
                named, more = refused[:MOST_REFUSED], len(refused) - MOST_REFUSED
                named += [f"and {more} more"] if more > 0 else []
                raise RowsRefused(f"{self.case.id}: {'; '.join(named)}")
        return Outcome(
            self.case,
            tuple(self._rows),
            time.monotonic() - self._start,
            instruments=self._names,
            labels=labels,
            imported=imported,
            **self._failure,
            **dict[str, Any]((part, tuple(entries)) for part, entries in seen.items()),
        )

    def cancel(self) -> None:
        """End what has begun."""
        if not self._failure:
            self._held.close()

    @contextmanager
    def _ending_errors(self) -> Iterator[ExitStack]:
        """End the case with an error, which its outcome says."""
        try:
            with ExitStack() as held:
                yield held
        except DpbenchError as error:
            self._failure = {"error": type(error).__name__, "message": str(error)}
            self._rows += checked(self.case, getattr(error, "rows", ()), whole=False)[0]
            if isinstance(error, InstrumentError) and isinstance(error.log, Path):
                self._failure |= {"log": str(error.log), "log_tail": log_tail(error)}
        except Exception as error:  # a full disk, or whatever an outside instrument can raise
            kind = type(error).__name__
            self._failure = {"error": kind, "message": f"{self.case.id}: {kind}: {error}"}


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
            lock = directory / f".{case.file_name}.lock"
            try:
                held.enter_context(locked(lock, wait=False))
            except Locked:
                say = f"dpbench: waiting for a session that measures {case.id} in {directory}"
                print(say, file=sys.stderr, flush=True)
                held.enter_context(locked(lock))
        yield
