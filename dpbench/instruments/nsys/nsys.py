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
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar, Self

from dpbench.child.messages import NVTX_DOMAIN
from dpbench.child.recorder import NullListener, Recorder, whole_steps
from dpbench.core.case import OUTSIDE
from dpbench.core.errors import InstrumentError
from dpbench.core.metrics import unit
from dpbench.core.settings import Settings
from dpbench.core.subject import Subject
from dpbench.instruments.in_process import InProcessInstrument
from dpbench.instruments.timing import TimingRecorder
from dpbench.launch.processes import run, version_of
from dpbench.results.outcome import Outcome
from dpbench.results.rows import STEP, Measurement
from dpbench.training.phases import PhaseListener

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


class PhaseRanges:
    """Marks the phases of a step as NVTX start/end ranges ``dpbench:STEP.PHASE``.

    Push/pop ranges would not cover the threads of autograd, which run backward. The ranges are
    made with torch, because older versions of nsys do not record ranges of the package nvtx.

    Args:
        step: number of the step.
        whole: whether an additional range covers the whole step. If True, the GPU is synchronized
            only at the start and end of the step, so the CPU can run ahead. If False, the GPU is
            synchronized at the start and end of each phase, so that the range of a phase covers
            all work of the phase.
        cuda: `torch.cuda`, or a fake for tests.
    """

    def __init__(self, step: int, *, whole: bool, cuda: Any) -> None:
        self.step, self.whole, self.cuda = step, whole, cuda
        self.open: list[int] = []

    def start_step(self) -> None:
        self.cuda.synchronize()
        if self.whole:
            self._start(STEP)
        self._start(OUTSIDE)

    def switch(self, phase: str) -> None:
        if not self.whole:
            self.cuda.synchronize()
        self.cuda.nvtx.range_end(self.open.pop())
        self._start(phase)

    def end_step(self) -> None:
        self.cuda.synchronize()
        while self.open:
            self.cuda.nvtx.range_end(self.open.pop())

    def _start(self, phase: str) -> None:
        self.open.append(self.cuda.nvtx.range_start(f"{NVTX_DOMAIN}:{self.step}.{phase}"))


class NsysRecorder(Recorder):
    """Times steps, and then starts the recording of nsys for more steps.

    nsys records one step without ranges, then one step with ranges of its phases, and then one or
    more steps with an additional range of the whole step. The first recorded step is not used,
    because starting the recording slows it.
    """

    def __init__(self, timed: int) -> None:
        super().__init__(timed + 1)
        self.timing = TimingRecorder(timed)
        self._recorded: Iterator[PhaseListener] | None = None

    @cached_property
    def cuda(self) -> Any:
        """The module `torch.cuda`."""
        import torch

        return torch.cuda

    @cached_property
    def listener(self) -> PhaseListener:
        return self.timing

    def start_step(self) -> None:
        if self.timing.finished:
            self._recorded = self._recorded or self._start_recording()
            self.listener = next(self._recorded)
        super().start_step()

    def _start_recording(self) -> Iterator[PhaseListener]:
        """Start the recording, and return an iterator over the listeners of the recorded steps."""
        whole = [False, *[True] * whole_steps(self.timing.median_seconds)]
        self.wanted = self.timing.observed + 1 + len(whole)
        self.cuda.synchronize()
        self.cuda.profiler.start()
        self.held.callback(self.cuda.profiler.stop)
        self.held.callback(self.cuda.synchronize)  # runs before `profiler.stop`
        ranges = [PhaseRanges(step, whole=each, cuda=self.cuda) for step, each in enumerate(whole)]
        return iter([NullListener(), *ranges])

    def details(self) -> dict[str, Any]:
        return {"untraced_seconds": self.timing.median_seconds}

    def rows(self, case: Subject) -> list[Measurement]:
        return []  # `Nsys.read` makes the rows from the exported report
