"""DRAM and L2 bytes of each kernel launch, through Nsight Compute's kernel replay.

A second profiled process, with the same phases, caches and clocks left alone. It costs tens
of ms a kernel, and misses copies and memsets, which only ranges see.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tqdm import tqdm

from dpbench import gpu
from dpbench.case import Case
from dpbench.instruments.base import InstrumentError
from dpbench.instruments.child import Child
from dpbench.instruments.ncu.instrument import EVERY_PHASE, NcuInstrument
from dpbench.instruments.ncu.kernel_report import PROFILING, kernel_counters, read_kernels
from dpbench.instruments.ncu.program import find_ncu
from dpbench.instruments.ncu.range_report import (
    KERNELS,
    NothingProfiled,
    ReportUnreadable,
    launches_by_phase,
)
from dpbench.instruments.terminal import begin_line, place
from dpbench.process.messages import NVTX_DOMAIN
from dpbench.results.kernels import fold, kernel_rows
from dpbench.results.rows import Measurement
from dpbench.settings import Settings


@dataclass(frozen=True)
class OfKernels(NcuInstrument):
    """Profiles one kernel at a time.

    Args:
        phases: profile these phases only; every one if there is none.
    """

    replay: ClassVar[str] = "kernel"

    phases: tuple[str, ...] = ()

    @property
    def filters(self) -> list[str]:
        """The NVTX filters that let through the phases of every active step."""
        steps = range(self.steps.active)
        named = [f"{NVTX_DOMAIN}@{i}.{phase}" for i in steps for phase in self.phases]
        return named or [EVERY_PHASE]

    def expected(self, case: Case) -> int | None:
        """How many kernels there will be, if the case has a report of ranges that says so."""
        try:
            counts = launches_by_phase(self.directory / case.report_path)
        except InstrumentError:
            return None
        return sum(counts[phase] for phase in self.phases or counts) * self.steps.active

    def watched(self, process: Child, description: str, total: int | None) -> dict[str, Any]:
        """`record_of`, with a progress bar on a terminal; none in an xdist worker, one of many."""
        hidden = "PYTEST_XDIST_WORKER" in os.environ or not place().isatty()
        if not hidden:
            begin_line()
        with tqdm(
            total=total, desc=description, unit="kernel", leave=False, disable=hidden, file=place()
        ) as bar:
            process.watch = lambda line: bar.update(line.count(PROFILING))
            return self.record_of(process)

    def nothing_to_profile(self, case: Case) -> bool:
        """Whether the phases launch no kernel.

        Standard training has no clip, and that of ghost clipping is a copy.
        """
        return bool(self.phases) and self.expected(case) == 0


@dataclass(frozen=True)
class NcuKernels(OfKernels):
    """Counts bytes of kernels.

    Args:
        counters: see `kernel_counters`.
    """

    name: ClassVar[str] = "ncu_kernels"
    folder: ClassVar[str] = KERNELS

    counters: tuple[str, ...] = field(default_factory=kernel_counters)

    @classmethod
    def from_settings(cls, settings: Settings) -> NcuKernels:
        return cls(
            settings.ncu_dir,
            find_ncu(settings.ncu_path),
            timeout=settings.timeout,
            phases=settings.phases,
            counters=kernel_counters(gpu.chip_here()),
        )

    def command(self, case: Case) -> list[str]:
        return self.command_under_ncu(case, ["--metrics", ",".join(self.counters)], self.filters)

    def start(self, case: Case) -> Child:
        """Start a process whose rows are what its kernels add up to, by phase and step.

        Its ``kernels`` are each kernel's share of that; none if the phases launch none.
        """
        return self.launch(case, self.command(case))

    def read(self, process: Child) -> list[Measurement]:
        case = process.case
        try:
            record = self.watched(process, f"{case.id}: kernels", self.expected(case))
            report = read_kernels(self.report(case))
        except (NothingProfiled, ReportUnreadable):
            if not self.nothing_to_profile(case):
                raise
            process.notes = (f"no kernel in {', '.join(self.phases)}",)
            return []
        process.kernels = fold(report.launches)
        return kernel_rows(
            case,
            process.kernels,
            instrument=self.name,
            device=report.device,
            tool=self.tool(record),
            whole=not self.phases,
        )
