"""The interface of an instrument, and what can go wrong with a measurement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from dpbench.case import Case
from dpbench.errors import DpbenchError
from dpbench.results.kernels import KernelCount
from dpbench.results.operators import OperatorCount
from dpbench.results.rows import Measurement
from dpbench.results.speed_of_light import KernelSpeed


class Instrument(ABC):
    """One way to measure a case. Implementations are small frozen dataclasses of options."""

    name: ClassVar[str]

    @abstractmethod
    def check(self) -> None:
        """Find out, before any case runs, whether this instrument can work here.

        Raises:
            DpbenchError: it cannot; the message says what would help.
        """

    @abstractmethod
    def start(self, case: Case) -> Running:
        """Begin to measure a case.

        A child process starts up (5 s of imports) while another still holds the GPU.
        """

    def measure(self, case: Case) -> list[Measurement]:
        """Measure one case.

        Raises:
            InstrumentError: the case could not be measured.
        """
        running = self.start(case)
        try:
            return running.rows()
        finally:
            running.cancel()


class Running(ABC):
    """A measurement under way. What it saw beside its rows is there once they are."""

    operators: Sequence[OperatorCount] = ()
    """What each operator did; empty if the instrument sees none."""

    kernels: Sequence[KernelCount] = ()
    """What each kernel moved; empty if the instrument sees none."""

    speed_of_light: Sequence[KernelSpeed] = ()
    """Kernels against the hardware's limits; empty if the instrument does not look."""

    notes: Sequence[str] = ()
    """What was assumed for the rows."""

    @abstractmethod
    def rows(self) -> list[Measurement]:
        """Wait for it to end, and return what was measured.

        Raises:
            InstrumentError: the case could not be measured.
        """

    @abstractmethod
    def cancel(self) -> None:
        """End it, with all its processes, if it has not ended."""


class InstrumentError(DpbenchError):
    """A measurement failed. ``log`` is the case's log file, where there is one."""

    remedy: ClassVar[str] = ""

    def __init__(self, message: str, *, log: Path | None = None) -> None:
        super().__init__(f"{message}{self.remedy and f'; {self.remedy}'}")
        self.log = log


class CaseOutOfMemory(InstrumentError):
    """The case needs more memory than the GPU has."""

    remedy = "use a smaller batch size, sequence length or model size"


class CaseTimedOut(InstrumentError):
    """The case ran longer than its time-out and was ended, with all its processes."""

    remedy = "raise the time-out, or look in the log for where it hung"


class CaseFailed(InstrumentError):
    """The measured process failed by itself; its log says why."""
