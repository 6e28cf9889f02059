"""What a person wants to see of a run: which columns, in which order, in which tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from dpbench.case import AXES
from dpbench.errors import ConfigurationError, unknown

Kind = Literal["value", "ratio", "spread", "over_logical"]

_HEADERS = {
    "dram_read_bytes": "DRAM\nread",
    "dram_write_bytes": "DRAM\nwrite",
    "dram_bytes": "DRAM\ntotal",
    "l2_read_bytes": "L2\nread",
    "l2_write_bytes": "L2\nwrite",
    "l2_atomic_bytes": "L2\natomic",
    "l2_total_bytes": "L2\ntotal",
    "global_load_bytes": "global\nload",
    "global_store_bytes": "global\nstore",
    "logical_read_bytes": "logical\nread",
    "logical_write_bytes": "logical\nwrite",
    "logical_bytes": "logical\ntotal",
    "peak_memory_bytes": "peak\nmem.",
    "flops": "GFLOP",
    "step_time_seconds": "step\nms",
    "samples_per_second": "samples\nper s",
}
"""Metrics of a summary and what heads their column; bytes are shown in GB."""

RATE_HEADERS = {
    name.replace("_bytes", "_throughput"): header
    for name, header in _HEADERS.items()
    if name.startswith(("dram", "l2", "global")) and name != "l2_atomic_bytes"
}
"""Throughputs, under the headers of the bytes that they are made of."""

SPREAD_OF = ("dram_bytes", "l2_total_bytes", "step_time_seconds")
"""Metrics whose spread over the steps says how far a row can be trusted."""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Args:
        name: as it is written on a command line.
        header: what stands above it, on one or two lines.
        metrics: the metric of the rows it shows; of several, the largest number counts.
        kind: which number of these rows: the value itself, its ratio to standard training, its
            spread over the active steps, or measured ÷ logical.
    """

    name: str
    header: str
    metrics: tuple[str, ...]
    kind: Kind = "value"

    @property
    def smaller_is_better(self) -> bool:
        """False for rates; what is moved, held or waited for should shrink."""
        return not self.metrics[0].endswith(("_per_second", "_throughput"))


def _stem(metric: str) -> str:
    """The metric without its unit, as ratios name it: ``dram`` for ``dram_bytes``."""
    if metric == "l2_total_bytes":
        return "l2"
    for unit in ("_bytes", "_seconds", "_per_second"):
        metric = metric.removesuffix(unit)
    return metric


def _columns() -> Iterator[Column]:
    for metric, header in _HEADERS.items():
        yield Column(metric, header, (metric,))
    for metric, header in RATE_HEADERS.items():
        yield Column(metric, f"{header.replace(chr(10), ' ')}\nGB/s", (metric,))
    for metric, header in _HEADERS.items():
        short = header.replace("\n", " ").removesuffix(" total").removesuffix(" ms")
        stem = _stem(metric)
        yield Column(f"{stem}_ratio", f"{short}\n÷ std", (metric,), "ratio")
        yield Column(f"{stem}_spread", f"{short}\nspread", (metric,), "spread")
        if metric.startswith(("dram", "peak")):
            yield Column(f"{stem}_over_logical", f"{short}\n÷ logical", (metric,), "over_logical")
    yield Column("l2_bytes", "L2\ntotal", ("l2_total_bytes",))
    yield Column("spread", "largest\nspread", SPREAD_OF, "spread")


COLUMNS = {column.name: column for column in _columns()}
"""Every column by name. Counters that were asked for by ncu's own names are columns too."""

MEASURED = (
    *("dram_read_bytes", "dram_write_bytes", "dram_bytes", "dram_ratio"),
    *("l2_total_bytes", "l2_ratio", "peak_memory_bytes", "step_time_seconds"),
)
"""What is shown of hardware counters and times unless columns are chosen."""

COUNTED = (
    *("logical_read_bytes", "logical_write_bytes", "logical_bytes", "logical_ratio"),
    "peak_memory_bytes",
)
"""What is shown of logical counting unless columns are chosen."""

TOP = 10
"""How many kernels a table shows unless told otherwise."""

GROUPS = ("cell", "device", "phase", *AXES)
"""What can share a table: the cases with one baseline (``cell``), or with one value of an axis."""

COLUMNS_HELP = (
    "columns to show, separated by commas: metrics (dram_bytes, step_time_seconds, …), their "
    "ratio to standard, spread over the steps, or measured over logical (dram_ratio, "
    "dram_spread, dram_over_logical, …), ncu counters"
)
SORT_HELP = "sort each table by a column, or by an axis of the case; ascending"
GROUP_BY_HELP = f"what shares a table, separated by commas: {', '.join(GROUPS)} (default cell)"


def column(name: str) -> Column:
    """The column with a name.

    Raises:
        ConfigurationError: there is none; the message lists those that exist.
    """
    if name in COLUMNS:
        return COLUMNS[name]
    if "__" in name:  # a counter, by ncu's own name
        return Column(name, name, (name,))
    values = [known.name for known in COLUMNS.values() if known.kind == "value"]
    hint = "also dram_ratio, dram_spread, dram_over_logical and so on, spread, or an ncu counter"
    raise unknown("column", name, values, hint)


@dataclass(frozen=True)
class View:
    """Columns, order and grouping of the tables by case.

    Args:
        columns: what to show; empty for `MEASURED` or `COUNTED`, and every table that goes
            with them.
        sort: a column's name or an axis; None for the order of the trainers.
        group_by: some of `GROUPS`. Rows of different devices never share a table.
        top: how many kernels a table of kernels shows.
    """

    columns: tuple[Column, ...] = ()
    sort: str | None = None
    group_by: tuple[str, ...] = ("cell",)
    top: int = TOP

    @classmethod
    def of(
        cls,
        columns: str | None = None,
        sort: str | None = None,
        group_by: str | None = None,
        top: int = TOP,
    ) -> View:
        """A view from what was said on a command line: names separated by commas.

        Raises:
            ConfigurationError: a name does not exist, or a table would show nothing.
        """
        check_top(top)
        labels = _names(group_by) or ("cell",)
        for label in labels:
            if label not in GROUPS:
                raise unknown("group", label, GROUPS)
        if sort is not None and sort not in AXES:
            column(sort)
        return cls(tuple(map(column, _names(columns))), sort, labels, top)


def check_top(top: int) -> None:
    """Refuse to show fewer kernels than one.

    Raises:
        ConfigurationError: that was asked for.
    """
    if top < 1:
        raise ConfigurationError(f"a table shows 1 kernel or more, not {top}")


def _names(listed: str | None) -> tuple[str, ...]:
    """The names in a list with commas, each once."""
    names = (name.strip() for name in (listed or "").split(","))
    return tuple(dict.fromkeys(name for name in names if name))
