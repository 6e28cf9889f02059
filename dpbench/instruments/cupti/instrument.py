"""Bytes and busy shares by phase, step time and peak memory, all from one process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from dpbench.case import Case
from dpbench.instruments.child import Child
from dpbench.instruments.cupti.rows import INSTRUMENT, cupti_rows
from dpbench.instruments.recorder import Recorder
from dpbench.instruments.timing import Timing
from dpbench.results.rows import Measurement
from dpbench.settings import Settings


@dataclass(frozen=True)
class Cupti(Timing):
    """Runs ``dpbench step --cupti``: timed steps without counters, then counted ones."""

    name: ClassVar[str] = INSTRUMENT

    names: tuple[str, ...] = ()  # beside DRAM bytes, time, busy shares; everything if empty

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """As ``--ncu-metrics``, ``--warmup``, ``--active`` and the like say."""
        names = settings.metric_names or ()
        return replace(super().from_settings(settings), device="cuda", names=names)

    def command(self, case: Case) -> list[str]:
        option = "=".join(filter(None, ("--cupti", ",".join(self.names))))
        return [*super().command(case), option]

    def recorder(self, case: Case, steps: int | None = None) -> Recorder:
        from dpbench.instruments.cupti.recorder import CuptiRecorder

        return CuptiRecorder() if steps is None else CuptiRecorder(steps)

    def read(self, process: Child) -> list[Measurement]:
        """Wait for a process; its rows are those of timing, and each metric by phase and step."""
        return list(cupti_rows(process.case, process.record()))
