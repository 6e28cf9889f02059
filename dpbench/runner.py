"""Measures cases with instruments. If a case fails, the other cases are still measured."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import cast

from dpbench.child.imported import imported_files
from dpbench.core.case import Case
from dpbench.core.errors import ConfigurationError, DpbenchError, InstrumentError
from dpbench.core.files import Locked, locked
from dpbench.core.gpu import number_of_gpus
from dpbench.core.registry import locate, resolve
from dpbench.core.subject import Subject
from dpbench.instruments.interface import Instrument
from dpbench.launch.case_process import PendingMeasurement
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
            f"{case.id} needs {case.gpus} GPUs, but {number} can be used here; --instrument "
            f"logical counts one rank without a GPU"
        )


def check_named(cases: Sequence[Case]) -> None:
    """Raise `ConfigurationError` if a case names an unknown class or an invalid parameter."""
    locate(cases)
    if with_values := [c for c in cases if c.set or ":" in f"{c.trainer}{c.optimizer}"]:
        from dpbench.child.build import check_parameters  # loads torch

        for case in with_values:
            check_parameters(case)


def measure(case: Subject, instruments: Sequence[Instrument]) -> Outcome:
    """Measure a case with each instrument. If the case fails, the outcome contains the error.

    The processes of all instruments start at once and use the GPU one after the other. So one
    process can import modules while another process measures.
    """
    start = time.monotonic()
    outcome = Outcome(case, (), instruments=tuple(each.name for each in instruments))
    running: list[PendingMeasurement] = []
    refused: list[str] = []
    try:
        with ExitStack() as held:  # an error or an interrupt ends all measurements
            case = resolve(case)
            outcome = replace(outcome, case=case)
            check_ranks(case, instruments)
            held.enter_context(_files_of(case, instruments))
            for instrument in instruments:
                running.append(instrument.start(cast("Case", case)))
                held.callback(running[-1].cancel)
            for measurement in running:
                if outcome.error is None:
                    found = measurement.outcome()
                    if not type(measurement).__module__.startswith("dpbench."):
                        found = replace(found, imported=imported_files())
                    rows, wrong = checked(outcome.case, found.rows, whole=found.error is None)
                    outcome = outcome.joined(replace(found, rows=tuple(rows)))
                    refused += wrong
            if refused and outcome.error is None:
                named, more = refused[:MAX_REFUSED], len(refused) - MAX_REFUSED
                named += [f"and {more} more"] if more > 0 else []
                raise RowsRefused(f"{outcome.case.id}: {'; '.join(named)}")
    except DpbenchError as error:
        outcome = outcome.with_error(error)
    except Exception as error:  # e.g. a full disk, or a bug of another package's instrument
        message = f"{outcome.case.id}: {type(error).__name__}: {error}"
        outcome = replace(outcome, error=type(error).__name__, message=message)
    return replace(outcome, seconds=time.monotonic() - start)


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
