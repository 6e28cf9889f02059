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
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Self

from dpbench.child.messages import NVTX_DOMAIN, NVTX_END, Steps
from dpbench.child.recorder import Recorder
from dpbench.child.task import OF_PARENT
from dpbench.core import gpu
from dpbench.core.case import OUTSIDE
from dpbench.core.errors import CaseFailed, ConfigurationError, InstrumentError
from dpbench.core.metrics import Metric
from dpbench.core.settings import Settings
from dpbench.core.subject import Script, Subject
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
from dpbench.launch.case_process import log_lines
from dpbench.launch.processes import new_process, version_of
from dpbench.results.kernels import fold, kernel_rows
from dpbench.results.outcome import Outcome
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

    @property
    def versions(self) -> Mapping[str, str]:
        return {"ncu": version_of(self.path)}

    def report(self, case: Subject) -> Path:
        place = self.directory / case.report_path
        return place.parent / self.folder / place.name

    def log(self, case: Subject) -> Path:
        return self.report(case).with_suffix(".log")

    def profiler_command(self, case: Subject) -> list[str]:
        """Return the command line of ncu, which profiles each range that an NVTX filter matches."""
        report = self.report(case)
        report.parent.mkdir(parents=True, exist_ok=True)
        report.unlink(missing_ok=True)  # never read the report of an earlier run
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
            *(("--log-file", str(self.log(case))) if isinstance(case, Script) else ()),
            "--force-overwrite",
            *("--export", str(report)),
        ]

    def recorder(self, case: Subject, steps: int | None = None) -> Recorder:
        return NvtxRecorder(steps)

    def read_report(self, outcome: Outcome) -> Outcome:
        """Return the outcome with the rows of completed steps, or with the error that ncu printed.

        The line "No ranges were profiled" is ignored, because ncu prints it after every failure.
        """
        observed = outcome.details.get("observed", 0)
        if outcome.error == CaseFailed.__name__ and not observed:
            said = diagnose(outcome.case, self.log(outcome.case))
            if said and not isinstance(said, NothingProfiled):
                return outcome.with_error(said)
        if outcome.error and not observed:
            return outcome
        try:
            return self.with_numbers(outcome)
        except InstrumentError as error:
            return outcome if outcome.error else outcome.with_error(error)

    def with_numbers(self, outcome: Outcome) -> Outcome:
        """Return the outcome with the rows of the report."""
        report, tool = self.describe_report(outcome.case), self.tool(outcome)
        rows = read(report, outcome.case, self.metrics, tool=tool)
        completed = [row for row in rows if row.repeat < outcome.details["observed"]]
        return replace(outcome, rows=tuple(completed))

    def describe_report(self, case: Subject) -> Path:
        """Write the description of the report, and return the path of the report.

        Raises:
            InstrumentError: ncu wrote no report.
        """
        report, log = self.report(case), self.log(case)
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

    def tool(self, outcome: Outcome) -> str:
        """Return the versions of ncu and torch, for the column ``tool``."""
        return f"ncu {version_of(self.path)}, torch {outcome.details['torch']}"


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

    def with_numbers(self, outcome: Outcome) -> Outcome:
        case = outcome.case
        try:
            path = self.describe_report(case)
            # Use a new process, because NVIDIA's library never frees the 0.35 MB that it allocates
            # per kernel. For a step of the 1b model, the library allocates 2 GB.
            with new_process() as reader:
                report = reader.submit(read_kernels, path).result()
        except (NothingProfiled, ReportUnreadable):
            if not self.nothing_to_profile(case):
                raise
            return replace(outcome, notes=(f"no kernel ran in {', '.join(self.phases)}",))
        counts, whole, tool = fold(report.launches), not self.phases, self.tool(outcome)
        rows = kernel_rows(case, self.name, counts, report.device, tool, whole=whole)
        return replace(outcome, rows=tuple(rows), kernels=counts)

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


class NvtxRanges:
    """Marks each phase as an NVTX start/end range ``STEP.PHASE`` in dpbench's NVTX domain.

    Push/pop ranges would not cover the threads of autograd, which run backward. The GPU is
    synchronized at the start and end of each range, so that work counts in the phase that
    launched it.
    """

    def __init__(self) -> None:
        import nvtx
        import torch

        self.synchronize = torch.cuda.synchronize
        self.domain = nvtx.get_domain(NVTX_DOMAIN)
        self.step = -1
        self.range: Any = None

    def start_step(self) -> None:
        self.step += 1
        self.synchronize()
        self._start(f"{self.step}.{OUTSIDE}")

    def switch(self, phase: str) -> None:
        self.end_step()
        self._start(f"{self.step}.{phase}")

    def end_step(self) -> None:
        self.synchronize()
        self.domain.end_range(self.range)

    def finish(self) -> None:
        """Mark the end of the last step, so that a truncated report can be detected."""
        self._start(NVTX_END)
        self.end_step()

    def _start(self, name: str) -> None:
        self.range = self.domain.start_range(self.domain.get_event_attributes(message=name))


class NvtxRecorder(Recorder):
    """Marks phases as NVTX ranges. Records no times, because the profiler slows the steps."""

    @cached_property
    def listener(self) -> NvtxRanges:
        ranges = NvtxRanges()
        self.held.callback(self._finish)
        return ranges

    def _finish(self) -> None:
        if self.listener.step >= self.observed:  # the script ended within a step
            self.listener.end_step()
        self.listener.finish()

    def rows(self, case: Subject) -> list[Measurement]:
        return []
