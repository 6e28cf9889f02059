"""The instrument ``nsys`` measures how long the GPU is busy in each phase, with Nsight Systems.

``nsys profile`` records a case, and ``nsys export`` converts the report to an SQLite file. The
module `timeline` reads busy time and launches by phase from the SQLite file. ``dpbench show``
also shows statistics of ``nsys stats``.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar, Self

from dpbench.child.recorder import Recorder
from dpbench.core.errors import InstrumentError
from dpbench.core.metrics import unit
from dpbench.core.settings import Settings
from dpbench.core.subject import Subject
from dpbench.instruments.in_process import InProcessInstrument
from dpbench.launch.processes import run, version_of
from dpbench.results.outcome import Outcome
from dpbench.results.rows import STEP, Measurement

if TYPE_CHECKING:
    from dpbench.instruments.nsys.timeline import Timeline

REPORT, EXPORTED = ".nsys-rep", ".sqlite"
"""Suffixes of a report and of the SQLite file that is exported from it."""

STATISTICS = (
    "cuda_gpu_kern_sum",
    "cuda_gpu_mem_time_sum",
    "cuda_gpu_mem_size_sum",
    "cuda_api_sum",
    "nvtx_gpu_proj_sum",
)
"""Reports of ``nsys stats`` that ``dpbench show`` shows.

``nsys stats --help-reports`` lists all reports.
"""


class NsysNotFound(InstrumentError):
    """Nsight Systems is not installed."""

    remedy = (
        "install the package nsight-systems or nsight-systems-cli from NVIDIA, and add the folder "
        "of nsys to PATH"
    )


class ExportFailed(InstrumentError):
    """The installed nsys cannot export a report to SQLite."""

    remedy = (
        "install Nsight Systems 2021.4 or newer, at least the version that made the report, and "
        "run `dpbench show` on the report"
    )


@dataclass(frozen=True)
class Nsys(InProcessInstrument):
    """An instrument that times steps of a case, and then records more steps with ``nsys profile``.

    The report and the SQLite file are written to the folder of the log.

    Attributes:
        path: path of the program nsys.
    """

    name: ClassVar[str] = "nsys"
    subjects: ClassVar[tuple[str, ...]] = ("case",)
    needs_gpu: ClassVar[bool] = True
    by_rank: ClassVar[bool] = False
    leaves_files: ClassVar[bool] = True
    path: str = "nsys"

    @classmethod
    def from_settings(cls, settings: Settings, **chosen: Any) -> Self:
        return super().from_settings(settings, **{"path": find_nsys()} | chosen)

    def recorder(self, case: Subject, steps: int | None = None) -> Recorder:
        from dpbench.instruments.nsys.recorder import NsysRecorder

        return NsysRecorder(steps or self.steps.active)

    @property
    def versions(self) -> Mapping[str, str]:
        return {"nsys": version_of(self.path)}

    def report(self, case: Subject) -> Path:
        return (self.directory / case.report_path).with_suffix(REPORT)

    def profiler_command(self, case: Subject) -> list[str]:
        """Return the command line of ``nsys profile``.

        nsys records only between ``cudaProfilerStart`` and ``cudaProfilerStop``.
        """
        for suffix in (REPORT, EXPORTED):
            self.report(case).with_suffix(suffix).unlink(missing_ok=True)
        return [
            *(self.path, "profile"),
            "--trace=cuda,nvtx",  # also tracing osrt can make a report gigabytes large
            *("--sample=none", "--cpuctxsw=none"),
            "--cuda-graph-trace=node",
            *("--capture-range=cudaProfilerApi", "--capture-range-end=stop"),
            "--force-overwrite=true",
            f"--output={str(self.report(case)).replace('%', '%%')}",
        ]

    def read_report(self, outcome: Outcome) -> Outcome:
        """Return the outcome with time, busy time and launches by phase and step."""
        from dpbench.instruments.nsys.timeline import NothingTraced, read_timeline  # imports numpy

        if outcome.error:
            return outcome
        case, details, report = outcome.case, outcome.details, self.report(outcome.case)
        target = report.with_suffix(EXPORTED)
        if not report.exists():
            raise NothingTraced(f"{case.id}: nsys wrote no report")
        export_to_sqlite(self.path, report, target, timeout=self.timeout)
        timeline = read_timeline(target)
        if not any(each.phase == STEP for each in timeline.ranges):
            raise NothingTraced(f"{case.id}: {target} contains no step that dpbench marked")
        tool = f"nsys {version_of(self.path)}, torch {details['torch']}"
        before = details["untraced_seconds"]
        traced = median((each.end - each.start) / 1e9 for each in timeline.whole_steps)
        slowed = (
            f"a step took {traced * 1e3:.1f} ms while nsys recorded, and {before * 1e3:.1f} ms "
            f"before"
        )
        rows = tuple(timeline_rows(case, timeline, details["device"], tool))
        return replace(outcome, rows=rows, notes=(*outcome.notes, slowed, f"dpbench show {target}"))


def timeline_of(path: Path) -> tuple[Timeline, dict[str, str]]:
    """Read the timeline and the statistics of a report or of an SQLite file.

    The program nsys reads reports and computes the statistics. If nsys is missing, the statistics
    of an SQLite file are empty, and reading a report raises an error.
    """
    from dpbench.instruments.nsys.timeline import read_timeline

    with tempfile.TemporaryDirectory(prefix="dpbench-") as scratch:
        target = path
        if path.suffix == REPORT:
            target = Path(scratch, path.stem + EXPORTED)
            export_to_sqlite(find_nsys(), path, target, timeout=Settings.timeout)
        timeline = read_timeline(target, path)
        nsys = shutil.which("nsys")
        return timeline, statistics(nsys, target, Path(scratch)) if nsys else {}


def timeline_rows(
    case: Subject, timeline: Timeline, device: str, tool: str
) -> Iterator[Measurement]:
    """Yield the rows of a timeline.

    In rows of phases, the column ``repeat`` is 0. In rows of whole steps, ``repeat`` counts the
    steps from 0.
    """
    whole = [each.step for each in timeline.whole_steps]
    for usage in timeline.usages():
        step, phase = usage.pop("step"), usage.pop("phase")
        repeat = whole.index(step) if phase == STEP else 0
        for metric, value in usage.items():
            numbers = phase, metric, float(value), unit(metric), repeat
            yield Measurement(case, Nsys.name, *numbers, device, tool)


# --- the program ------------------------------------------------------------------------------


def find_nsys() -> str:
    """Return the path of the program nsys on ``PATH``.

    Raises:
        NsysNotFound: no such program exists.
    """
    if program := shutil.which("nsys"):
        return program
    raise NsysNotFound("Nsight Systems (nsys) was not found")


def statistics(nsys: str, recorded: Path, folder: Path) -> dict[str, str]:
    """Run ``nsys stats`` on an SQLite file, and return the written reports as CSV texts by name."""
    reports = [text for name in STATISTICS for text in ("--report", name)]
    output = ("--format", "csv", "--output", str(folder / "stats"))
    run([nsys, "stats", *reports, *output, str(recorded)], timeout=Settings.timeout)
    files = {name: folder / f"stats_{name}.csv" for name in STATISTICS}
    return {name: path.read_text("utf-8") for name, path in files.items() if path.exists()}


def export_to_sqlite(nsys: str, report: Path, target: Path, *, timeout: float) -> Path:
    """Export a report to the SQLite file ``target``."""
    target.unlink(missing_ok=True)
    command = [nsys, "export", "--type", "sqlite", "--force-overwrite", "true", "--quiet", "true"]
    code, output = run([*command, "--output", str(target), str(report)], timeout=timeout)
    if code or not target.exists():
        why = next(filter(None, map(str.strip, reversed(output.splitlines()))), f"exit code {code}")
        raise ExportFailed(f"nsys {version_of(nsys)} could not export {report} to SQLite ({why})")
    return target
