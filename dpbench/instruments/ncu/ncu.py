"""DRAM, L2 and global-memory bytes from hardware counters, through Nsight Compute.

The case runs once more under ``ncu``. In application range replay (`Ncu`) each phase of each
active step is one range, whose counters include copies and memsets. Kernel replay (`NcuKernels`)
misses those, and tells one kernel from the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from dpbench import gpu
from dpbench.case import Case
from dpbench.instruments.case_process import Child
from dpbench.instruments.counters.chosen_counters import counters, resolve
from dpbench.instruments.counters.options import CounterOptions
from dpbench.instruments.interface import CaseFailed, InstrumentError
from dpbench.instruments.ncu.program import diagnose, find_ncu
from dpbench.instruments.ncu.report import (
    KERNELS,
    NothingProfiled,
    ReportUnreadable,
    kernel_metrics,
    launches_by_phase,
    read,
    read_kernels,
    write_description,
)
from dpbench.instruments.processes import version_of
from dpbench.instruments.recorded import Recorded
from dpbench.instruments.recorder import Recorder
from dpbench.metrics import Metric
from dpbench.process.messages import NVTX_DOMAIN, Steps
from dpbench.results.kernels import fold, kernel_rows
from dpbench.results.rows import Measurement
from dpbench.settings import Settings


@dataclass(frozen=True)
class Ncu(Recorded):
    """Re-executes a case under Nsight Compute, and reads its report: each metric by phase and step.

    One active step is enough: from step to step DRAM bytes differ by less than 0.2 %, and each
    further one adds seconds and, at 400 bytes a kernel launch, megabytes to the report.
    """

    name: ClassVar[str] = "ncu"
    subjects: ClassVar[tuple[str, ...]] = ("case", "script")
    needs_gpu: ClassVar[bool] = True
    by_rank: ClassVar[bool] = False
    leaves_files: ClassVar[bool] = True
    options: ClassVar[type | None] = CounterOptions
    step_option = "--nvtx", "mark phases as NVTX ranges for a profiler, and take no times"
    replay: ClassVar[str] = "app-range"  # ncu's mode
    folder: ClassVar[str] = ""  # where the reports lie below a configuration's folder

    steps: Steps = Steps(warmup=1, active=1)
    path: str = "ncu"  # the program
    phases: tuple[str, ...] = ()  # profile these only; every one if there is none
    metrics: tuple[Metric, ...] = field(default_factory=lambda: tuple(resolve()))

    @classmethod
    def from_settings(cls, settings: Settings, **chosen: Any) -> Self:
        asked = settings.of(CounterOptions)
        own: dict[str, Any] = {
            "steps": asked.steps,
            "path": find_ncu(asked.ncu_path),
            "metrics": tuple(resolve(asked.names, gpu.chip_here())),
        }
        return super().from_settings(settings, **own | chosen)

    @classmethod
    def in_step(cls, settings: Settings, value: Any) -> Self:
        return super().from_settings(settings)  # which ncu has started

    def check_script(self) -> None:
        self.check()

    @property
    def versions(self) -> Mapping[str, str]:
        return {"ncu": version_of(self.path)}

    def report(self, case: Case) -> Path:
        place = self.directory / case.report_path
        return place.parent / self.folder / place.name

    def log(self, case: Case) -> Path:
        return self.report(case).with_suffix(".log")

    def command(self, case: Case) -> list[str]:
        """The whole argument list for one case."""
        return [*self.before_program(case), *super().command(case)]

    def before_program(self, case: Case, *more: str) -> list[str]:
        """The arguments before those of the profiled program, caches and clocks left alone.

        A range or kernel is profiled if one of the NVTX filters fits.
        """
        steps = range(self.steps.active)
        chosen = [f"{NVTX_DOMAIN}@{step}.{phase}" for step in steps for phase in self.phases]
        return [
            self.path,
            *("--config-file", "off"),  # a stray config.ncu-cfg would change the run
            *("--replay-mode", self.replay),
            *("--cache-control", "none"),  # a flush before each range would change the bytes
            *("--clock-control", "none"),
            *("--import-sass", "no"),  # 60 times smaller reports
            "--nvtx",
            *(
                text
                for each in chosen or [f"regex:{NVTX_DOMAIN}@.*"]
                for text in ("--nvtx-include", each)
            ),
            *("--metrics", ",".join(counters(self.metrics))),
            *more,
            "--force-overwrite",
            *("--export", str(self.report(case))),
        ]

    def start(self, case: Case) -> Child:
        self.report(case).unlink(missing_ok=True)  # or a failed run would leave the last one's
        return super().start(case)

    def read(self, process: Child) -> list[Measurement]:
        """Wait for a process, and make rows of its report."""
        return self.rows(process.case, self.record_of(process), process.log)

    def record_of(self, process: Child) -> dict[str, Any]:
        """Wait for a process; returns the record that it printed."""
        try:
            return process.record()
        except CaseFailed as error:
            raise self.complaint(process.case) or error from None

    def recorder(self, case: Case, steps: int | None = None) -> Recorder:
        from dpbench.instruments.ncu.recorder import NvtxRecorder

        return NvtxRecorder(steps)

    def before_script(self, case: Case) -> list[str]:
        report = self.report(case)
        report.parent.mkdir(parents=True, exist_ok=True)
        report.unlink(missing_ok=True)
        return self.before_program(case, "--log-file", str(self.log(case)))

    def script_rows(self, case: Case, record: Mapping[str, Any]) -> list[Measurement]:
        rows = self.rows(case, record, self.log(case))
        return [row for row in rows if row.repeat < record["heard"]]  # of steps that have ended

    def complaint(self, case: Case) -> InstrumentError | None:
        """The error for which ncu ended a process; None if the process failed by itself.

        Such a process leaves nothing to profile, of which ncu complains as well.
        """
        said = diagnose(case, self.log(case))
        return None if isinstance(said, NothingProfiled) else said

    def report_left(self, case: Case, log: Path) -> Path:
        """The report of a process that has ended; an error says why it left none."""
        report = self.report(case)
        if not report.exists():
            message = f"{case.id}: ncu left no report"
            raise diagnose(case, log) or NothingProfiled(message, log=log)
        described = {
            "steps": vars(self.steps),
            "phases": self.phases,
            "counters": counters(self.metrics),
        }
        write_description(report, case, {"instrument": self.name, **described})
        return report

    def rows(self, case: Case, record: Mapping[str, Any], log: Path) -> list[Measurement]:
        """The rows of the report that a process left, which printed this record."""
        return read(self.report_left(case, log), case, self.metrics, tool=self.tool(record))

    def tool(self, record: Mapping[str, Any]) -> str:
        """The versions behind the rows of a record."""
        return f"ncu {version_of(self.path)}, torch {record['torch']}"


@dataclass(frozen=True)
class NcuKernels(Ncu):
    """Counts the bytes of kernels.

    Its rows are what kernels add up to, by phase and step, and ``kernels`` each kernel's share.
    """

    name: ClassVar[str] = "ncu_kernels"
    subjects: ClassVar[tuple[str, ...]] = ("case",)
    replay: ClassVar[str] = "kernel"  # tens of ms a kernel
    folder: ClassVar[str] = KERNELS

    metrics: tuple[Metric, ...] = field(default_factory=kernel_metrics)

    @classmethod
    def from_settings(cls, settings: Settings, **chosen: Any) -> Self:
        own: dict[str, Any] = {
            "steps": cls.steps,
            "phases": settings.phases,
            "metrics": kernel_metrics(gpu.chip_here()),
        }
        return super().from_settings(settings, **own | chosen)

    def read(self, process: Child) -> list[Measurement]:
        case = process.case
        try:
            record = self.record_of(process)
            report = read_kernels(self.report_left(case, process.log))
        except (NothingProfiled, ReportUnreadable):
            if not self.nothing_to_profile(case):
                raise
            process.notes = (f"no kernel in {', '.join(self.phases)}",)
            return []
        process.kernels = fold(report.launches)
        tool = self.tool(record)
        counts, whole = process.kernels, not self.phases
        return kernel_rows(case, self.name, counts, report.device, tool, whole=whole)

    def nothing_to_profile(self, case: Case) -> bool:
        """Whether its phases launch no kernel by the report of ranges, as ghost clipping's clip."""
        try:
            launches = launches_by_phase(self.directory / case.report_path)
        except InstrumentError:
            return False
        return bool(self.phases) and not any(launches[phase] for phase in self.phases)
