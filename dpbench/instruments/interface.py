"""The interface of an instrument, and what can go wrong with a measurement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from dpbench.case import Case
from dpbench.errors import ConfigurationError, DpbenchError
from dpbench.results.kernels import KernelCount, OperatorCount
from dpbench.results.rows import Measurement
from dpbench.settings import Settings

if TYPE_CHECKING:
    from dpbench.instruments.recorder import Recorder


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
        step_option: the option of ``dpbench step`` that chooses it, and its help; without one it
            is named there by ``--instrument``.
        step_value: what else declares that option.
    """

    name: ClassVar[str]
    hardware: ClassVar[bool] = True
    needs_gpu: ClassVar[bool] = False
    by_rank: ClassVar[bool] = False
    subjects: ClassVar[tuple[str, ...]] = ("case", "script", "step")
    options: ClassVar[type | None] = None
    step_option: ClassVar[tuple[str, str]] = ("", "")
    step_value: ClassVar[Mapping[str, Any]] = MappingProxyType({"action": "store_true"})

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
    def start(self, case: Case) -> Running:
        """Begin to measure a case.

        A child process starts up (5 s of imports) while another still holds the GPU.
        """

    def recorder(self, case: Case, steps: int | None = None) -> Recorder:
        """The recorder of this many steps, of all if None, in the process that takes them.

        ``case`` stands for the script, or the step of one's own, that the steps are of.
        """
        raise NotImplementedError

    @classmethod
    def in_step(cls, settings: Settings, value: Any) -> Self:
        """The instrument as its `step_option` chooses it, by a value; see `observe`."""
        return cls.from_settings(settings)

    def observe(self, case: Case) -> dict[str, Any]:
        """Take the steps of a case in this process; returns what it prints, plain JSON types."""
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
class Delegating(Instrument):
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


class Running(ABC):
    """A measurement under way. Its attributes are set when its rows are there.

    Attributes:
        operators: what each operator did.
        kernels: what each kernel moved.
        notes: assumptions behind the rows.
        labels: those of the case's trainer, see `TrainerBase.labels`.
        imported: what it measured in another process, see `dpbench.process.imported`.
    """

    operators: Sequence[OperatorCount] = ()
    kernels: Sequence[KernelCount] = ()
    notes: Sequence[str] = ()
    labels: Mapping[str, str] = MappingProxyType({})
    imported: Mapping[str, str] = MappingProxyType({})

    @abstractmethod
    def rows(self) -> list[Measurement]:
        """Wait for it to end, and return what was measured; or raise an `InstrumentError`."""

    def cancel(self) -> None:  # noqa: B027
        """End it, with all its processes, if it has not ended."""


class InstrumentError(DpbenchError):
    """A measurement failed. ``log`` is the case's log file, if it has one.

    ``rows`` are those measured before the failure.
    """

    remedy: ClassVar[str] = ""
    rows: Sequence[Measurement] = ()

    def __init__(self, message: str, *, log: Path | None = None) -> None:
        super().__init__(message)  # alone, so that another process can send it on
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
    """The case names something that does not exist or does not fit together, on any machine."""
