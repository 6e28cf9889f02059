"""DRAM, L2 and global-memory bytes by phase, from hardware counters, through Nsight Compute.

The case runs once more under ``ncu`` in application range replay: each phase of each active
step is one range, whose counters include copies and memsets (kernel replay misses those).
Caches and clocks are left alone, because a flush before each range would change the bytes.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from dpbench.case import Case
from dpbench.errors import ConfigurationError
from dpbench.files import check_writable
from dpbench.gpu import NVTX_DOMAIN, visible_gpus
from dpbench.instruments import child
from dpbench.instruments.base import CaseFailed, Instrument, InstrumentError
from dpbench.instruments.ncu import range_report as ncu_report_file
from dpbench.instruments.ncu.metrics import NcuMetric, counters, resolve
from dpbench.instruments.ncu.range_report import NothingProfiled
from dpbench.results.rows import Measurement


class NcuNotFound(InstrumentError):
    """There is no Nsight Compute here."""

    remedy = "install Nsight Compute (it comes with the CUDA toolkit), or name it with --ncu-path"


class CountersForbidden(InstrumentError):
    """Reading the GPU's performance counters is not allowed to this user."""

    remedy = (
        "run as root or with CAP_SYS_ADMIN, or let every user read them: driver option "
        "NVreg_RestrictProfilingToAdminUsers=0 (https://developer.nvidia.com/ERR_NVGPUCTRPERM)"
    )


class CountersBusy(InstrumentError):
    """Something else holds the GPU's performance counters."""

    remedy = "end the other profiler, or pause DCGM's: dcgmi profile --pause, and --resume after"


class ProfilerNotLoaded(InstrumentError):
    """Nsight Compute could not load its library into the measured process."""

    remedy = (
        "check that Nsight Compute and the driver fit each other, and that the GPU is not "
        "virtualised in a way that hides its counters"
    )


class CounterUnknown(InstrumentError):
    """A counter does not exist on this GPU, or in this version of Nsight Compute."""

    remedy = "ncu --query-metrics lists what this GPU has; name others with --ncu-metrics"


_MESSAGES: tuple[tuple[str, type[InstrumentError]], ...] = (
    (r"ERR_NVGPUCTRPERM", CountersForbidden),
    (r"driver resource was unavailable", CountersBusy),
    (r"LibraryNotLoaded", ProfilerNotLoaded),
    (r"Failed to find metric", CounterUnknown),
    (r"No (ranges|kernels) were profiled", NothingProfiled),
)
"""What ncu says, and the error that it means."""


def diagnose(case: Case, log: Path) -> InstrumentError | None:
    """The error that ncu's own lines in a log describe, if they describe one.

    The first of `_MESSAGES` that occurs counts: "no ranges were profiled" is also what ncu says
    after any other failure, so it comes last.
    """
    said = [line for line in child.log_lines(log) if line.startswith("==")]
    for pattern, error in _MESSAGES:
        for line in said:
            if re.search(pattern, line):
                return error(f"{case.id}: ncu says {line.split('==', 2)[2].strip()!r}", log=log)
    return None


def find_ncu(path: str | None = None) -> str:
    """The ``ncu`` to use: the one named, or on ``PATH``, or where NVIDIA installs it.

    Raises:
        NcuNotFound: there is none.
    """
    if path is not None:
        found = shutil.which(path)
        if found is None:
            raise NcuNotFound(f"no program {path!r}")
        return found
    installed = sorted(Path("/opt/nvidia/nsight-compute").glob("*/ncu"), reverse=True)
    for candidate in ("ncu", "/usr/local/cuda/bin/ncu", *map(str, installed)):
        if found := shutil.which(candidate):
            return found
    raise NcuNotFound("Nsight Compute (ncu) was not found")


VERSION_SECONDS = 30.0
"""How long an ``ncu`` has to say its version; it takes under a second."""


@cache
def ncu_version(path: str) -> str:
    """The version that an ``ncu`` says it has, e.g. ``2025.3.1``, or ``unknown``."""
    try:
        process = subprocess.Popen(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # ncu is a script: its processes must end with it
        )
    except OSError:  # made for another machine, say
        return "unknown"
    with process:
        try:
            shown, _ = process.communicate(timeout=VERSION_SECONDS)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            shown = ""
    match = re.search(r"Version (\d+\.\d+\.\d+)", shown)
    return match[1] if match else "unknown"


def check_gpu_and(directory: Path) -> None:
    """Find out whether there is a GPU to profile, and a directory that can hold reports.

    Raises:
        ConfigurationError: there is not.
    """
    if not visible_gpus():
        raise ConfigurationError("no CUDA GPU is visible here (nvidia-smi lists what is)")
    check_writable(directory)


EVERY_PHASE = f"regex:{NVTX_DOMAIN}@.*"
"""The NVTX filter that lets through whatever dpbench marked."""


def command_under_ncu(
    path: str,
    application: list[str],
    *,
    replay: str,
    collect: list[str],
    export: Path,
    include: Iterable[str] = (EVERY_PHASE,),
) -> list[str]:
    """The argument list that runs ``application`` under ``ncu``, caches and clocks left alone.

    Args:
        path: the ``ncu`` program.
        application: an argument list.
        replay: ncu's replay mode.
        collect: options that say what to collect, and of which kernels.
        export: the report to write.
        include: NVTX filters; a range or kernel is profiled if one of them fits.
    """
    return [
        path,
        *("--config-file", "off"),  # a stray config.ncu-cfg would change the run
        *("--replay-mode", replay),
        *("--cache-control", "none"),
        *("--clock-control", "none"),
        *("--import-sass", "no"),  # 60 times smaller reports
        "--nvtx",
        *(text for each in include for text in ("--nvtx-include", each)),
        *collect,
        "--force-overwrite",
        *("--export", str(export)),
        *application,
    ]


def record_under_ncu(process: child.Child, report: Path) -> dict[str, Any]:
    """Wait for a process under ``ncu``; returns the record that it printed, its report written.

    Raises:
        InstrumentError: it failed, ncu did, or there is no report.
    """
    case, log = process.case, process.log
    try:
        record = process.record()
    except CaseFailed as error:
        found = diagnose(case, log)
        # A process that failed by itself leaves nothing to profile; that it failed counts.
        raise error if found is None or isinstance(found, NothingProfiled) else found from None
    if not report.exists():
        raise diagnose(case, log) or NothingProfiled(f"{case.id}: ncu left no report", log=log)
    return record


@dataclass(frozen=True)
class Ncu(Instrument):
    """Re-executes a case under Nsight Compute and reads its report.

    One active step is enough: from step to step DRAM bytes differ by less than 0.2 %, and each
    further one adds seconds and, at 400 bytes a kernel launch, megabytes to the report.

    Args:
        directory: where reports and logs go, one folder a configuration.
        path: the ``ncu`` program.
        metrics: what to measure.
        steps: warm-up and active steps.
        timeout: seconds after which a case is ended.
    """

    name: ClassVar[str] = "ncu"

    directory: Path
    path: str
    metrics: tuple[NcuMetric, ...] = field(default_factory=lambda: tuple(resolve()))
    steps: child.Steps = child.Steps(warmup=1, active=1)
    timeout: float = 1800.0

    def check(self) -> None:
        """See `Instrument.check`; also that the report directory can be written."""
        check_gpu_and(self.directory)

    def command(self, case: Case) -> list[str]:
        """The whole argument list for one case."""
        return command_under_ncu(
            self.path,
            child.step_command(case, self.steps, device="cuda", nvtx=True),
            replay="app-range",
            collect=["--metrics", ",".join(counters(self.metrics))],
            export=self.directory / case.report_path,
        )

    def start(self, case: Case) -> child.Child:
        """Start a process whose rows are each byte metric, by phase and for the whole step."""
        report = self.directory / case.report_path
        report.unlink(missing_ok=True)  # or a failed run would leave the last one's numbers
        return child.Child(
            self.command(case),
            case=case,
            log=report.with_suffix(".log"),
            timeout=self.timeout,
            read=lambda process: self._read(process, report),
        )

    def _read(self, process: child.Child, report: Path) -> list[Measurement]:
        record = record_under_ncu(process, report)
        tool = f"ncu {ncu_version(self.path)}, torch {record['torch']}"
        try:
            return ncu_report_file.read(report, process.case, self.metrics, tool=tool)
        except InstrumentError as error:
            error.log = process.log
            raise
