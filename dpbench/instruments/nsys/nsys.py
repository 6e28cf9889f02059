"""How busy the GPU is by phase, and which launches it waits for, by Nsight Systems.

Its programs record a case and export what they recorded as an SQLite file, which is read here.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar, Self

from dpbench.case import Case
from dpbench.instruments.case_process import Child, log_lines
from dpbench.instruments.interface import CaseFailed, InstrumentError
from dpbench.instruments.processes import run, version_of
from dpbench.instruments.recorded import Recorded
from dpbench.instruments.recorder import Recorder
from dpbench.metrics import unit
from dpbench.process.messages import last_record
from dpbench.results.rows import STEP, Measurement
from dpbench.settings import Settings

if TYPE_CHECKING:
    from dpbench.results.timeline import Timeline

REPORT, RAW, EXPORTED = ".nsys-rep", ".qdstrm", ".sqlite"
"""Suffixes of a report, of a raw recording that has to be imported, and of an export."""

INSTALLED = (
    "/usr/local/cuda/bin/nsys",
    "/opt/nvidia/nsight-systems*/*/bin/nsys",
    "/opt/nvidia/nsight-systems*/*/target-linux-*/nsys",
    # Nsight Compute brings a collector for its own system trace.
    "/opt/nvidia/nsight-compute/*/host/target-linux-*/nsys",
    "/usr/local/cuda*/nsight-compute-*/host/target-linux-*/nsys",
)
"""Where NVIDIA installs nsys, the best place first."""


class NsysNotFound(InstrumentError):
    """There is no Nsight Systems here."""

    remedy = (
        "install Nsight Systems (package nsight-systems, or nsight-systems-cli of NVIDIA) and put "
        "nsys on PATH; Nsight Compute brings one too, in host/target-linux-*"
    )


class ImporterMissing(InstrumentError):
    """A collector that cannot import what it recorded."""

    remedy = (
        "install the whole of Nsight Systems, or what its QdstrmImporter needs (Debian: libdw1, "
        "libelf1)"
    )


class ExportFailed(InstrumentError):
    """A report of which this nsys makes no SQLite file."""

    remedy = (
        "install Nsight Systems 2021.4 or newer, at least as new as what made the report, and "
        "have dpbench show read the report"
    )


@dataclass(frozen=True)
class Nsys(Recorded):
    """Records some steps of a case under ``nsys profile``, after those that are timed.

    Reports and exports lie beside the log.
    """

    name: ClassVar[str] = "nsys"
    subjects: ClassVar[tuple[str, ...]] = ("case",)
    needs_gpu: ClassVar[bool] = True
    by_rank: ClassVar[bool] = False
    leaves_files: ClassVar[bool] = True
    step_option = "--nsys", "under nsys profile: have some steps recorded after the timed ones"

    path: str = "nsys"  # the program

    @classmethod
    def from_settings(cls, settings: Settings, **chosen: Any) -> Self:
        return super().from_settings(settings, **{"path": find_nsys()} | chosen)

    @classmethod
    def in_step(cls, settings: Settings, value: Any) -> Self:
        return super().from_settings(settings)  # which nsys has started

    def recorder(self, case: Case, steps: int | None = None) -> Recorder:
        from dpbench.instruments.nsys.recorder import NsysRecorder

        return NsysRecorder(steps or self.steps.active)

    @property
    def versions(self) -> Mapping[str, str]:
        return {"nsys": version_of(self.path)}

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
            *super().command(case),
        ]

    def start(self, case: Case) -> Child:
        for suffix in (REPORT, RAW, EXPORTED):
            self.report(case).with_suffix(suffix).unlink(missing_ok=True)
        return super().start(case)

    def read(self, process: Child) -> list[Measurement]:
        """Wait for a process; its rows are busy time, time and launches, by phase and step."""
        from dpbench.instruments.nsys.sqlite import NothingTraced, read_timeline  # loads pandas

        case, report = process.case, self.report(process.case)
        raw, target = report.with_suffix(RAW), report.with_suffix(EXPORTED)
        try:
            record = process.record()
        except CaseFailed:
            record = last_record(log_lines(process.log), process.mark)
            if "torch" not in record or not raw.exists():  # else only nsys failed, as importer
                raise
        if not report.exists() and raw.exists():
            imported(self.path, raw, timeout=self.timeout)
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


def timeline_of(path: Path) -> Timeline:
    """The timeline in an exported file, or in a report, which takes an nsys to export it."""
    from dpbench.instruments.nsys.sqlite import read_timeline

    with tempfile.TemporaryDirectory(prefix="dpbench-") as scratch:
        target = path
        if path.suffix == REPORT:
            target = Path(scratch, path.stem + EXPORTED)
            exported(find_nsys(), path, target, timeout=Settings.timeout)
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


# --- the programs -----------------------------------------------------------------------------


def find_nsys() -> str:
    """The ``nsys`` on ``PATH``, or where NVIDIA installs it, or the collector of Nsight Compute."""
    for candidate in _candidates():
        if program := shutil.which(candidate):
            return program
    raise NsysNotFound("Nsight Systems (nsys) was not found")


def _candidates() -> Iterator[str]:
    yield "nsys"
    for pattern in INSTALLED:
        yield from sorted(map(str, Path("/").glob(pattern[1:])), reverse=True)
    if ncu := shutil.which("ncu"):
        yield from map(str, Path(ncu).resolve().parent.glob("host/target-linux-*/nsys"))


def imported(nsys: str, raw: Path, *, timeout: float) -> Path:
    """The report made of what a collector without importer left."""
    hosts = Path(nsys).resolve().parents[1]  # the importer's folder is beside the collector's
    importer = min(hosts.glob("*/QdstrmImporter"), default=None)
    if importer is None:
        raise ImporterMissing(f"{nsys} left {raw}, and there is no QdstrmImporter beside it")
    report = raw.with_suffix(REPORT)
    command = [str(importer), "--force-overwrite", "--input-file", str(raw)]
    if why := _failure([*command, "--output-file", str(report)], report, timeout):
        raise ImporterMissing(f"{importer} made no report of {raw} ({why})")
    raw.unlink()  # ten times the report's size
    return report


def exported(nsys: str, report: Path, target: Path, *, timeout: float) -> Path:
    """A report as a SQLite file."""
    target.unlink(missing_ok=True)
    command = [nsys, "export", "--type", "sqlite", "--force-overwrite", "true", "--quiet", "true"]
    if why := _failure([*command, "--output", str(target), str(report)], target, timeout):
        version = version_of(nsys)
        raise ExportFailed(f"nsys {version} made no SQLite file of {report} ({why})")
    return target


def _failure(command: Sequence[str], target: Path, timeout: float) -> str:
    """Why a program did not make a file, by its last line; nothing if it did."""
    code, output = run(command, timeout=timeout)
    if not code and target.exists():
        return ""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {code}"
