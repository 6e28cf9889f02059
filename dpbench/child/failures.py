"""Errors of a measurement. A measured process reports an error's class name to its parent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from dpbench.core.errors import DpbenchError
from dpbench.results.rows import Measurement


class InstrumentError(DpbenchError):
    """A failed measurement.

    Attributes:
        remedy: what the user can do about the failure; empty if unknown.
        rows: the numbers that were measured before the failure.
        log: the case's log file; None if the case has no log.
    """

    remedy: ClassVar[str] = ""
    rows: Sequence[Measurement] = ()

    def __init__(self, message: str, *, log: Path | None = None) -> None:
        super().__init__(message)  # pickle calls the constructor with these arguments
        self.log = log

    def __str__(self) -> str:
        return f"{self.args[0]}{self.remedy and f'; {self.remedy}'}"


class CaseOutOfMemory(InstrumentError):
    """A case that needs more memory than the GPU has."""

    remedy = "use a smaller batch size, sequence length or model size"


class CaseTimedOut(InstrumentError):
    """A case that ran longer than its time-out. All its processes were ended."""

    remedy = "raise the time-out, or read in the log where the case hung"


class GpuBusy(InstrumentError):
    """A case whose GPU was locked by another process for longer than the case's time-out."""

    remedy = "end that process, or raise the time-out"


class CaseFailed(InstrumentError):
    """A case or script that failed in the measured process. The log, if any, gives details."""


class ScriptInterrupted(CaseFailed):
    """A script that the user interrupted with Ctrl-C."""


class CaseRefused(InstrumentError):
    """A case that was refused, for example because of an unknown name or incompatible options."""
