"""A measurement under way, in any process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from dpbench.results.kernels import KernelCount, MemoryLine, OperatorCount
from dpbench.results.rows import Measurement


class PendingMeasurement(ABC):
    """A measurement under way. Its attributes are set once it has rows.

    Attributes:
        operators: what each operator did.
        kernels: what each kernel moved.
        memory_lines: which lines had allocated what lived at the peak of memory.
        notes: assumptions behind the rows.
        labels: the labels of the case's trainer, see `TrainerBase.labels`.
        imported: files of the measured code in another process, see `dpbench.child.imported`.
    """

    operators: Sequence[OperatorCount] = ()
    kernels: Sequence[KernelCount] = ()
    memory_lines: Sequence[MemoryLine] = ()
    notes: Sequence[str] = ()
    labels: Mapping[str, str] = MappingProxyType({})
    imported: Mapping[str, str] = MappingProxyType({})

    @abstractmethod
    def rows(self) -> list[Measurement]:
        """Wait for the end, and return the measurements or raise an `InstrumentError`."""

    def cancel(self) -> None:  # noqa: B027
        """End it, with all its processes, if it has not ended."""
