"""How busy the GPU is by phase, and which launches it waits for, by Nsight Systems."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import ClassVar

from dpbench.case import Case
from dpbench.instruments.base import CaseFailed, Instrument, check_place
from dpbench.instruments.child import Child, log_lines, step_command
from dpbench.instruments.nsys import program
from dpbench.instruments.nsys.program import EXPORTED, RAW, REPORT
from dpbench.instruments.nsys.sqlite import NothingTraced, read_timeline
from dpbench.metrics import unit
from dpbench.process.messages import last_record
from dpbench.process.schedule import Steps
from dpbench.results.rows import STEP, Measurement
from dpbench.results.timeline import Timeline
from dpbench.settings import Settings


@dataclass(frozen=True)
class Nsys(Instrument):
    """Records some steps of a case under ``nsys profile``.

    Args:
        directory: where reports, exports and logs go, one folder a configuration.
        path: the ``nsys`` program.
        steps: warm-up steps, and active ones that are timed before the recording.
        timeout: seconds after which a case is ended.
    """

    name: ClassVar[str] = "nsys"

    directory: Path
    path: str
    steps: Steps = Steps(Settings.warmup, Settings.active)
    timeout: float = Settings.timeout

    @classmethod
    def from_settings(cls, settings: Settings) -> Nsys:
        steps = Steps(settings.warmup, settings.active)
        return cls(settings.ncu_dir, program.find_nsys(), steps, settings.timeout)

    def check(self) -> None:
        check_place(self.directory, on_gpu=True)

    @property
    def versions(self) -> Mapping[str, str]:
        return {"nsys": program.nsys_version(self.path)}

    def report(self, case: Case) -> Path:
        return (self.directory / case.report_path).with_suffix(REPORT)

    def command(self, case: Case) -> list[str]:
        """The whole argument list for one case; only what lies between the marks is recorded."""
        return [
            *(self.path, "profile"),
            "--trace=cuda,nvtx",  # with osrt, a tiny case left 2.2 GB
            *("--sample=none", "--cpuctxsw=none"),
            "--cuda-graph-trace=node",
            *("--capture-range=cudaProfilerApi", "--capture-range-end=stop"),
            "--force-overwrite=true",
            f"--output={str(self.report(case)).replace('%', '%%')}",
            *step_command(case, self.steps, device="cuda"),
            "--nsys",
        ]

    def start(self, case: Case) -> Child:
        """Start a process whose rows are busy time, time and launches, by phase and step."""
        report = self.report(case)
        report.parent.mkdir(parents=True, exist_ok=True)
        for suffix in (REPORT, RAW, EXPORTED):
            report.with_suffix(suffix).unlink(missing_ok=True)
        log = report.with_suffix(".nsys.log")
        return Child(self.command(case), case=case, log=log, timeout=self.timeout, read=self.read)

    def read(self, process: Child) -> list[Measurement]:
        """Wait for a process, and make rows of what it recorded."""
        case, report = process.case, self.report(process.case)
        raw, target = report.with_suffix(RAW), report.with_suffix(EXPORTED)
        try:
            record = process.record()
        except CaseFailed:
            record = last_record(log_lines(process.log), process.mark)
            if "torch" not in record or not raw.exists():  # else only nsys failed, as importer
                raise
        if not report.exists() and raw.exists():
            program.imported(self.path, raw, timeout=self.timeout)
        if not report.exists():
            raise NothingTraced(f"{case.id}: nsys left no report")
        program.exported(self.path, report, target, timeout=self.timeout)
        timeline = read_timeline(target)
        if not any(each.phase == STEP for each in timeline.ranges):
            raise NothingTraced(f"{case.id}: {target} has no step that dpbench marked")
        tool = f"nsys {program.nsys_version(self.path)}, torch {record['torch']}"
        before = record["untraced_seconds"]
        traced = median((each.end - each.start) / 1e9 for each in timeline.whole_steps)
        slowed = f"a step took {traced * 1e3:.1f} ms recorded, {before * 1e3:.1f} ms before"
        process.notes = (slowed, f"dpbench show {target}")
        return list(timeline_rows(case, timeline, record["device"], tool))


def timeline_of(path: Path) -> Timeline:
    """The timeline in an exported file, or in a report, which takes an nsys to export it."""
    with tempfile.TemporaryDirectory(prefix="dpbench-") as scratch:
        target = path
        if path.suffix == REPORT:
            target = Path(scratch, path.stem + EXPORTED)
            program.exported(program.find_nsys(), path, target, timeout=Settings.timeout)
        return read_timeline(target, path)


def timeline_rows(case: Case, timeline: Timeline, device: str, tool: str) -> Iterator[Measurement]:
    """The rows of a timeline; the step by phase is the first, whole ones are counted from 0."""
    whole = [each.step for each in timeline.whole_steps]
    for usage in timeline.usages().to_dict("records"):
        step, phase = usage.pop("step"), usage.pop("phase")
        repeat = whole.index(step) if phase == STEP else 0
        for metric, value in usage.items():
            numbers = phase, str(metric), value, unit(str(metric)), repeat
            yield Measurement(case, Nsys.name, *numbers, device, tool)
