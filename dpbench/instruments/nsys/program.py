"""Nsight Systems' programs: where they are, and making SQLite files of what they recorded."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from dpbench.instruments.base import InstrumentError
from dpbench.instruments.ncu.program import NcuNotFound, find_ncu
from dpbench.instruments.processes import run

REPORT, RAW, EXPORTED = ".nsys-rep", ".qdstrm", ".sqlite"
"""What a file is by its suffix: a report, what the collector wrote for the importer, an export."""

INSTALLED = (
    "/usr/local/cuda/bin/nsys",
    "/opt/nvidia/nsight-systems*/*/bin/nsys",
    "/opt/nvidia/nsight-systems*/*/target-linux-*/nsys",
    # Nsight Compute brings a collector for its own system trace.
    "/opt/nvidia/nsight-compute/*/host/target-linux-*/nsys",
    "/usr/local/cuda*/nsight-compute-*/host/target-linux-*/nsys",
)
"""Where NVIDIA installs nsys, the best place first."""

ANSWER_SECONDS = 30.0  # a program has to answer a question; it takes a second or two


class NsysNotFound(InstrumentError):
    """There is no Nsight Systems here."""

    remedy = (
        "install Nsight Systems (package nsight-systems, or nsight-systems-cli of NVIDIA) and put "
        "nsys on PATH; Nsight Compute brings one too, in host/target-linux-*"
    )


class ImporterMissing(InstrumentError):
    """A collector that cannot make a report of what it collected."""

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


def find_nsys() -> str:
    """The ``nsys`` on ``PATH``, or where NVIDIA installs it, or the collector of Nsight Compute."""
    for candidate in _candidates():
        if found := shutil.which(candidate):
            return found
    raise NsysNotFound("Nsight Systems (nsys) was not found")


def _candidates() -> Iterator[str]:
    yield "nsys"
    for pattern in INSTALLED:
        yield from sorted(map(str, Path("/").glob(pattern[1:])), reverse=True)
    try:
        yield from map(str, Path(find_ncu()).resolve().parent.glob("host/target-linux-*/nsys"))
    except NcuNotFound:
        return


@cache
def nsys_version(path: str) -> str:
    """The version that an ``nsys`` says it has, e.g. ``2025.3.1``, or ``unknown``."""
    match = re.search(r"version (\d+\.\d+\.\d+)", _run([path, "--version"], ANSWER_SECONDS)[1])
    return match[1] if match else "unknown"


def find_importer(nsys: str) -> Path | None:
    """The importer that belongs to an ``nsys``: beside the collector's folder, in the host's."""
    collector = Path(nsys).resolve()
    return next(iter(sorted(collector.parents[1].glob("*/QdstrmImporter"))), None)


def imported(nsys: str, raw: Path, *, timeout: float) -> Path:
    """The report made of what a collector without importer left."""
    importer = find_importer(nsys)
    if importer is None:
        raise ImporterMissing(f"{nsys} left {raw}, and there is no QdstrmImporter beside it")
    report = raw.with_suffix(REPORT)
    command = [str(importer), "--force-overwrite", "--input-file", str(raw)]
    code, said = _run([*command, "--output-file", str(report)], timeout)
    if code or not report.exists():
        raise ImporterMissing(f"{importer} made no report of {raw} ({said or f'exit code {code}'})")
    raw.unlink()  # ten times the report's size
    return report


def exported(nsys: str, report: Path, target: Path, *, timeout: float) -> Path:
    """A report as a SQLite file."""
    target.unlink(missing_ok=True)
    command = [nsys, "export", "--type", "sqlite", "--force-overwrite", "true", "--quiet", "true"]
    code, said = _run([*command, "--output", str(target), str(report)], timeout)
    if code or not target.exists():
        version = nsys_version(nsys)
        why = said or f"exit code {code}"
        raise ExportFailed(f"nsys {version} made no SQLite file of {report} ({why})")
    return target


def _run(command: Sequence[str], timeout: float) -> tuple[int, str]:
    """Exit code and last line of a program."""
    code, output = run(command, timeout=timeout)
    lines = [line.strip() for line in output.replace("\r", "\n").splitlines() if line.strip()]
    return code, lines[-1] if lines else ""
