"""Errors of a measurement; a measured process reports them by name to its parent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from dpbench.core.errors import DpbenchError
from dpbench.results.rows import Measurement


class InstrumentError(DpbenchError):
    """A measurement failed. ``log`` is the case's log file, if any.

    ``rows`` are those measured before the failure.
    """

    remedy: ClassVar[str] = ""
    rows: Sequence[Measurement] = ()

    def __init__(self, message: str, *, log: Path | None = None) -> None:
        super().__init__(message)  # one argument, so that it can be pickled
        self.log = log

    def __str__(self) -> str:
        return f"{self.args[0]}{self.remedy and f'; {self.remedy}'}"


class CaseOutOfMemory(InstrumentError):
    """The case needs more memory than the GPU has."""

    remedy = "use a smaller batch size, sequence length or model size"


class CaseTimedOut(InstrumentError):
    """The case ran longer than its time-out and was ended, with all its processes."""

    remedy = "raise the time-out, or look in the log for where it hung"


class GpuBusy(InstrumentError):
    """Another process held the GPU for longer than the case's time-out."""

    remedy = "end that process, or raise the time-out"


class CaseFailed(InstrumentError):
    """The measured process failed by itself; its log says why."""


class ScriptInterrupted(CaseFailed):
    """The user pressed Ctrl-C."""


class CaseRefused(InstrumentError):
    """The case is invalid on any machine: a name is unknown, or options do not fit together."""
