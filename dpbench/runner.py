"""Measures cases with instruments. If a case fails, the other cases are still measured."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import cast

from dpbench.child.imported import imported_files
from dpbench.core.case import Case
from dpbench.core.errors import ConfigurationError, DpbenchError, InstrumentError
from dpbench.core.files import Locked, locked
from dpbench.core.gpu import number_of_gpus
from dpbench.core.registry import locate, resolve
from dpbench.core.subject import Subject
from dpbench.instruments.interface import Instrument
from dpbench.launch.case_process import CaseProcess, PendingMeasurement
from dpbench.launch.processes import at_once
from dpbench.results.outcome import Outcome
from dpbench.results.rows import checked


class RowsRefused(InstrumentError):
    """An instrument recorded impossible numbers. The outcome keeps the other numbers."""


MAX_REFUSED = 3
"""The maximum number of impossible rows that an error message names."""


def check_ranks(case: Subject, instruments: Sequence[Instrument]) -> None:
    """Raise `ConfigurationError` if a case of several GPUs cannot be measured.

    Each instrument must support several processes. If an instrument runs on CUDA, there must be as
    many GPUs as the case has.
    """
    if not isinstance(case, Case) or case.gpus < 2:
        return
    for instrument in instruments:
        instrument.check_ranks(f"{case.id} has one process for each GPU")
    number = number_of_gpus()
    if number < case.gpus and any(getattr(i, "device", "") == "cuda" for i in instruments):
        raise ConfigurationError(
            f"{case.id} needs {case.gpus} GPUs, but {number} can be used (CUDA_VISIBLE_DEVICES)"
        )


def check_named(cases: Sequence[Case]) -> None:
    """Raise `ConfigurationError` if a case names an unknown class or an invalid parameter."""
    locate(cases)
    if with_values := [c for c in cases if c.set or ":" in f"{c.trainer}{c.optimizer}"]:
        from dpbench.child.build import check_parameters  # loads torch

        for case in with_values:
            check_parameters(case)


def measure(case: Subject, instruments: Sequence[Instrument]) -> Outcome:
    """Measure a case with each instrument. If the case fails, the outcome contains the error."""
    return Measuring(case, instruments).outcome()


def measure_at_once(
    cases: Iterable[Subject], instruments: Sequence[Instrument], number: int
) -> Generator[Outcome]:
    """Measure up to ``number`` cases at once, and yield the outcomes in the order of the cases."""
    starts = (partial(Measuring, case, instruments) for case in cases)
    with closing(at_once(starts, number)) as ended:
        for each in ended:
            yield each.outcome()


class Measuring:
    """A case that instruments have begun to measure.

    The processes of all instruments start at once and use the GPU one after the other. So one
    process can import modules while another process measures.
    """

    def __init__(self, case: Subject, instruments: Sequence[Instrument]) -> None:
        self._start = time.monotonic()
        self._running: list[PendingMeasurement] = []
        names = tuple(instrument.name for instrument in instruments)
        self._outcome = Outcome(case, (), instruments=names)
        self._held = ExitStack()
        with self._keeping_errors():
            self._outcome = replace(self._outcome, case=resolve(case))
            check_ranks(self._outcome.case, instruments)
            self._held.enter_context(_files_of(self._outcome.case, instruments))
            for instrument in instruments:
                self._running.append(instrument.start(cast("Case", self._outcome.case)))
                self._held.callback(self._running[-1].cancel)

    @property
    def runs(self) -> bool:
        """True while a process measures the case.

        False if the measurement happens in this process, in the method `outcome`.
        """
        return any(isinstance(each, CaseProcess) and each.runs for each in self._running)

    def outcome(self) -> Outcome:
        """Wait for the measurements and return the outcome, with the error if one failed."""
        refused: list[str] = []
        with self._held, self._keeping_errors():  # an interrupt ends all measurements
            for measurement in self._running:
                if self._outcome.error is None:
                    found = measurement.outcome()
                    if not type(measurement).__module__.startswith("dpbench."):
                        found = replace(found, imported=imported_files())
                    case, whole = self._outcome.case, found.error is None
                    rows, wrong = checked(case, found.rows, whole=whole)
                    self._outcome = self._outcome.joined(replace(found, rows=tuple(rows)))
                    refused += wrong
            if refused and self._outcome.error is None:
                named, more = refused[:MAX_REFUSED], len(refused) - MAX_REFUSED
                named += [f"and {more} more"] if more > 0 else []
                raise RowsRefused(f"{self._outcome.case.id}: {'; '.join(named)}")
        return replace(self._outcome, seconds=time.monotonic() - self._start)

    def cancel(self) -> None:
        """End all measurements of the case."""
        self._held.close()

    @contextmanager
    def _keeping_errors(self) -> Iterator[None]:
        """Keep an error of the ``with`` block for the outcome, and end all measurements then."""
        try:
            with ExitStack() as failing:
                failing.push(self._held.__exit__)
                yield
                failing.pop_all()
        except DpbenchError as error:
            self._outcome = self._outcome.with_error(error)
        except Exception as error:  # e.g. a full disk, or a bug of another package's instrument
            message = f"{self._outcome.case.id}: {type(error).__name__}: {error}"
            failed = replace(self._outcome, error=type(error).__name__, message=message)
            self._outcome = failed


@contextmanager
def _files_of(case: Subject, instruments: Sequence[Instrument]) -> Iterator[None]:
    """Keep other sessions from writing the reports, logs and profiles of a case in the block.

    Otherwise, another session could replace a report before this session has read the report.
    """
    named = [getattr(instrument, "directory", None) for instrument in instruments]
    with ExitStack() as held:
        # Each directory is locked once, because a second lock would wait for the first lock.
        # Sessions lock directories in sorted order, so that two sessions never wait for each other.
        for directory in sorted({path.resolve() for path in named if path is not None}):
            with suppress(OSError):  # an instrument's `check` reports it if files are needed
                directory.mkdir(parents=True, exist_ok=True)
            lock = directory / f".{case.file_name}.lock"
            try:
                held.enter_context(locked(lock, wait=False))
            except Locked:
                say = f"dpbench: waiting for a session that measures {case.id} in {directory}"
                print(say, file=sys.stderr, flush=True)
                held.enter_context(locked(lock))
        yield
