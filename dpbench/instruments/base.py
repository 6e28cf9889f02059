"""The interface of an instrument, and what can go wrong with a measurement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Self

from dpbench.case import Case
from dpbench.errors import DpbenchError
from dpbench.files import check_writable
from dpbench.gpu import require_gpu
from dpbench.results.kernels import KernelCount, OperatorCount
from dpbench.results.rows import Measurement
from dpbench.settings import Settings


class Instrument(ABC):
    """One way to measure a case. Implementations are small frozen dataclasses of options.

    Attributes:
        name: what its rows say as ``instrument``.
        hardware: whether its numbers are those of a machine; what is counted is the same on all.
    """

    name: ClassVar[str]
    hardware: ClassVar[bool] = True

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """The instrument as a session's options have it."""
        return cls()

    def check(self) -> None:  # noqa: B027
        """Find out, before any case runs, whether it can work here; raises what would help."""

    @property
    def versions(self) -> Mapping[str, str]:
        """Of tools that its numbers depend on, beside torch: kept with a saved run."""
        return {}

    @abstractmethod
    def start(self, case: Case) -> Running:
        """Begin to measure a case.

        A child process starts up (5 s of imports) while another still holds the GPU.
        """

    def measure(self, case: Case) -> list[Measurement]:
        """Measure one case; an `InstrumentError` says why it could not be."""
        running = self.start(case)
        try:
            return running.rows()
        finally:
            running.cancel()


class Running(ABC):
    """A measurement under way. What it saw beside its rows is there once they are.

    Attributes:
        operators: what each operator did.
        kernels: what each kernel moved.
        notes: what was assumed for the rows.
        labels: what the case's trainer says of itself.
    """

    operators: Sequence[OperatorCount] = ()
    kernels: Sequence[KernelCount] = ()
    notes: Sequence[str] = ()
    labels: Mapping[str, str] = MappingProxyType({})

    @abstractmethod
    def rows(self) -> list[Measurement]:
        """Wait for it to end, and return what was measured; or raise an `InstrumentError`."""

    def cancel(self) -> None:  # noqa: B027
        """End it, with all its processes, if it has not ended."""


def check_place(directory: Path, *, on_gpu: bool) -> None:
    """Refuse to begin without a GPU, if it needs one, or a directory that can be written."""
    if on_gpu:
        require_gpu()
    check_writable(directory)


class InstrumentError(DpbenchError):
    """A measurement failed. ``log`` is the case's log file, where there is one.

    ``rows`` is what had been measured until then.
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


class CaseRefused(InstrumentError):
    """What the case asks for does not exist or fit together, on whatever machine."""


# --- hardware counters, by ncu or by CUPTI -----------------------------------------------------


class CountersForbidden(InstrumentError):
    """Reading the GPU's performance counters is not allowed to this user."""

    remedy = (
        "run as root or with CAP_SYS_ADMIN, or let every user read them: driver option "
        "NVreg_RestrictProfilingToAdminUsers=0 (https://developer.nvidia.com/ERR_NVGPUCTRPERM)"
    )


class CountersBusy(InstrumentError):
    """Something else holds the GPU's performance counters."""

    remedy = (
        "end the other profiler (ncu, nsys, a debugger, another process that counts), or pause "
        "DCGM's: dcgmi profile --pause, and --resume after"
    )


class CounterUnknown(InstrumentError):
    """A counter does not exist on this GPU, cannot be read in one pass, or gave no value."""

    remedy = (
        "name others with --ncu-metrics; dpbench doctor --chip and ncu --query-metrics list what "
        "there is"
    )


class ProfilerNotLoaded(InstrumentError):
    """The profiler finds no driver, or no way to the GPU."""

    remedy = (
        "check that nvidia-smi shows the GPU here, that profiler and driver fit each other, and "
        "that no virtual machine or sandbox hides the GPU's counters"
    )
