"""The instruments `Ncu` and `NcuKernels` read hardware counters with Nsight Compute.

The instruments run a case under ``ncu`` to measure DRAM, L2 and global-memory bytes. `Ncu` uses
application range replay. In this replay mode, each change of phase in an active step begins a
range, and the counters of a range include copies and memsets. A phase that occurs several times in
a step is several ranges, which are added up. `NcuKernels` uses kernel replay, which counts
each kernel separately and does not count copies and memsets.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Self

from dpbench.child.failures import CaseFailed, InstrumentError
from dpbench.child.messages import NVTX_DOMAIN, Steps
from dpbench.child.recorder import Recorder
from dpbench.child.task import OF_PARENT
from dpbench.core import gpu
from dpbench.core.case import Case
from dpbench.core.errors import ConfigurationError
from dpbench.core.metrics import Metric
from dpbench.core.settings import Settings
from dpbench.core.subject import Subject
from dpbench.instruments.counters import (
    CounterOptions,
    CountersBusy,
    CountersForbidden,
    CounterUnknown,
    ProfilerNotLoaded,
    counters,
    resolve,
)
from dpbench.instruments.in_process import InProcessInstrument
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
from dpbench.launch.case_process import CaseProcess, log_lines
from dpbench.launch.processes import new_process, version_of
from dpbench.results.kernels import fold, kernel_rows
from dpbench.results.rows import Measurement


class NcuNotFound(InstrumentError):
    """Nsight Compute is not installed."""

    remedy = (
        "install Nsight Compute, which the CUDA toolkit includes, or pass the path of ncu as "
        "--ncu-path"
    )


_MESSAGES: tuple[tuple[str, type[InstrumentError]], ...] = (
    (r"ERR_NVGPUCTRPERM", CountersForbidden),
    (r"driver resource was unavailable", CountersBusy),
    (r"LibraryNotLoaded", ProfilerNotLoaded),
    (r"Failed to find metric", CounterUnknown),
    (r"No (ranges|kernels) were profiled", NothingProfiled),
)
"""Patterns of ncu's messages, and the errors that they mean. The first matching pattern is used.

"No ranges were profiled" is last, because ncu prints it after every failure.
"""


@dataclass(frozen=True)
class Ncu(InProcessInstrument):
    """An instrument that runs a case or script under ncu, and reads metrics by phase and step.

    One active step is usually enough, because equal steps move almost the same DRAM bytes. Each
    additional step takes seconds and makes the report larger.

    Attributes:
        replay: replay mode of ncu.
        folder: name of the subfolder for reports, in the folder of the case.
        steps: numbers of warm-up and active steps.
        path: path of the program ncu.
        phases: phases to profile; if empty, all phases are profiled.
        metrics: metrics to count. The default is all metrics of ncu.
    """

    name: ClassVar[str] = "ncu"
    subjects: ClassVar[tuple[str, ...]] = ("case", "script")
    needs_gpu: ClassVar[bool] = True
    by_rank: ClassVar[bool] = False
    leaves_files: ClassVar[bool] = True
    options: ClassVar[type | None] = CounterOptions
    replay: ClassVar[str] = "app-range"
    folder: ClassVar[str] = ""

    steps: Steps = Steps(warmup=1, active=1)
    path: str = "ncu"
    phases: tuple[str, ...] = ()
    metrics: tuple[Metric, ...] = field(
        default_factory=lambda: tuple(resolve()), metadata=OF_PARENT
    )

    @classmethod
    def from_settings(cls, settings: Settings, **chosen: Any) -> Self:
        asked = settings.of(CounterOptions)
        own: dict[str, Any] = {
            "steps": asked.steps,
            "path": find_ncu(asked.ncu_path),
            "metrics": tuple(resolve(asked.names, gpu.chip_here())),
        }
        return super().from_settings(settings, **own | chosen)

    def check(self) -> None:
        if find_spec("ncu_report") is None:
            raise ConfigurationError(
                "dpbench needs the package ncu-report to read reports of ncu: run `pip install "
                "ncu-report`, or add the folder extras/python of Nsight Compute to PYTHONPATH"
            )
        super().check()

    def check_script(self) -> None:
        self.check()

    @property
    def versions(self) -> Mapping[str, str]:
        return {"ncu": version_of(self.path)}

    def report(self, case: Subject) -> Path:
        place = self.directory / case.report_path
        return place.parent / self.folder / place.name

    def log(self, case: Subject) -> Path:
        return self.report(case).with_suffix(".log")

    def profiler_command(self, case: Subject, *more: str) -> list[str]:
        """Return the command line of ncu.

        ncu profiles each range that matches one of the NVTX filters. ``more`` are additional
        arguments.
        """
        steps = range(self.steps.active)
        chosen = [f"{NVTX_DOMAIN}@{step}.{phase}" for step in steps for phase in self.phases]
        return [
            self.path,
            *("--config-file", "off"),  # ignore a config.ncu-cfg in the current directory
            *("--replay-mode", self.replay),
            *("--cache-control", "none"),  # flushing caches before a range would change the counts
            *("--clock-control", "none"),
            *("--import-sass", "no"),  # with machine code, reports would be many times larger
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

    def start(self, case: Case) -> CaseProcess:
        self.report(case).unlink(missing_ok=True)  # never read the report of an earlier run
        return super().start(case)

    def read(self, process: CaseProcess) -> list[Measurement]:
        """Wait for the process to end, and return the rows of its report."""
        return self.rows(process.case, self.record_of(process), process.log)

    def record_of(self, process: CaseProcess) -> dict[str, Any]:
        """Wait for the process to end, and return its record.

        Raises:
            InstrumentError: ncu printed an error.
        """
        try:
            return process.record()
        except CaseFailed as error:
            raise self.profiler_error(process.case) or error from None

    def recorder(self, case: Subject, steps: int | None = None) -> Recorder:
        from dpbench.instruments.ncu.recorder import NvtxRecorder

        return NvtxRecorder(steps)

    def before_script(self, case: Subject) -> list[str]:
        report = self.report(case)
        report.parent.mkdir(parents=True, exist_ok=True)
        report.unlink(missing_ok=True)
        return self.profiler_command(case, "--log-file", str(self.log(case)))

    def script_rows(self, case: Subject, record: Mapping[str, Any]) -> list[Measurement]:
        rows = self.rows(case, record, self.log(case))
        return [row for row in rows if row.repeat < record["observed"]]  # completed steps only

    def profiler_error(self, case: Subject) -> InstrumentError | None:
        """Return the error that ncu printed, or None if the process failed by itself.

        The line "No ranges were profiled" is ignored, because ncu prints it after every failure.
        """
        said = diagnose(case, self.log(case))
        return None if isinstance(said, NothingProfiled) else said

    def describe_report(self, case: Subject, log: Path) -> Path:
        """Write the description of the report, and return the path of the report.

        Raises:
            InstrumentError: ncu wrote no report.
        """
        report = self.report(case)
        if not report.exists():
            message = f"{case.id}: ncu wrote no report"
            raise diagnose(case, log) or NothingProfiled(message, log=log)
        described = {
            "steps": vars(self.steps),
            "phases": self.phases,
            "counters": counters(self.metrics),
        }
        write_description(report, case, {"instrument": self.name, **described})
        return report

    def rows(self, case: Subject, record: Mapping[str, Any], log: Path) -> list[Measurement]:
        """Return the rows of the report. ``record`` is the record of the measured process."""
        return read(self.describe_report(case, log), case, self.metrics, tool=self.tool(record))

    def tool(self, record: Mapping[str, Any]) -> str:
        """Return the versions of ncu and torch, for the column ``tool``."""
        return f"ncu {version_of(self.path)}, torch {record['torch']}"


@dataclass(frozen=True)
class NcuKernels(Ncu):
    """An instrument that counts each kernel separately, and adds up the kernels of each phase."""

    name: ClassVar[str] = "ncu_kernels"
    subjects: ClassVar[tuple[str, ...]] = ("case",)
    replay: ClassVar[str] = "kernel"  # this replay mode takes tens of milliseconds per kernel
    folder: ClassVar[str] = KERNELS

    metrics: tuple[Metric, ...] = field(default_factory=kernel_metrics, metadata=OF_PARENT)

    @classmethod
    def from_settings(cls, settings: Settings, **chosen: Any) -> Self:
        own: dict[str, Any] = {
            "steps": cls.steps,
            "phases": settings.phases,
            "metrics": kernel_metrics(gpu.chip_here()),
        }
        return super().from_settings(settings, **own | chosen)

    def read(self, process: CaseProcess) -> list[Measurement]:
        case = process.case
        try:
            record = self.record_of(process)
            path = self.describe_report(case, process.log)
            # Use a new process, because NVIDIA's library never frees the 0.35 MB that it allocates
            # per kernel. For a step of the 1b model, the library allocates 2 GB.
            with new_process() as reader:
                report = reader.submit(read_kernels, path).result()
        except (NothingProfiled, ReportUnreadable):
            if not self.nothing_to_profile(case):
                raise
            process.notes = (f"no kernel ran in {', '.join(self.phases)}",)
            return []
        process.kernels = fold(report.launches)
        tool = self.tool(record)
        counts, whole = process.kernels, not self.phases
        return kernel_rows(case, self.name, counts, report.device, tool, whole=whole)

    def nothing_to_profile(self, case: Subject) -> bool:
        """Return True if the instrument `Ncu` found no kernel in the chosen phases.

        For example, the phase clip may launch no kernel. Without chosen phases, or without a report
        of `Ncu`, returns False.
        """
        try:
            launches = launches_by_phase(self.directory / case.report_path)
        except InstrumentError:
            return False
        return bool(self.phases) and not any(launches[phase] for phase in self.phases)


# --- the program ------------------------------------------------------------------------------


def diagnose(case: Subject, log: Path) -> InstrumentError | None:
    """Return the error that ncu printed to a log, or None."""
    said = [line for line in log_lines(log) if line.startswith("==")] if log.exists() else []
    for pattern, error in _MESSAGES:
        for line in said:
            if re.search(pattern, line):
                text = line.split("==", 2)[2].strip()
                return error(f"{case.id}: ncu printed {text!r}", log=log)
    return None


def find_ncu(path: str | None = None) -> str:
    """Return the path of the program ncu.

    Args:
        path: name or path of the program. If None, ncu is searched on ``PATH`` and in the folders
            in which NVIDIA installs it.
    """
    installed = sorted(Path("/opt/nvidia/nsight-compute").glob("*/ncu"), reverse=True)
    usual = ["ncu", "/usr/local/cuda/bin/ncu", *map(str, installed)]
    program = next(filter(None, map(shutil.which, usual if path is None else [path])), None)
    if program is None:
        missing = (
            "Nsight Compute (ncu) was not found"
            if path is None
            else f"there is no program {path!r}"
        )
        raise NcuNotFound(missing)
    return program
