"""Which kernels move the bytes, and how near they come to the hardware's limits: tables."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from dpbench.results.cards import Roofs, known_roofs
from dpbench.results.kernel_names import matched_category, short_name
from dpbench.results.kernels import (
    KernelCount,
    KernelSpeed,
    dram_bytes_of_step,
    kernel_frame,
    kernel_table,
)
from dpbench.results.outcome import Outcome
from dpbench.show.layout import ABSENT, Shown, Table, gigabytes, milliseconds
from dpbench.show.view import TOP

NAME_WIDTH = 24
"""Of the column of kernels: with it a table fits 80 columns."""


@dataclass(frozen=True)
class KernelContext:
    """What kernels are compared with.

    Args:
        title: which case, and where it was measured.
        step_bytes: DRAM bytes of a whole step, by its ranges; None if they were not measured.
        roofs: of the card; None if they are not known.
    """

    title: str
    step_bytes: float | None = None
    roofs: Roofs | None = None


def case_kernel_tables(outcome: Outcome, top: int = TOP) -> list[Table]:
    """The tables of what a case's kernels did; none if it was not profiled kernel by kernel."""
    device = next((row.device for row in outcome.rows if row.instrument.startswith("ncu")), "")
    title = f"{outcome.case.id}, {device}" if device else outcome.case.id
    measured = [row for row in outcome.rows if row.instrument == "ncu"]
    context = KernelContext(title, dram_bytes_of_step(measured), known_roofs(device))
    return [
        *kernel_tables(outcome.kernels, context, top=top),
        *speed_table(outcome.speed_of_light, title),
    ]


def kernel_tables(
    counts: Sequence[KernelCount], context: KernelContext, *, top: int = TOP
) -> list[Table]:
    """The kernels of a case for a terminal: the top ones by bytes, categories, operators."""
    frame = kernel_frame(counts)
    if frame.empty:
        return []
    tables = [
        _bytes_by(["kernel", "phase"], frame, context, top),
        _bytes_by(["category"], frame, context),
    ]
    if frame.operator.notna().any():
        tables.append(_bytes_by(["operator", "phase"], frame, context, top))
    return [*tables[:-1], replace(tables[-1], notes=tuple(_notes(frame, context)))]


def _bytes_by(
    by: list[str], frame: pd.DataFrame, context: KernelContext, top: int | None = None
) -> Table:
    bandwidth = context.roofs.bandwidth if context.roofs else None
    table = kernel_table(frame, by, step_bytes=context.step_bytes, bandwidth=bandwidth)
    shown = table.head(len(table) if top is None else top).reset_index()
    count = f" (top {len(shown)} of {len(table)})" if len(shown) < len(table) else ""
    columns: dict[str, Shown] = {
        by[0]: (by[0], wrapped),
        **{name: (name, str) for name in by[1:]},
        "count": ("launches", "{:.0f}".format),
        "DRAM\nGB": ("dram_bytes", gigabytes),
        "ms": ("seconds", milliseconds),
        "share": ("share", "{:.1%}".format),
        "of\npeak": ("ceiling", "{:.0%}".format),
    }
    shown[by[0]] = shown[by[0]].fillna("unknown")
    return Table.of(f"{context.title}: bytes by {by[0]}{count}", shown, columns)


def wrapped(name: str) -> str:
    """A kernel's name in lines that fit its column, broken before ``<`` and after ``_``."""
    lines = [""]
    for piece in re.findall(r"<?[^_<]*_*", name):
        for part in textwrap.wrap(piece, NAME_WIDTH):
            if len(lines[-1] + part) > NAME_WIDTH or (part[0] == "<" and len(name) > NAME_WIDTH):
                lines.append("")
            lines[-1] += part
    return "\n".join(filter(None, lines))


def _notes(frame: pd.DataFrame, context: KernelContext) -> Iterator[str]:
    """What a reader must know to read the numbers right."""
    total = frame.dram_bytes.sum() / max(frame.repeat.nunique(), 1)
    if context.step_bytes:
        yield (
            f"Share of the step's {gigabytes(context.step_bytes)} GB by its ranges; all kernels "
            f"profiled move {total / context.step_bytes:.1%} of it. Copies and memsets are no "
            f"kernels."
        )
    else:
        yield (
            f"Share of the {gigabytes(total)} GB of all kernels profiled; the step itself was not "
            f"measured. Copies and memsets are no kernels."
        )
    yield "ms: the kernels' own time under the profiler, without the gaps between them."
    if context.roofs:
        yield (
            f"Of peak: DRAM bytes ÷ that time, of the {context.roofs.bandwidth / 1e9:.4g} GB/s of "
            f"{context.roofs.name} ({context.roofs.premise})."
        )
    strangers = {short_name(name) for name in frame.name if matched_category(name) is None}
    if strangers:
        yield f"No category fits: {', '.join(sorted(strangers))}."


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
