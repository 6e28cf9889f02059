"""Cases in, outcomes out: one failure leaves the others running."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from dpbench.case import Case
from dpbench.errors import DpbenchError
from dpbench.files import Locked, locked
from dpbench.gpu import Gpu
from dpbench.instruments.base import Instrument, InstrumentError, Running
from dpbench.instruments.child import log_tail
from dpbench.instruments.fit import check_fits
from dpbench.instruments.terminal import tell
from dpbench.registry import resolve
from dpbench.results.outcome import PARTS, Outcome
from dpbench.results.rows import Measurement


def measure(case: Case, instruments: Sequence[Instrument], *, gpu: Gpu | None = None) -> Outcome:
    """Measure one case with each instrument; an error ends the case, not the caller.

    A case that cannot fit a GPU that is given is not started, see `check_fits`.
    """
    start = time.monotonic()
    rows: list[Measurement] = []
    notes: list[str] = []
    seen: dict[str, list[Any]] = {part: [] for part in PARTS}
    failure: dict[str, Any] = {}
    running: list[Running] = []
    try:
        case = resolve(case)
        check_fits(case, gpu)
        with _files_of(case, instruments), ExitStack() as ending:
            # All start at once and take turns on the GPU: one imports while another measures.
            for instrument in instruments:
                running.append(instrument.start(case))
                ending.callback(running[-1].cancel)  # each, even if another's is interrupted
            for measurement in running:
                rows += measurement.rows()
                notes += measurement.notes
                for part, entries in seen.items():
                    entries += getattr(measurement, part)
    except DpbenchError as error:
        failure = {"error": type(error).__name__, "message": str(error)}
        rows += getattr(error, "rows", ())
        if isinstance(error, InstrumentError) and isinstance(error.log, Path):
            failure |= {"log": str(error.log), "log_tail": log_tail(error)}
    except OSError as error:  # a full disk, say
        failure = {"error": type(error).__name__, "message": f"{case.id}: {error}"}
    except Exception as error:  # whatever an outside instrument can raise
        kind = type(error).__name__
        failure = {"error": kind, "message": f"{case.id}: {kind}: {error}"}
    return Outcome(
        case,
        tuple(rows),
        time.monotonic() - start,
        instruments=tuple(instrument.name for instrument in instruments),
        notes=tuple(notes),
        **failure,
        **dict[str, Any]((part, tuple(entries)) for part, entries in seen.items()),
    )


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
