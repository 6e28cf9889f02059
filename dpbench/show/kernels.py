"""Which kernels move the bytes, how near they come to the hardware's limits, what else does."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from dpbench.results.account import ACCOUNT_COLUMNS, TOLERANCE, in_cache, unaccounted
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
    """Which case it is, and what its kernels are compared with: its step's DRAM bytes, roofs."""

    title: str
    step_bytes: float | None = None
    roofs: Roofs | None = None


def case_kernel_tables(outcome: Outcome, top: int = TOP) -> list[Table]:
    """The tables of what a case's kernels did; none if it was not profiled kernel by kernel."""
    device = next((row.device for row in outcome.rows if row.instrument.startswith("ncu")), "")
    title = ", ".join(filter(None, (outcome.case.id, device)))
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
    of = f"{gigabytes(total)} GB of all kernels profiled; the step itself was not measured"
    if step := context.step_bytes:
        of = f"step's {gigabytes(step)} GB by its ranges; all kernels profiled move "
        of += f"{total / step:.1%} of it"
    yield f"Share of the {of}. Copies and memsets are no kernels."
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


def account_table(title: str, account: pd.DataFrame) -> Table:
    """An account in GB, a line for each phase; all with two decimals if the step reaches DRAM."""
    small = in_cache(account)
    cells = [
        [
            str(phase),
            *(
                gigabytes(line[part]) if small else f"{line[part] / 1e9:.2f}"
                for part in (*ACCOUNT_COLUMNS, "remainder")
            ),
            f"{line.share:.2%}",
        ]
        for phase, line in account.iterrows()
    ]
    parts = [f"{whose}\n{way}" for whose in ("kern.", "copy", "range") for way in ("read", "write")]
    notes = ["Left over: range less kernels less copies; % of the step's range."]
    if small:
        notes.append("WARNING: at this size copies stay in the L2 cache; nothing can add up.")
    elif unaccounted(account):
        notes.append(f"WARNING: more than {TOLERANCE:.0%} of the step is not accounted for.")
    headers = ["phase", *parts, "left\nover", "%"]
    return Table(f"{title}: DRAM GB per step", headers, cells, tuple(notes))
