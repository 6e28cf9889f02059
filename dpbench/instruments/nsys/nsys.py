"""How busy the GPU is by phase, through Nsight Systems.

``nsys profile`` records a case, ``nsys export`` makes an SQLite file of the report, from which busy
time and launches by phase are read, and ``nsys stats`` has statistics of its own.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar, Self

from dpbench.child.failures import InstrumentError
from dpbench.child.recorder import Recorder
from dpbench.core.case import Case
from dpbench.core.metrics import unit
from dpbench.core.settings import Settings
from dpbench.instruments.in_process import InProcessInstrument
from dpbench.launch.case_process import CaseProcess
from dpbench.launch.processes import run, version_of
from dpbench.results.rows import STEP, Measurement

if TYPE_CHECKING:
    from dpbench.instruments.nsys.timeline import Timeline

REPORT, EXPORTED = ".nsys-rep", ".sqlite"
"""Suffixes of a report, and of what is exported from it."""

STATISTICS = (
    "cuda_gpu_kern_sum",
    "cuda_gpu_mem_time_sum",
    "cuda_gpu_mem_size_sum",
    "cuda_api_sum",
    "nvtx_gpu_proj_sum",
)
"""The reports of ``nsys stats`` that are shown (``nsys stats --help-reports``)."""


class NsysNotFound(InstrumentError):
    """There is no Nsight Systems here."""

    remedy = (
        "install Nsight Systems (package nsight-systems, or nsight-systems-cli of NVIDIA) and put "
        "nsys on PATH"
    )


class ExportFailed(InstrumentError):
    """The nsys here makes no SQLite file of a report."""

    remedy = (
        "install Nsight Systems 2021.4 or newer, at least as new as what made the report, and "
        "have dpbench show read the report"
    )


@dataclass(frozen=True)
class Nsys(InProcessInstrument):
    """Times some steps of a case under ``nsys profile``, and has further ones recorded.

    Reports and exported files lie beside the log.
    """

    name: ClassVar[str] = "nsys"
    subjects: ClassVar[tuple[str, ...]] = ("case",)
    needs_gpu: ClassVar[bool] = True
    by_rank: ClassVar[bool] = False
    leaves_files: ClassVar[bool] = True
    path: str = "nsys"  # the program

    @classmethod
    def from_settings(cls, settings: Settings, **chosen: Any) -> Self:
        return super().from_settings(settings, **{"path": find_nsys()} | chosen)

    def recorder(self, case: Case, steps: int | None = None) -> Recorder:
        from dpbench.instruments.nsys.recorder import NsysRecorder

        return NsysRecorder(steps or self.steps.active)

    @property
    def versions(self) -> Mapping[str, str]:
        return {"nsys": version_of(self.path)}

    def report(self, case: Case) -> Path:
        return (self.directory / case.report_path).with_suffix(REPORT)

    def before_case(self, case: Case) -> list[str]:
        """``nsys profile``; only what the case puts between start and stop is recorded."""
        return [
            *(self.path, "profile"),
            "--trace=cuda,nvtx",  # with osrt, a tiny case left 2.2 GB
            *("--sample=none", "--cpuctxsw=none"),
            "--cuda-graph-trace=node",
            *("--capture-range=cudaProfilerApi", "--capture-range-end=stop"),
            "--force-overwrite=true",
            f"--output={str(self.report(case)).replace('%', '%%')}",
        ]

    def start(self, case: Case) -> CaseProcess:
        for suffix in (REPORT, EXPORTED):
            self.report(case).with_suffix(suffix).unlink(missing_ok=True)
        return super().start(case)

    def read(self, process: CaseProcess) -> list[Measurement]:
        """Wait for a process; its rows are time, busy time and launches, by phase and step."""
        from dpbench.instruments.nsys.timeline import NothingTraced, read_timeline  # loads numpy

        case, report = process.case, self.report(process.case)
        record, target = process.record(), report.with_suffix(EXPORTED)
        if not report.exists():
            raise NothingTraced(f"{case.id}: nsys left no report")
        exported(self.path, report, target, timeout=self.timeout)
        timeline = read_timeline(target)
        if not any(each.phase == STEP for each in timeline.ranges):
            raise NothingTraced(f"{case.id}: {target} has no step that dpbench marked")
        tool = f"nsys {version_of(self.path)}, torch {record['torch']}"
        before = record["untraced_seconds"]
        traced = median((each.end - each.start) / 1e9 for each in timeline.whole_steps)
        slowed = f"a step took {traced * 1e3:.1f} ms recorded, {before * 1e3:.1f} ms before"
        process.notes = (slowed, f"dpbench show {target}")
        return list(timeline_rows(case, timeline, record["device"], tool))


def timeline_of(path: Path) -> tuple[Timeline, dict[str, str]]:
    """The timeline in an exported file or in a report, and nsys's own statistics of it.

    A report takes an nsys to export it. Without one an exported file has no statistics.
    """
    from dpbench.instruments.nsys.timeline import read_timeline

    with tempfile.TemporaryDirectory(prefix="dpbench-") as scratch:
        target = path
        if path.suffix == REPORT:
            target = Path(scratch, path.stem + EXPORTED)
            exported(find_nsys(), path, target, timeout=Settings.timeout)
        timeline = read_timeline(target, path)
        nsys = shutil.which("nsys")
        return timeline, statistics(nsys, target, Path(scratch)) if nsys else {}


def timeline_rows(case: Case, timeline: Timeline, device: str, tool: str) -> Iterator[Measurement]:
    """The rows of a timeline. Phases are those of step 0; whole steps are numbered from 0 again."""
    whole = [each.step for each in timeline.whole_steps]
    for usage in timeline.usages():
        step, phase = usage.pop("step"), usage.pop("phase")
        repeat = whole.index(step) if phase == STEP else 0
        for metric, value in usage.items():
            numbers = phase, metric, float(value), unit(metric), repeat
            yield Measurement(case, Nsys.name, *numbers, device, tool)


# --- the program ------------------------------------------------------------------------------


def find_nsys() -> str:
    """The ``nsys`` on ``PATH``."""
    if program := shutil.which("nsys"):
        return program
    raise NsysNotFound("Nsight Systems (nsys) was not found")


def statistics(nsys: str, recorded: Path, folder: Path) -> dict[str, str]:
    """What ``nsys stats`` says of an exported file: by report, the CSV that it left in a folder."""
    reports = [text for name in STATISTICS for text in ("--report", name)]
    output = ("--format", "csv", "--output", str(folder / "stats"))
    run([nsys, "stats", *reports, *output, str(recorded)], timeout=Settings.timeout)
    files = {name: folder / f"stats_{name}.csv" for name in STATISTICS}
    return {name: path.read_text("utf-8") for name, path in files.items() if path.exists()}


def exported(nsys: str, report: Path, target: Path, *, timeout: float) -> Path:
    """A report as a SQLite file."""
    target.unlink(missing_ok=True)
    command = [nsys, "export", "--type", "sqlite", "--force-overwrite", "true", "--quiet", "true"]
    code, output = run([*command, "--output", str(target), str(report)], timeout=timeout)
    if code or not target.exists():
        why = next(filter(None, map(str.strip, reversed(output.splitlines()))), f"exit code {code}")
        raise ExportFailed(f"nsys {version_of(nsys)} made no SQLite file of {report} ({why})")
    return target
