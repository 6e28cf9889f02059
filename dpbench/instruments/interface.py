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
from dpbench.launch.pending import PendingMeasurement
from dpbench.results.rows import Measurement

if TYPE_CHECKING:
    from dpbench.child.recorder import Recorder


class Instrument(ABC):
    """One way to measure a case. Implementations are small frozen dataclasses of options.

    Attributes:
        name: what its rows say as ``instrument``.
        hardware: whether its numbers are those of a machine; what is counted is the same on all.
        needs_gpu: whether it measures what a GPU does, and nothing on the CPU.
        by_rank: whether it measures cases of several GPUs, each of whose ranks is a process.
        subjects: what it can measure: a case; a script, and a step of one's own, if it has a
            `recorder`.
        options: of one of dpbench's own, a dataclass of options that its fields are made of.
    """

    name: ClassVar[str]
    hardware: ClassVar[bool] = True
    needs_gpu: ClassVar[bool] = False
    by_rank: ClassVar[bool] = False
    subjects: ClassVar[tuple[str, ...]] = ("case", "script", "step")
    options: ClassVar[type | None] = None

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """The instrument as a session's options have it."""
        return cls(**settings.own_of(cls))

    def check(self) -> None:  # noqa: B027
        """Check, before any case runs, that it can work here; the error says what would help."""

    def check_ranks(self, why: str) -> None:
        """Refuse to measure one of several ranks, which there are for a reason to be said."""
        if not self.by_rank:
            raise ConfigurationError(
                f"{self.name} measures one process, and {why}: choose timing, cupti, logical or "
                f"torch_profiler"
            )

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions of tools that its numbers depend on, beside torch; a saved run keeps them."""
        return {}

    @abstractmethod
    def start(self, case: Case) -> PendingMeasurement:
        """Begin to measure a case.

        A child process starts up (5 s of imports) while another still holds the GPU.
        """

    def recorder(self, case: Case, steps: int | None = None) -> Recorder:
        """The recorder of this many steps, of all if None, in the process that takes them.

        ``case`` stands for the script, or the step of one's own, that the steps are of.
        """
        raise NotImplementedError

    def observe(self, case: Case) -> dict[str, Any]:
        """Take the steps of a case in this process; returns its record, plain JSON types."""
        raise NotImplementedError

    @classmethod
    def measures(cls, subject: str) -> bool:
        """Whether it can measure a case, a script, or a step of one's own."""
        recorded = cls.recorder is not Instrument.recorder
        return subject in cls.subjects and (recorded or subject == "case")

    # --- a script, if another program starts its process and has the numbers -------------------

    def check_script(self) -> None:
        """Check, before a script runs, that its steps can be measured here."""
        self.check()

    def before_script(self, case: Case) -> list[str]:
        """The program that starts a script's process, and its arguments; none by default."""
        return []

    def script_rows(self, case: Case, record: Mapping[str, Any]) -> list[Measurement]:
        """The rows that this program counted; the script's process has left the record."""
        return []

    def complaint(self, case: Case) -> InstrumentError | None:
        """The reason for which this program ended the process, if it did."""
        return None

    def measure(self, case: Case) -> list[Measurement]:
        """Measure one case; an `InstrumentError` says why it could not be."""
        running = self.start(case)
        try:
            return running.rows()
        finally:
            running.cancel()


@dataclass(frozen=True, eq=False)
class InstrumentWrapper(Instrument):
    """An instrument that has another one measure; its rows have the name of that one."""

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
