"""Many metrics of few kernels: the data of Nsight Compute's pages, and a table of the main ones.

A third profiled process. Which kernels it profiles follows from the bytes that
`dpbench.instruments.ncu.kernels` has counted: those that move most, each once for every shape in
which it is launched.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from dpbench.case import Case
from dpbench.errors import ConfigurationError, unknown
from dpbench.instruments import child
from dpbench.instruments.base import Instrument, InstrumentError, Running
from dpbench.instruments.ncu.kernel_report import (
    GRID,
    check_complete,
    full_name,
    phase_of,
    read_kernels,
)
from dpbench.instruments.ncu.kernels import check_phases, no_kernel_in, phase_filters
from dpbench.instruments.ncu.progress import launch_progress
from dpbench.instruments.ncu.range_report import (
    KERNELS,
    SPEED_OF_LIGHT,
    counter,
    kernel_report_path,
    label,
    load_actions,
)
from dpbench.instruments.ncu.ranges import check_gpu_and, command_under_ncu, record_under_ncu
from dpbench.results.kernels import fold
from dpbench.results.rows import Measurement
from dpbench.results.speed_of_light import KernelSpeed

SETS = ("basic", "detailed", "full")
"""Sets of ncu's sections; ``detailed`` takes 20 passes a kernel on GH100, ``full`` 38."""

METRICS = {
    "sm": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "memory": "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
    "dram": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_hit": "lts__t_sector_hit_rate.pct",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "occupancy_limit": "sm__maximum_warps_per_active_cycle_pct",
}
"""The metric behind each percentage of a `KernelSpeed`; asked for beside any set or section."""

TIME = "gpu__time_duration.sum"

STALL = re.compile(
    r"smsp__pcsamp_warps_issue_stalled_(?P<sampled>\w+?)(?P<rest>_not_issued)?"
    r"|smsp__average_warps_issue_stalled_(?P<counted>\w+)_per_issue_active\.ratio"
)
"""Why warps waited: sampled (set ``detailed``), and counted as well (set ``full``)."""

NAME_LENGTH = 250
"""How much of a demangled name tells one kernel from the others."""


def name_filter(names: Iterable[str]) -> str:
    """The ``--kernel-name`` that fits these demangled names.

    Whatever is no letter, digit or underscore may be any character: then nothing needs escaping
    in ncu's kind of regular expression.
    """
    return f"regex:{'|'.join(re.sub(r'[^A-Za-z0-9_]', '.', name[:NAME_LENGTH]) for name in names)}"


def check_sections(name: str | None, kernels: int) -> None:
    """Find out whether this is one of `SETS`, or None, and whether any kernel is asked for.

    Raises:
        ConfigurationError: it is not.
    """
    if name is not None and name not in SETS:
        raise unknown("set of sections", name, SETS)
    if kernels < 1:
        raise ConfigurationError(f"sections need at least one kernel, not {kernels}")


@dataclass(frozen=True)
class SpeedOfLight(Instrument):
    """Re-executes a case under Nsight Compute with many metrics of the kernels that move most.

    Args:
        directory: where reports and logs go; the report of `NcuKernels` must be there.
        path: the ``ncu`` program.
        set: one of `SETS`, or None for ``sections`` alone.
        sections: further sections of ``ncu --list-sections``.
        kernels: how many kernels, by DRAM bytes.
        phases: of these phases only; of every one if there is none.
        steps: warm-up and active steps.
        timeout: seconds after which a case is ended.

    Raises:
        ConfigurationError: there is no such set or phase, or no kernel is asked for.
    """

    name: ClassVar[str] = "speed_of_light"

    directory: Path
    path: str
    set: str | None = "detailed"
    sections: tuple[str, ...] = ()
    kernels: int = 5
    phases: tuple[str, ...] = ()
    steps: child.Steps = child.Steps(warmup=1, active=1)
    timeout: float = 1800.0

    def __post_init__(self) -> None:
        check_phases(self.phases)
        check_sections(self.set, self.kernels)

    def check(self) -> None:
        """See `Instrument.check`; also that the report directory can be written."""
        check_gpu_and(self.directory)

    def command(self, case: Case, names: Iterable[str]) -> list[str]:
        """The whole argument list for one case and the demangled names of kernels."""
        return command_under_ncu(
            self.path,
            child.step_command(case, self.steps, device="cuda", nvtx=True),
            replay="kernel",
            include=phase_filters(self.phases, self.steps),
            collect=[
                *(("--set", self.set) if self.set else ()),
                *(text for section in self.sections for text in ("--section", section)),
                *("--metrics", ",".join([*METRICS.values(), TIME])),
                *("--kernel-name-base", "demangled"),
                *("--kernel-name", name_filter(names)),
                *("--filter-mode", "per-launch-config"),
                *("--launch-count", "1"),  # of each launch configuration
            ],
            export=self.report(case),
        )

    def report(self, case: Case) -> Path:
        """Where a case's report is."""
        return self.directory / kernel_report_path(case, SPEED_OF_LIGHT)

    def chosen(self, case: Case) -> list[str]:
        """The demangled names of the kernels that move most bytes, from the case's report.

        No name if the phases launch none.

        Raises:
            InstrumentError: there is no such report, or it cannot be read.
        """
        if no_kernel_in(self.phases, case, self.directory):
            return []
        launches = read_kernels(self.directory / kernel_report_path(case, KERNELS)).launches
        names = dict.fromkeys(count.name for count in fold(launches))
        return list(names)[: self.kernels]

    def start(self, case: Case) -> Waiting:
        """See `Instrument.start`; the process itself starts when its turn comes."""
        (self.report(case)).unlink(missing_ok=True)
        return Waiting(self, case)


class Waiting(Running):
    """A measurement that starts its process when it is asked for its rows."""

    def __init__(self, instrument: SpeedOfLight, case: Case) -> None:
        self.instrument, self.case = instrument, case
        self._child: child.Child | None = None

    def rows(self) -> list[Measurement]:
        """See `Running.rows`: no row, for what it finds is in ``speed_of_light``."""
        case, report = self.case, self.instrument.report(self.case)
        names = self.instrument.chosen(case)
        if not names:
            return []
        self._child = child.Child(
            self.instrument.command(case, names),
            case=case,
            log=report.with_suffix(".log"),
            timeout=self.instrument.timeout,
            read=lambda process: [],
        )
        with launch_progress(f"{case.id}: Speed of Light", None) as self._child.watch:
            record_under_ncu(self._child, report)
        try:
            self.speed_of_light = read_speeds(report)
        except InstrumentError as error:
            error.log = self._child.log
            raise
        return []

    def cancel(self) -> None:
        """See `Running.cancel`."""
        if self._child is not None:
            self._child.cancel()


def read_speeds(path: Path) -> tuple[KernelSpeed, ...]:
    """The kernels of a report that holds `METRICS`, in the order of the run.

    Raises:
        ReportUnreadable, NothingProfiled, MetricMissing: what the name says.
    """
    check_complete(path)
    return tuple(_speed(action, path) for action in load_actions(path))


def _speed(action: Any, path: Path) -> KernelSpeed:
    x, y, z = (int(counter(action, name, path).value()) for name in GRID)
    return KernelSpeed(
        phase=phase_of(label(action))[1],
        name=full_name(action),
        grid=(x, y, z),
        seconds=float(counter(action, TIME, path).value()) * 1e-9,
        stall=top_stall(action),
        **{
            field: float(counter(action, metric, path).value()) for field, metric in METRICS.items()
        },
    )


def top_stall(action: Any) -> str | None:
    """What an action's warps waited for most; counted if it was, otherwise sampled."""
    counted: dict[str, float] = {}
    sampled: dict[str, float] = {}
    for name in action.metric_names():
        match = STALL.fullmatch(name)
        if match is None or match["rest"]:
            continue
        reason = match["counted"] or match["sampled"]
        if reason != "selected":  # that warp was not waiting
            kind = counted if match["counted"] else sampled
            kind[reason] = float(action.metric_by_name(name).value())
    reasons = {reason: value for reason, value in (counted or sampled).items() if value}
    return max(reasons, key=lambda reason: reasons[reason]) if reasons else None
