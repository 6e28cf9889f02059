"""DRAM and L2 bytes of each kernel launch, through Nsight Compute's kernel replay.

A second profiled process, with the same phases, caches and clocks left alone. It costs tens
of ms a kernel, and misses copies and memsets, which only ranges see.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dpbench.case import ALL_PHASES, Case
from dpbench.errors import unknown
from dpbench.gpu import NVTX_DOMAIN
from dpbench.instruments import child
from dpbench.instruments.base import Instrument, InstrumentError
from dpbench.instruments.ncu.kernel_report import COUNTERS, read_kernels
from dpbench.instruments.ncu.progress import launch_progress
from dpbench.instruments.ncu.range_report import (
    KERNELS,
    NothingProfiled,
    ReportUnreadable,
    kernel_report_path,
    launches_by_phase,
)
from dpbench.instruments.ncu.ranges import (
    EVERY_PHASE,
    check_gpu_and,
    command_under_ncu,
    ncu_version,
    record_under_ncu,
)
from dpbench.results.kernels import fold, kernel_rows
from dpbench.results.rows import Measurement


def phase_filters(phases: Iterable[str], steps: child.Steps) -> list[str]:
    """The NVTX filters that let through these phases of every active step; all if none."""
    named = [f"{NVTX_DOMAIN}@{i}.{phase}" for i in range(steps.active) for phase in phases]
    return named or [EVERY_PHASE]


def check_phases(phases: Iterable[str]) -> None:
    """Find out whether these are phases.

    Raises:
        ConfigurationError: one is not.
    """
    for phase in phases:
        if phase not in ALL_PHASES:
            raise unknown("phase", phase, ALL_PHASES)


def no_kernel_in(phases: Collection[str], case: Case, directory: Path) -> bool:
    """Whether these phases launch no kernel, as the case's report of ranges says, if it is there.

    Standard training has no clip, and that of ghost clipping is a copy: of these phases alone
    there is nothing to profile.
    """
    try:
        counts = launches_by_phase(directory / case.report_path)
    except InstrumentError:
        return False
    return bool(phases) and not any(counts[phase] for phase in phases)


@dataclass(frozen=True)
class NcuKernels(Instrument):
    """Re-executes a case under Nsight Compute, one kernel at a time.

    Args:
        directory: where reports and logs go, in a folder of each configuration's.
        path: the ``ncu`` program.
        phases: profile these phases only; every one if there is none.
        steps: warm-up and active steps.
        timeout: seconds after which a case is ended.

    Raises:
        ConfigurationError: a phase does not exist.
    """

    name: ClassVar[str] = "ncu_kernels"

    directory: Path
    path: str
    phases: tuple[str, ...] = ()
    steps: child.Steps = child.Steps(warmup=1, active=1)
    timeout: float = 1800.0

    def __post_init__(self) -> None:
        check_phases(self.phases)

    def check(self) -> None:
        """See `Instrument.check`; also that the report directory can be written."""
        check_gpu_and(self.directory)

    def command(self, case: Case) -> list[str]:
        """The whole argument list for one case."""
        return command_under_ncu(
            self.path,
            child.step_command(case, self.steps, device="cuda", nvtx=True),
            replay="kernel",
            include=phase_filters(self.phases, self.steps),
            collect=["--metrics", ",".join(name for name, _ in COUNTERS.values())],
            export=self.report(case),
        )

    def report(self, case: Case) -> Path:
        """Where a case's report is."""
        return self.directory / kernel_report_path(case, KERNELS)

    def start(self, case: Case) -> child.Child:
        """Start a process whose rows are what its kernels add up to, by phase and step.

        Its ``kernels`` are each kernel's share of that; none if the phases launch none. While it
        is waited for, a progress bar counts kernels against those that the case's report of ranges
        holds, if there is one.
        """
        report = self.report(case)
        report.unlink(missing_ok=True)  # or a failed run would leave the last one's numbers
        return child.Child(
            self.command(case),
            case=case,
            log=report.with_suffix(".log"),
            timeout=self.timeout,
            read=lambda process: self._read(process, report),
        )

    def _read(self, process: child.Child, report: Path) -> list[Measurement]:
        case = process.case
        try:
            with launch_progress(f"{case.id}: kernels", self.expected(case)) as process.watch:
                record = record_under_ncu(process, report)
            found = read_kernels(report)
        except InstrumentError as error:
            nothing = isinstance(error, NothingProfiled | ReportUnreadable)
            if nothing and no_kernel_in(self.phases, case, self.directory):
                process.notes = (f"no kernel in {', '.join(self.phases)}",)
                return []
            error.log = process.log
            raise
        process.kernels = fold(found.launches)
        tool = f"ncu {ncu_version(self.path)}, torch {record['torch']}"
        return kernel_rows(
            case,
            process.kernels,
            instrument=self.name,
            device=found.device,
            tool=tool,
            whole=not self.phases,
        )

    def expected(self, case: Case) -> int | None:
        """How many kernels there will be, if the case has a report of ranges that says so."""
        try:
            counts = launches_by_phase(self.directory / case.report_path)
        except InstrumentError:
            return None
        return sum(counts[phase] for phase in self.phases or counts) * self.steps.active
