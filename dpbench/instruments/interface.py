"""The interface of an instrument."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from dpbench.child.failures import InstrumentError
from dpbench.core.case import Case
from dpbench.core.errors import ConfigurationError
from dpbench.core.settings import Settings
from dpbench.core.subject import Subject
from dpbench.launch.pending import PendingMeasurement
from dpbench.results.rows import Measurement

if TYPE_CHECKING:
    from dpbench.child.recorder import Recorder


class Instrument(ABC):
    """One way to measure. Subclasses are small frozen dataclasses of options.

    Attributes:
        name: the value of ``instrument`` in its rows.
        hardware: whether its numbers depend on the machine. Logical counts do not.
        needs_gpu: whether it cannot measure on the CPU.
        by_rank: whether it can measure a case of several ranks, each in its own process.
        subjects: what it can measure: ``case``; with a `recorder` also ``script`` and ``step``.
        options: the dataclass of its command-line options; only for dpbench's own instruments.
    """

    name: ClassVar[str]
    hardware: ClassVar[bool] = True
    needs_gpu: ClassVar[bool] = False
    by_rank: ClassVar[bool] = False
    subjects: ClassVar[tuple[str, ...]] = ("case", "script", "step")
    options: ClassVar[type | None] = None

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """Build the instrument from a session's options."""
        return cls(**settings.own_of(cls))

    def check(self) -> None:  # noqa: B027
        """Raise an error with a remedy if it cannot work here; called before any case runs."""

    def check_ranks(self, why: str) -> None:
        """Refuse several ranks if it cannot measure them; ``why`` completes the message."""
        if not self.by_rank:
            raise ConfigurationError(
                f"{self.name} measures one process, and {why}: choose timing, cupti, logical or "
                f"torch_profiler"
            )

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions of tools, other than torch, that its numbers depend on; runs record them."""
        return {}

    @abstractmethod
    def start(self, case: Case) -> PendingMeasurement:
        """Begin to measure a case.

        A new process spends 5 s on imports. They may overlap with another measurement's GPU time.
        """

    def recorder(self, case: Subject, steps: int | None = None) -> Recorder:
        """A recorder for ``steps`` steps (None for all), in the process that trains.

        ``case`` is the subject: a case, or a stand-in for a script or a function.
        """
        raise NotImplementedError

    def record_case(self, case: Case) -> dict[str, Any]:
        """Train a case in this process; return its record in plain JSON types."""
        raise NotImplementedError

    @classmethod
    def measures(cls, subject: str) -> bool:
        """Whether it can measure a ``case``, a ``script`` or a ``step``."""
        recorded = cls.recorder is not Instrument.recorder
        return subject in cls.subjects and (recorded or subject == "case")

    # --- a script under a profiler, from whose report the numbers come ---------------------------

    def check_script(self) -> None:
        """Raise an error if a script cannot be measured here; called before it runs."""
        self.check()

    def before_script(self, case: Subject) -> list[str]:
        """The profiler that starts the script, with its arguments; by default nothing."""
        return []

    def script_rows(self, case: Subject, record: Mapping[str, Any]) -> list[Measurement]:
        """The rows of the profiler's report; ``record`` is that of the script's process."""
        return []

    def profiler_error(self, case: Subject) -> InstrumentError | None:
        """The error for which the profiler ended the script, if it did."""
        return None

    def measure(self, case: Case) -> list[Measurement]:
        """Measure one case, or raise an `InstrumentError`."""
        running = self.start(case)
        try:
            return running.rows()
        finally:
            running.cancel()


@dataclass(frozen=True, eq=False)
class InstrumentWrapper(Instrument):
    """Measures by another instrument; rows have that instrument's name."""

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
