"""Which kernels move the bytes, and how near they come to the hardware's limits: tables."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from dpbench.errors import ConfigurationError
from dpbench.results.cards import Roofs, find_card
from dpbench.results.kernel_names import matched_category, short_name
from dpbench.results.kernels import KernelCount
from dpbench.results.rows import STEP, Measurement
from dpbench.results.speed_of_light import KernelSpeed
from dpbench.show.layout import ABSENT, Table, gigabytes
from dpbench.show.view import TOP

if TYPE_CHECKING:
    from dpbench.results.outcome import Outcome

NAME_WIDTH = 24
"""Of the column of kernels: with it a table fits 80 columns."""

DRAM = ("dram_read_bytes", "dram_write_bytes")
"""The metrics of ranges that kernels' DRAM bytes are a share of."""

SUMS = ("launches", "read_bytes", "write_bytes", "l2_bytes", "seconds")


@dataclass(frozen=True)
class Premise:
    """What kernels are compared with.

    Args:
        title: which case, and where it was measured.
        step_bytes: DRAM bytes of a whole step, by its ranges; None if they were not measured.
        roofs: of the card; None if they are not known.
    """

    title: str
    step_bytes: float | None = None
    roofs: Roofs | None = None

    @property
    def bandwidth(self) -> float | None:
        """Of the card's memory, B/s."""
        return self.roofs.bandwidth if self.roofs else None


def kernel_frame(counts: Iterable[KernelCount]) -> pd.DataFrame:
    """One row per `KernelCount`, with its short name (``kernel``), category and DRAM bytes."""
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
    table = frame.groupby(list(by), dropna=False)[[*SUMS, "dram_bytes"]].sum() / steps
    whole = step_bytes if step_bytes is not None else table.dram_bytes.sum()
    table["share"] = table.dram_bytes / whole if whole else float("nan")
    table["ceiling"] = table.dram_bytes / table.seconds / (bandwidth or float("nan"))
    return table.sort_values("dram_bytes", ascending=False, kind="stable")


def case_kernel_tables(outcome: Outcome, top: int = TOP) -> list[Table]:
    """The tables of what a case's kernels did; none if it was not profiled kernel by kernel."""
    device = next((row.device for row in outcome.rows if row.instrument.startswith("ncu")), "")
    title = f"{outcome.case.id}, {device}" if device else outcome.case.id
    measured = [row for row in outcome.rows if row.instrument == "ncu"]
    premise = Premise(title, step_bytes(measured), known_roofs(device))
    return [
        *kernel_tables(outcome.kernels, premise, top=top),
        *speed_table(outcome.speed_of_light, title),
    ]


def step_bytes(rows: Iterable[Measurement]) -> float | None:
    """DRAM bytes of a step, from rows of ranges; None if reads or writes were not counted."""
    steps = [row for row in rows if row.phase == STEP and row.metric in DRAM]
    if {row.metric for row in steps} != set(DRAM):
        return None
    return sum(row.value for row in steps) / len({row.repeat for row in steps})


def known_roofs(device: str) -> Roofs | None:
    """The roofs of a card by its name in measured rows, if dpbench has them."""
    try:
        return find_card(device).roofs()
    except ConfigurationError:
        return None


def kernel_tables(
    counts: Sequence[KernelCount], premise: Premise, *, top: int = TOP
) -> list[Table]:
    """The kernels of a case for a terminal: the top ones by bytes, categories, operators."""
    frame = kernel_frame(counts)
    if frame.empty:
        return []
    found = [_table(frame, ["kernel", "phase"], premise, top), _table(frame, ["category"], premise)]
    if frame.operator.notna().any():
        found.append(_table(frame, ["operator", "phase"], premise, top))
    return [*found[:-1], _with_notes(found[-1], tuple(_notes(frame, premise)))]


def _with_notes(table: Table, notes: tuple[str, ...]) -> Table:
    return Table(table.title, table.headers, table.cells, notes)


def _table(frame: pd.DataFrame, by: list[str], premise: Premise, top: int | None = None) -> Table:
    table = kernel_table(
        frame, by, step_bytes=premise.step_bytes, bandwidth=premise.bandwidth
    ).reset_index()
    shown = table if top is None else table.head(top)
    cells = [
        [
            wrapped(str(row[by[0]]) if pd.notna(row[by[0]]) else "unknown"),
            *(str(row[column]) for column in by[1:]),
            f"{row['launches']:.0f}",
            gigabytes(row["dram_bytes"]),
            f"{row['seconds'] * 1e3:.2f}",
            f"{row['share']:.1%}" if pd.notna(row["share"]) else ABSENT,
            f"{row['ceiling']:.0%}" if pd.notna(row["ceiling"]) else ABSENT,
        ]
        for row in shown.to_dict("records")
    ]
    count = f" (top {len(shown)} of {len(table)})" if len(shown) < len(table) else ""
    headers = [*by, "count", "DRAM\nGB", "ms", "share", "of\npeak"]
    return Table(f"{premise.title}: bytes by {by[0]}{count}", headers, cells)


def wrapped(name: str) -> str:
    """A kernel's name in lines that fit its column, broken before ``<`` and after ``_``."""
    lines = [""]
    for piece in re.findall(r"<?[^_<]*_*", name):
        for part in textwrap.wrap(piece, NAME_WIDTH):
            if len(lines[-1] + part) > NAME_WIDTH or (part[0] == "<" and len(name) > NAME_WIDTH):
                lines.append("")
            lines[-1] += part
    return "\n".join(filter(None, lines))


def _notes(frame: pd.DataFrame, premise: Premise) -> Iterator[str]:
    """What a reader must know to read the numbers right."""
    steps = max(frame.repeat.nunique(), 1)
    total = frame.dram_bytes.sum() / steps
    if premise.step_bytes:
        yield (
            f"Share of the step's {gigabytes(premise.step_bytes)} GB by its ranges; all kernels "
            f"profiled move {total / premise.step_bytes:.1%} of it. Copies and memsets are no "
            f"kernels."
        )
    else:
        yield (
            f"Share of the {gigabytes(total)} GB of all kernels profiled; the step itself was not "
            f"measured. Copies and memsets are no kernels."
        )
    yield "ms: the kernels' own time under the profiler, without the gaps between them."
    if premise.roofs:
        yield (
            f"Of peak: DRAM bytes ÷ that time, of the {premise.roofs.bandwidth / 1e9:.4g} GB/s of "
            f"{premise.roofs.name} ({premise.roofs.premise})."
        )
    if strangers := unmatched(frame.name):
        yield f"No category fits: {', '.join(strangers)}."


def unmatched(names: Iterable[str]) -> list[str]:
    """The short names of kernels that no category's pattern fits."""
    return sorted({short_name(name) for name in names if matched_category(name) is None})


def speed_table(speeds: Iterable[KernelSpeed], title: str) -> list[Table]:
    """A table of launches, the slowest first; none if there are none."""
    cells = [
        [
            wrapped(short_name(speed.name)),
            f"{speed.seconds * 1e6:.0f}",
            *(f"{part:.0f}" for part in (speed.sm, speed.memory, speed.dram, speed.l2_hit)),
            f"{speed.occupancy:.0f}/{speed.occupancy_limit:.0f}",
            (speed.stall or ABSENT).replace("_", "_\n"),
        ]
        for speed in sorted(speeds, key=lambda speed: -speed.seconds)
    ]
    if not cells:
        return []
    note = (
        "In % of the hardware's peak; occ.: occupancy achieved / that the launch allows. Each "
        "kernel ran once a pass, its caches warm from the pass before."
    )
    headers = ["kernel", "µs", "SM", "mem", "DRAM", "L2\nhit", "occ.", "top stall"]
    return [Table(f"{title}: Speed of Light", headers, cells, (note,))]
