"""DRAM, L2 and global-memory bytes by phase, from hardware counters, through Nsight Compute.

The case runs once more under ``ncu`` in application range replay: each phase of each active
step is one range, whose counters include copies and memsets (kernel replay misses those).
Caches and clocks are left alone, because a flush before each range would change the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from dpbench import gpu
from dpbench.case import Case
from dpbench.instruments.child import Child
from dpbench.instruments.ncu.instrument import NcuInstrument
from dpbench.instruments.ncu.metrics import NcuMetric, counters, resolve
from dpbench.instruments.ncu.program import find_ncu
from dpbench.instruments.ncu.range_report import read
from dpbench.process.schedule import Steps
from dpbench.results.rows import Measurement
from dpbench.settings import Settings


@dataclass(frozen=True)
class Ncu(NcuInstrument):
    """Counts bytes in ranges.

    Args:
        metrics: what to measure.
    """

    name: ClassVar[str] = "ncu"
    replay: ClassVar[str] = "app-range"

    metrics: tuple[NcuMetric, ...] = field(default_factory=lambda: tuple(resolve()))

    @classmethod
    def from_settings(cls, settings: Settings) -> Ncu:
        return cls(
            settings.ncu_dir,
            find_ncu(settings.ncu_path),
            Steps(settings.ncu_warmup, settings.ncu_active),
            settings.timeout,
            tuple(resolve(settings.metric_names, gpu.chip_here())),
        )

    def command(self, case: Case) -> list[str]:
        return self.command_under_ncu(case, ["--metrics", ",".join(counters(self.metrics))])

    def start(self, case: Case) -> Child:
        """Start a process whose rows are each byte metric, by phase and for the whole step."""
        return self.launch(case, self.command(case))

    def read(self, process: Child) -> list[Measurement]:
        tool = self.tool(self.record_of(process))
        return read(self.report(process.case), process.case, self.metrics, tool=tool)
