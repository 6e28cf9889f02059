"""Reading kernel-replay reports, one action a kernel launch; needs neither a GPU nor ncu.

NVIDIA's library takes 0.4 ms a kernel and never gives back the 0.35 MB that it then holds. So
large reports are read in parts, by processes that end.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from dpbench.case import ALL_PHASES, OUTSIDE
from dpbench.errors import ConfigurationError
from dpbench.instruments.child import log_lines
from dpbench.instruments.ncu.metrics import having, on_chip
from dpbench.instruments.ncu.range_report import (
    DEVICE,
    ForeignReport,
    MetricMissing,
    NothingProfiled,
    ReportUnreadable,
    count_actions,
    is_kernel,
    label,
    load_actions,
)
from dpbench.metrics import Metric
from dpbench.results.kernels import KernelCount

COUNTED = ("dram_read_bytes", "dram_write_bytes", "l2_total_bytes")
"""The metrics of ranges whose counters are behind the bytes of a `KernelCount`."""

TIME = "gpu__time_duration.sum"  # how long an action took, ns

PROFILING = '==PROF== Profiling "'
"""What ncu prints at each kernel, before its name and how far it has come."""

PART = 700
"""How many kernels are worth a process of their own, which takes 0.2 s to start."""


def kernel_metrics(chip: str = "") -> tuple[Metric, ...]:
    """What is counted of each kernel on a chip; on GH100 in one pass, so nothing is run again."""
    there = on_chip(chip)
    if lacking := [metric for metric in COUNTED if metric not in there]:
        raise ConfigurationError(
            f"{chip} has no counters for {', '.join(lacking)} of kernels; measure without --kernels"
        )
    return (*(there[metric] for metric in COUNTED), Metric(TIME, counters=(TIME,)))


@dataclass(frozen=True)
class KernelReport:
    """The name of a GPU, and what it launched in the order of the run."""

    device: str
    launches: tuple[KernelCount, ...]


def read_kernels(path: Path) -> KernelReport:
    """A report of kernels, one launch after the other.

    A kernel outside every phase, in a report of whatever program, counts as `OUTSIDE`.
    """
    parts = min(-(-check_complete(path) // PART), os.cpu_count() or 1)
    if parts == 1:
        read = [read_part(path)]
    else:
        try:
            with ProcessPoolExecutor(parts, get_context("spawn")) as pool:
                read = list(pool.map(read_part, [path] * parts, range(parts), [parts] * parts))
        except BrokenProcessPool as error:
            raise ReportUnreadable(f"{path}: not a readable report ({error})") from error
    return KernelReport(read[0].device, tuple(chain.from_iterable(part.launches for part in read)))


def read_part(path: Path, part: int = 0, parts: int = 1) -> KernelReport:
    """One of so many parts of a report."""
    return kernels_of(load_actions(path, part, parts), path, first=part == 0)


def check_complete(path: Path) -> int:
    """How many kernels a report holds: as many as ncu's log beside it tells of, if that is there.

    The library reads a truncated file as a report with fewer kernels, without an error.
    """
    total = count_actions(path)
    if not total:
        raise NothingProfiled(f"{path}: the report holds no kernel")
    log = path.with_suffix(".log")
    if log.exists():
        told = sum(line.count(PROFILING) for line in log_lines(log))
        if told != total:
            raise ReportUnreadable(
                f"{path}: the report of kernels is incomplete, it holds {total} of {told}"
            )
    return total


def kernels_of(actions: Sequence[Any], path: Path, *, first: bool = True) -> KernelReport:
    """The launches behind actions of a report, ``first`` if it begins with them."""
    spelled = on_chip() | having(lambda names: all(map(actions[0].metric_by_name, names)))
    counters = [spelled[name].counters for name in COUNTED]
    names = [*chain.from_iterable(counters), TIME, DEVICE]
    launches: list[KernelCount] = []
    device = ""
    for action in actions:
        if not is_kernel(action):
            raise ForeignReport(f"{path}: it holds ranges, not kernels")
        metrics = {name: action.metric_by_name(name) for name in names}
        if missing := [name for name, metric in metrics.items() if metric is None]:
            if launches or not first or DEVICE in missing:  # the kernels before it have them
                raise ReportUnreadable(
                    f"{path}: the report of kernels is incomplete, it ends in a kernel"
                )
            raise MetricMissing(f"{path}: the report has no {missing[0]}")
        values = {name: metric.value() for name, metric in metrics.items()}
        device = str(values[DEVICE])
        repeat, phase = phase_of(label(action))
        read, written, l2 = (float(sum(values[name] for name in of)) for of in counters)
        moved = read, written, l2, 1e-9 * values[TIME]
        launches.append(KernelCount(repeat, phase, full_name(action), 1, *moved))
    return KernelReport(device, tuple(launches))


def full_name(action: Any) -> str:
    """The whole demangled name of an action's kernel."""
    return str(action.name(action.NameBase_DEMANGLED))


def phase_of(name: str | None) -> tuple[int, str]:
    """Step number and phase from a range's name ``STEP.PHASE``; any other is outside."""
    step, _, phase = (name or "").partition(".")
    if step.isdecimal() and phase in ALL_PHASES:
        return int(step), phase
    return 0, OUTSIDE
