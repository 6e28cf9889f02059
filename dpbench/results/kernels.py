"""Bytes by kernel: one `KernelLaunch` per launch, folded to one `KernelCount` per kernel.

Counted in kernel replay, which sees kernels alone: copies and memsets are not in these numbers.
The rows made of them have metrics of their own, so that they never mix with those of ranges.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dpbench.case import Case
from dpbench.metrics import METRICS, unit
from dpbench.results.kernel_names import category, short_name
from dpbench.results.rows import STEP, Measurement

OperatorOf = Mapping[tuple[int, str, int], str]
"""The operator that launched a kernel, by the launch's repeat, phase and ordinal."""


@dataclass(frozen=True)
class KernelLaunch:
    """One launch of one kernel.

    Args:
        repeat: which of the active steps, from 0.
        phase: the phase in which it was launched.
        ordinal: its place among the kernel launches of that phase of that step, from 0; copies
            and memsets are not counted.
        name: the whole demangled name, template arguments and parameters included.
        grid: thread blocks in x, y and z.
        read_bytes: read from DRAM, B.
        write_bytes: written to DRAM, B.
        l2_bytes: all traffic of the L2 cache's slices, B.
        seconds: from its start on the GPU to its end.
    """

    repeat: int
    phase: str
    ordinal: int
    name: str
    grid: tuple[int, int, int]
    read_bytes: float
    write_bytes: float
    l2_bytes: float
    seconds: float


ADDED_UP = ("read_bytes", "write_bytes", "l2_bytes", "seconds")
"""What adds up over launches."""


@dataclass(frozen=True)
class KernelCount:
    """All launches of one kernel in one phase of one step, added up.

    Args:
        repeat: which of the active steps, from 0.
        phase: the phase in which they were launched.
        name: the whole demangled name.
        operator: which operator launched them, e.g. ``aten::clone``; None if it is not known.
        launches: how many there were.
        read_bytes, write_bytes, l2_bytes, seconds: sums of those of `KernelLaunch`.
    """

    repeat: int
    phase: str
    name: str
    operator: str | None
    launches: int
    read_bytes: float
    write_bytes: float
    l2_bytes: float
    seconds: float

    @property
    def kernel(self) -> str:
        """The kernel's short name; see `short_name`."""
        return short_name(self.name)

    @property
    def category(self) -> str:
        """What kind of kernel it is; see `category`."""
        return category(self.name)

    @property
    def dram_bytes(self) -> float:
        """Bytes read from and written to DRAM."""
        return self.read_bytes + self.write_bytes

    def as_row(self) -> dict[str, Any]:
        """Plain JSON types, short name and category included."""
        return {**asdict(self), "kernel": self.kernel, "category": self.category}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> KernelCount:
        """The inverse of `as_row`; what else is in the row is left alone."""
        return cls(**{name: row[name] for name in cls.__dataclass_fields__})


def fold(
    launches: Iterable[KernelLaunch], operators: OperatorOf | None = None
) -> tuple[KernelCount, ...]:
    """Launches added up by step, phase, kernel and operator, most DRAM bytes first.

    Args:
        launches: of one or more steps.
        operators: which operator launched what, as far as it is known.
    """
    known = operators or {}
    groups: dict[tuple[int, str, str, str | None], list[KernelLaunch]] = defaultdict(list)
    for launch in launches:
        operator = known.get((launch.repeat, launch.phase, launch.ordinal))
        groups[launch.repeat, launch.phase, launch.name, operator].append(launch)
    counts = [
        KernelCount(
            *key,
            launches=len(group),
            **{name: sum(getattr(launch, name) for launch in group) for name in ADDED_UP},
        )
        for key, group in groups.items()
    ]
    return tuple(sorted(counts, key=lambda count: -count.dram_bytes))


def kernel_rows(
    case: Case,
    counts: Iterable[KernelCount],
    *,
    instrument: str,
    device: str,
    tool: str,
    whole: bool = True,
) -> list[Measurement]:
    """What the kernels of a case add up to, by phase and, if all were profiled, for the step."""
    sums: dict[tuple[int, str, str], float] = defaultdict(float)
    for count in counts:
        for phase in (count.phase, STEP) if whole else (count.phase,):
            for metric in METRICS.had_by("ncu_kernels"):
                sums[count.repeat, phase, metric.name] += getattr(count, metric.source)
    return [
        Measurement(
            case=case,
            instrument=instrument,
            phase=phase,
            metric=metric,
            value=value,
            unit=unit(metric),
            repeat=repeat,
            device=device,
            tool=tool,
        )
        for (repeat, phase, metric), value in sums.items()
    ]
