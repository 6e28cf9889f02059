"""Interface of a measurement in progress."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from dpbench.results.kernels import KernelCount, MemoryLine, OperatorCount
from dpbench.results.rows import Measurement


class PendingMeasurement(ABC):
    """A measurement in progress, in this or another process. The method `rows` sets the attributes.

    Attributes:
        operators: the counts of each operator.
        kernels: the bytes and time of each kernel.
        memory_lines: memory that is in use at the peak, by source line.
        notes: assumptions behind the rows.
        labels: the labels of the case's trainer, see `TrainerBase.labels`.
        imported: source files of the measured code, see `dpbench.child.imported`.
    """

    operators: Sequence[OperatorCount] = ()
    kernels: Sequence[KernelCount] = ()
    memory_lines: Sequence[MemoryLine] = ()
    notes: Sequence[str] = ()
    labels: Mapping[str, str] = MappingProxyType({})
    imported: Mapping[str, str] = MappingProxyType({})

    @abstractmethod
    def rows(self) -> list[Measurement]:
        """Wait until the measurement ends, and return its rows.

        Raise `InstrumentError` if the measurement failed.
        """

    def cancel(self) -> None:  # noqa: B027
        """End the measurement and its processes, unless it has ended."""
