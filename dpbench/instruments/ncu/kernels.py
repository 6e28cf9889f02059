"""DRAM and L2 bytes of each kernel launch, through Nsight Compute's kernel replay.

A second profiled process, with the same phases, caches and clocks left alone. It costs tens
of ms a kernel, and misses copies and memsets, which only ranges see.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dpbench.case import Case
from dpbench.instruments.base import InstrumentError
from dpbench.instruments.child import Child
from dpbench.instruments.ncu.instrument import EVERY_PHASE, NcuInstrument
from dpbench.instruments.ncu.kernel_report import COUNTERS, read_kernels
from dpbench.instruments.ncu.program import find_ncu
from dpbench.instruments.ncu.progress import launch_progress
from dpbench.instruments.ncu.range_report import (
    KERNELS,
    NothingProfiled,
    ReportUnreadable,
    launches_by_phase,
)
from dpbench.process.messages import NVTX_DOMAIN
from dpbench.results.kernels import fold, kernel_rows
from dpbench.results.rows import Measurement
from dpbench.settings import Settings, check_phases


@dataclass(frozen=True)
class OfKernels(NcuInstrument):
    """Profiles one kernel at a time.

    Args:
        phases: profile these phases only; every one if there is none.
    """

    replay: ClassVar[str] = "kernel"

    phases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_phases(self.phases)

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

    def nothing_to_profile(self, case: Case) -> bool:
        """Whether the phases launch no kernel.

        Standard training has no clip, and that of ghost clipping is a copy.
        """
        return bool(self.phases) and self.expected(case) == 0


@dataclass(frozen=True)
class NcuKernels(OfKernels):
    """Counts bytes of kernels."""

    name: ClassVar[str] = "ncu_kernels"
    folder: ClassVar[str] = KERNELS

    @classmethod
    def from_settings(cls, settings: Settings) -> NcuKernels:
        """As ``--kernels-phase`` and the like say."""
        path = find_ncu(settings.ncu_path)
        phases = settings.phases
        return cls(settings.ncu_dir, path, timeout=settings.timeout, phases=phases)

    def command(self, case: Case) -> list[str]:
        """The whole argument list for one case."""
        counters = ",".join(name for name, _ in COUNTERS.values())
        return self.command_under_ncu(case, ["--metrics", counters], self.filters)

    def start(self, case: Case) -> Child:
        """Start a process whose rows are what its kernels add up to, by phase and step.

        Its ``kernels`` are each kernel's share of that; none if the phases launch none. While it
        is waited for, a progress bar counts kernels against those that the case's report of ranges
        holds, if there is one.
        """
        return self.launch(case, self.command(case))

    def read(self, process: Child) -> list[Measurement]:
        """See `NcuInstrument.read`."""
        case = process.case
        try:
            with launch_progress(f"{case.id}: kernels", self.expected(case)) as process.watch:
                record = self.record_of(process)
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
