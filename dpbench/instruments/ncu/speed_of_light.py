"""Many metrics of few kernels: the data of Nsight Compute's pages, and a table of the main ones.

A third profiled process. Which kernels it profiles follows from the bytes that
`dpbench.instruments.ncu.instrument` has counted: those that move most, each once for every shape in
which it is launched.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from dpbench.case import Case
from dpbench.instruments.base import Running
from dpbench.instruments.child import Child
from dpbench.instruments.ncu.instrument import OfKernels
from dpbench.instruments.ncu.kernel_report import (
    GRID,
    TIME,
    check_complete,
    full_name,
    phase_of,
    read_kernels,
)
from dpbench.instruments.ncu.program import find_ncu
from dpbench.instruments.ncu.range_report import (
    KERNELS,
    SPEED_OF_LIGHT,
    counter,
    label,
    load_actions,
    report_path,
)
from dpbench.results.kernels import KernelSpeed, fold
from dpbench.results.rows import Measurement
from dpbench.settings import Settings

METRICS = {
    "sm": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "memory": "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
    "dram": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_hit": "lts__t_sector_hit_rate.pct",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "occupancy_limit": "sm__maximum_warps_per_active_cycle_pct",
}
"""The metric behind each percentage of a `KernelSpeed`; asked for beside any set or section."""

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


@dataclass(frozen=True)
class SpeedOfLight(OfKernels):
    """Reads many metrics of the kernels that move most, by the report of `NcuKernels`."""

    name: ClassVar[str] = "speed_of_light"
    folder: ClassVar[str] = SPEED_OF_LIGHT

    set: str | None = "detailed"  # one of NCU_SETS, or None for the sections alone
    sections: tuple[str, ...] = ()  # further ones of ncu --list-sections
    kernels: int = Settings.ncu_set_kernels  # how many, by DRAM bytes

    @classmethod
    def from_settings(cls, settings: Settings) -> SpeedOfLight:
        return cls(
            settings.ncu_dir,
            find_ncu(settings.ncu_path),
            timeout=settings.timeout,
            phases=settings.phases,
            set=settings.ncu_set,
            sections=settings.ncu_sections,
            kernels=settings.ncu_set_kernels,
        )

    def command(self, case: Case, names: Iterable[str]) -> list[str]:
        """The whole argument list for one case and the demangled names of kernels."""
        collect = [
            *(("--set", self.set) if self.set else ()),
            *(text for section in self.sections for text in ("--section", section)),
            *("--metrics", ",".join([*METRICS.values(), TIME])),
            *("--kernel-name-base", "demangled"),
            *("--kernel-name", name_filter(names)),
            *("--filter-mode", "per-launch-config"),
            *("--launch-count", "1"),  # of each launch configuration
        ]
        return self.command_under_ncu(case, collect, self.filters)

    def chosen(self, case: Case) -> list[str]:
        """The kernels that move most bytes in the case's report; none if the phases launch none."""
        if self.nothing_to_profile(case):
            return []
        launches = read_kernels(self.directory / report_path(case, KERNELS)).launches
        names = dict.fromkeys(count.name for count in fold(launches))
        return list(names)[: self.kernels]

    def start(self, case: Case) -> Waiting:
        """See `Instrument.start`; the process itself starts when its turn comes."""
        self.report(case).unlink(missing_ok=True)
        return Waiting(self, case)

    def read(self, process: Child) -> list[Measurement]:
        """See `NcuInstrument.read`: no row, for what it finds is in ``speed_of_light``."""
        self.watched(process, f"{process.case.id}: Speed of Light", None)
        process.speed_of_light = read_speeds(self.report(process.case))
        return []


class Waiting(Running):
    """A measurement that starts its process when it is asked for its rows."""

    _child: Child | None = None

    def __init__(self, instrument: SpeedOfLight, case: Case) -> None:
        self.instrument, self.case = instrument, case

    def rows(self) -> list[Measurement]:
        if names := self.instrument.chosen(self.case):
            command = self.instrument.command(self.case, names)
            self._child = self.instrument.launch(self.case, command)
            self._child.rows()
            self.speed_of_light = self._child.speed_of_light
        return []

    def cancel(self) -> None:
        if self._child:
            self._child.cancel()


def read_speeds(path: Path) -> tuple[KernelSpeed, ...]:
    """The kernels of a report that holds `METRICS`, in the order of the run."""
    check_complete(path)
    speeds = []
    for action in load_actions(path):
        names = (*METRICS.values(), TIME, *GRID)
        value = {name: float(counter(action, name, path).value()) for name in names}
        x, y, z = (int(value[name]) for name in GRID)
        percents = {field: value[metric] for field, metric in METRICS.items()}
        phase, stall = phase_of(label(action))[1], top_stall(action)
        speed = KernelSpeed(
            phase, full_name(action), (x, y, z), value[TIME] * 1e-9, stall=stall, **percents
        )
        speeds.append(speed)
    return tuple(speeds)


def top_stall(action: Any) -> str | None:
    """What an action's warps waited for most; counted if it was, otherwise sampled."""
    reasons: dict[str, dict[str, float]] = {"counted": {}, "sampled": {}}
    for name in action.metric_names():
        match = STALL.fullmatch(name)
        if match and not match["rest"]:
            how = "counted" if match["counted"] else "sampled"
            reasons[how][match[how]] = float(action.metric_by_name(name).value())
    found = reasons["counted"] or reasons["sampled"]
    found.pop("selected", None)  # that warp was not waiting
    most = max(found, key=lambda reason: found[reason], default=None)
    return most if most and found[most] else None
