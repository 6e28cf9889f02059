"""The instrument ``cupti`` measures bytes, step time, peak memory and how busy the GPU is.

CUPTI reads hardware counters in the process that trains, so no other process is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from dpbench.core.case import Case
from dpbench.core.settings import Settings
from dpbench.core.subject import Subject
from dpbench.instruments.counters import CounterOptions
from dpbench.instruments.cupti import NAME
from dpbench.instruments.in_process import InProcessInstrument

if TYPE_CHECKING:
    from dpbench.instruments.cupti.recorder import CuptiRecorder


@dataclass(frozen=True)
class Cupti(InProcessInstrument):
    """An instrument that times steps without counters, and then counts other steps.

    Attributes:
        names: names of metrics to count in addition to DRAM bytes, time and busy shares (fractions
            of the time in which a part of the GPU works). If empty, all metrics of the chip are
            counted.
    """

    name: ClassVar[str] = NAME
    needs_gpu: ClassVar[bool] = True
    options: ClassVar[type | None] = CounterOptions
    names: tuple[str, ...] = ()

    @classmethod
    def from_settings(cls, settings: Settings, **chosen: Any) -> Self:
        """Build the instrument from the settings of a session."""
        names = settings.of(CounterOptions).names or ()
        return super().from_settings(settings, **{"names": names} | chosen)

    def recorder(self, case: Subject, steps: int | None = None) -> CuptiRecorder:
        from dpbench.instruments.cupti.recorder import CuptiRecorder  # slow to import

        if isinstance(case, Case):
            alike = case.sampling == "fixed"
            return CuptiRecorder(self.steps.active, self.names or None, alike=alike)
        return CuptiRecorder() if steps is None else CuptiRecorder(steps)
