"""Base class of all instruments, and base class of instruments that wrap another instrument."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from dpbench.child.recorder import Recorder
from dpbench.core.case import Case
from dpbench.core.errors import ConfigurationError, error_named
from dpbench.core.settings import Settings
from dpbench.core.subject import Subject
from dpbench.launch.case_process import PendingMeasurement
from dpbench.results.outcome import Outcome


class Instrument(ABC):
    """A way to measure training steps.

    Subclasses are small frozen dataclasses. If a subclass belongs to another package, the fields
    of the subclass become command-line options.

    Attributes:
        name: value of the column ``instrument`` in the rows.
        hardware: whether the measured numbers depend on the machine. Times depend on the machine,
            but logical counts do not.
        needs_gpu: whether the instrument works only on a GPU.
        by_rank: whether the instrument can measure a case or script of several ranks.
        subjects: kinds of subjects that the instrument can measure: ``case``, ``script`` or
            ``step``. To measure a script or a step, the subclass must also define `recorder`.
        options: dataclass of the command-line options. Only built-in instruments set this
            attribute.
    """

    name: ClassVar[str]
    hardware: ClassVar[bool] = True
    needs_gpu: ClassVar[bool] = False
    by_rank: ClassVar[bool] = False
    subjects: ClassVar[tuple[str, ...]] = ("case", "script", "step")
    options: ClassVar[type | None] = None

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """Build the instrument from the settings of a session."""
        return cls(**settings.own_of(cls))

    def check(self) -> None:  # noqa: B027
        """Raise an error with a remedy if the instrument cannot work on this machine.

        A session calls this method before it runs any case or script.
        """

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions of the tools, other than torch, on which the measured numbers depend.

        A saved run contains these versions.
        """
        return {}

    @abstractmethod
    def start(self, case: Case) -> PendingMeasurement:
        """Begin to measure a case, and return without waiting for the outcome.

        A new process first imports packages, which takes about 5 s. Meanwhile another measurement
        can use the GPU.
        """

    # --- in the process that trains --------------------------------------------------------------

    def recorder(self, case: Subject, steps: int | None = None) -> Recorder:
        """Return a recorder for the process that trains.

        Args:
            case: the case, or the `Script` that stands for a script or a function.
            steps: the number of steps to record. If None, the recorder chooses the number, or
                records all steps.
        """
        raise NotImplementedError

    def record_case(self, case: Case) -> Outcome:
        """Train a case in this process, and return the outcome."""
        raise NotImplementedError

    # --- a process that runs under a profiler ----------------------------------------------------

    def profiler_command(self, case: Subject) -> list[str]:
        """Return the command line of the profiler that runs the case, or [] without a profiler.

        A report of an earlier run is removed.
        """
        return []

    def read_report(self, outcome: Outcome) -> Outcome:
        """Return the outcome of a process that has ended, with the numbers of the report.

        If the process failed, the outcome has an error, and the profiler may know another one.
        """
        return outcome

    # --- not overridden --------------------------------------------------------------------------

    @classmethod
    def measures(cls, subject: str) -> bool:
        """Return True if the instrument can measure the subject.

        Args:
            subject: ``case``, ``script`` or ``step``.
        """
        recorded = cls.recorder is not Instrument.recorder
        return subject in cls.subjects and (recorded or subject == "case")

    def check_ranks(self, why: str) -> None:
        """Raise an error if the instrument cannot measure several ranks.

        ``why`` completes the message: "ncu supports one process only, and {why}".
        """
        if not self.by_rank:
            raise ConfigurationError(
                f"{self.name} supports one process only, and {why}: choose timing, cupti, logical "
                f"or torch_profiler"
            )

    def measure(self, case: Case) -> Outcome:
        """Return the outcome of a case, or raise its error as an `InstrumentError`."""
        running = self.start(case)
        try:
            outcome = running.outcome()
        finally:
            running.cancel()
        if outcome.error:
            log = Path(outcome.log) if outcome.log else None
            raise error_named(outcome.error)(outcome.message, log=log)
        return outcome


@dataclass(frozen=True, eq=False)
class InstrumentWrapper(Instrument):
    """An instrument that wraps another instrument, and has the name of the wrapped instrument."""

    instrument: Instrument

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.instrument.name

    @property
    def hardware(self) -> bool:  # type: ignore[override]
        return self.instrument.hardware

    @property
    def versions(self) -> Mapping[str, str]:
        return self.instrument.versions
