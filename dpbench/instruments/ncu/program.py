"""Nsight Compute's program: where it is, and what its messages mean."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from dpbench.case import Case
from dpbench.instruments.case_process import log_lines
from dpbench.instruments.counters.errors import (
    CountersBusy,
    CountersForbidden,
    CounterUnknown,
    ProfilerNotLoaded,
)
from dpbench.instruments.interface import InstrumentError
from dpbench.instruments.ncu.report import NothingProfiled


class NcuNotFound(InstrumentError):
    """There is no Nsight Compute here."""

    remedy = "install Nsight Compute (it comes with the CUDA toolkit), or name it with --ncu-path"


_MESSAGES: tuple[tuple[str, type[InstrumentError]], ...] = (
    (r"ERR_NVGPUCTRPERM", CountersForbidden),
    (r"driver resource was unavailable", CountersBusy),
    (r"LibraryNotLoaded", ProfilerNotLoaded),
    (r"Failed to find metric", CounterUnknown),
    (r"No (ranges|kernels) were profiled", NothingProfiled),
)
"""What ncu says, and the error that it means. The first that occurs counts: "no ranges were
profiled" is also what ncu says after any other failure, so it comes last."""


def diagnose(case: Case, log: Path) -> InstrumentError | None:
    """The error that ncu's own lines in a log describe, if they describe one."""
    said = [line for line in log_lines(log) if line.startswith("==")] if log.exists() else []
    for pattern, error in _MESSAGES:
        for line in said:
            if re.search(pattern, line):
                return error(f"{case.id}: ncu says {line.split('==', 2)[2].strip()!r}", log=log)
    return None


def find_ncu(path: str | None = None) -> str:
    """The ``ncu`` to use: the one named, or on ``PATH``, or where NVIDIA installs it."""
    installed = sorted(Path("/opt/nvidia/nsight-compute").glob("*/ncu"), reverse=True)
    usual = ["ncu", "/usr/local/cuda/bin/ncu", *map(str, installed)]
    program = next(filter(None, map(shutil.which, usual if path is None else [path])), None)
    if program is None:
        missing = "Nsight Compute (ncu) was not found" if path is None else f"no program {path!r}"
        raise NcuNotFound(missing)
    return program
