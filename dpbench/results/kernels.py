"""What each kernel moved, and how near it comes to the hardware's limits.

Bytes are counted in kernel replay, which sees kernels alone: copies and memsets are not in these
numbers. The rows made of them have metrics of their own, so that they never mix with those of
ranges.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dpbench.case import Case
from dpbench.metrics import METRICS, unit
from dpbench.results.kernel_names import category, short_name
from dpbench.results.rows import STEP, Measurement

if TYPE_CHECKING:
    import pandas as pd

ADDED_UP = ("read_bytes", "write_bytes", "l2_bytes", "seconds")
"""What adds up over launches."""


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


@dataclass(frozen=True)
class KernelCount:
    """All launches of one kernel in one phase of one step, added up.

    The fields are sums of those of `KernelLaunch`; ``operator`` is which operator launched them,
    e.g. ``aten::clone``, or None if it is not known.
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
        """The kernel's short name."""
        return short_name(self.name)

    @property
    def dram_bytes(self) -> float:
        """Bytes read from and written to DRAM."""
        return self.read_bytes + self.write_bytes

    def as_row(self) -> dict[str, Any]:
        """Plain JSON types, short name and category included."""
        return {**asdict(self), "kernel": self.kernel, "category": category(self.name)}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> KernelCount:
        """The inverse of `as_row`; what else is in the row is left alone."""
        return cls(**{name: row[name] for name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class KernelSpeed:
    """One launch of a kernel against the card's limits: Nsight Compute's Speed of Light.

    Args:
        phase: the phase in which it was launched.
        name: the whole demangled name.
        grid: thread blocks in x, y and z.
        seconds: from its start on the GPU to its end.
        sm: of the peak throughput of the streaming multiprocessors, the busiest unit's, %.
        memory: of the peak throughput of the memory system, the busiest part's, %.
        dram: of the peak throughput of DRAM, %.
        l2_hit: of the sectors asked of the L2 cache, those that were there, %.
        occupancy: warps that were active, of those that a multiprocessor can hold, %.
        occupancy_limit: warps that the launch allows to be active, of the same, %.
        stall: what warps waited for most often, in Nsight Compute's words; None if they were
            not sampled.
    """

    phase: str
    name: str
    grid: tuple[int, int, int]
    seconds: float
    sm: float
    memory: float
    dram: float
    l2_hit: float
    occupancy: float
    occupancy_limit: float
    stall: str | None

    def as_row(self) -> dict[str, Any]:
        """Plain JSON types, the short name included."""
        return {**asdict(self), "grid": list(self.grid), "kernel": short_name(self.name)}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> KernelSpeed:
        """The inverse of `as_row`; what else is in the row is left alone."""
        values = {name: row[name] for name in cls.__dataclass_fields__}
        return cls(**{**values, "grid": tuple(values["grid"])})


def fold(
    launches: Iterable[KernelLaunch], operators: Mapping[tuple[int, str, int], str] | None = None
) -> tuple[KernelCount, ...]:
    """Launches added up by step, phase, kernel and operator, most DRAM bytes first.

    Args:
        launches: of one or more steps.
        operators: which operator launched what, by the launch's repeat, phase and ordinal, as far
            as it is known.
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
        Measurement(case, instrument, phase, metric, value, unit(metric), repeat, device, tool)
        for (repeat, phase, metric), value in sums.items()
    ]


def kernel_frame(counts: Iterable[KernelCount]) -> pd.DataFrame:
    """One row per `KernelCount`, with its short name (``kernel``), category and DRAM bytes."""
    import pandas as pd  # not in processes that only count

    rows = [{**count.as_row(), "dram_bytes": count.dram_bytes} for count in counts]
    columns = [*KernelCount.__dataclass_fields__, "kernel", "category", "dram_bytes"]
    return pd.DataFrame(rows, columns=columns)


def kernel_table(
    frame: pd.DataFrame,
    by: Sequence[str] = ("phase", "kernel"),
    *,
    step_bytes: float | None = None,
    bandwidth: float | None = None,
) -> pd.DataFrame:
    """What groups of kernels move in one step, most DRAM bytes first.

    Args:
        frame: of `kernel_frame`.
        by: columns that make a group, e.g. ``["category"]``.
        step_bytes: the bytes that count as the whole; those of all kernels if None.
        bandwidth: of the card's memory, B/s.

    Returns:
        Indexed by group: sums per step of `KernelCount`'s numbers, ``dram_bytes``, ``share`` of
        the whole, and ``ceiling``, the fraction of ``bandwidth`` that the bytes ÷ the kernels'
        own time reach (NaN without a bandwidth).
    """
    steps = max(frame.repeat.nunique(), 1)
    sums = ["launches", *ADDED_UP, "dram_bytes"]
    table = frame.groupby(list(by), dropna=False)[sums].sum() / steps
    whole = step_bytes if step_bytes is not None else table.dram_bytes.sum()
    table["share"] = table.dram_bytes / whole if whole else float("nan")
    table["ceiling"] = table.dram_bytes / table.seconds / (bandwidth or float("nan"))
    return table.sort_values("dram_bytes", ascending=False, kind="stable")


def dram_bytes_of_step(rows: Iterable[Measurement]) -> float | None:
    """DRAM bytes of a step, from rows of ranges; None if reads or writes were not counted."""
    metrics = {"dram_read_bytes", "dram_write_bytes"}
    steps = [row for row in rows if row.phase == STEP and row.metric in metrics]
    if {row.metric for row in steps} != metrics:
        return None
    return sum(row.value for row in steps) / len({row.repeat for row in steps})
