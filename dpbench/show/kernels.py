"""Tables of a case's kernels, and tables that compare phases with the highest rates of a card."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import pandas as pd

from dpbench.results.kernels import KernelCount, category, kernel_table
from dpbench.results.outcome import Outcome
from dpbench.results.roofline import LAUNCH_BOUND, Roofs, known_roofs
from dpbench.results.rows import NO_HARDWARE, STEP
from dpbench.results.summary import dram_bytes_of_step
from dpbench.show.groups import in_order, ordered, titled
from dpbench.show.layout import Shown, Table, gigabytes, milliseconds, step_milliseconds
from dpbench.show.tables import SHOWN_SHARE

NAME_WIDTH = 24
"""The width of the column of kernels in characters, so that the table fits 80 characters."""


def kernel_tables(outcome: Outcome, summary: pd.DataFrame, top: int) -> list[Table]:
    """Make a table of a case's kernels and a table of their categories, sorted by DRAM bytes.

    There are no tables if the case was not profiled kernel by kernel. A share is relative to the
    DRAM bytes of the whole step. If these bytes were not measured, a share is relative to the DRAM
    bytes of all profiled kernels.

    Args:
        outcome: the outcome of the case.
        summary: the summary of the run.
        top: the most lines in the table of kernels. All categories are shown.
    """
    if not (counts := outcome.kernels):
        return []
    of_case = summary[(summary.case == outcome.case) & summary.instrument.isin(outcome.by)]
    step_bytes = dram_bytes_of_step(of_case)
    device = next((row.device for row in outcome.rows if row.device != NO_HARDWARE), "")
    roofs = known_roofs(device)
    tables = []
    for by in (["kernel", "phase"], ["category"]):
        bandwidth = roofs.bandwidth if roofs else None
        table = kernel_table(counts, by, step_bytes=step_bytes, bandwidth=bandwidth)
        shown = table if by == ["category"] else table.head(top)
        count = f" (top {len(shown)} of {len(table)})" if len(shown) < len(table) else ""
        columns: dict[str, Shown] = {
            by[0]: (by[0], wrapped),
            **{key: (key, str) for key in by[1:]},
            "count": ("launches", "{:.0f}".format),
            "DRAM\nGB": ("dram_bytes", gigabytes),
            "ms": ("seconds", milliseconds),
            "share": ("share", "{:.1%}".format),
            "of\npeak": ("ceiling", "{:.0%}".format),
        }
        case = ", ".join(filter(None, (outcome.case.id, device)))
        title = f"{case}: bytes by {by[0]}{count}"
        tables.append(Table.of(title, shown.reset_index(), columns))
    return [*tables[:-1], replace(tables[-1], notes=tuple(_notes(counts, step_bytes, roofs)))]


def wrapped(name: str) -> str:
    """Break a kernel's name into lines of at most `NAME_WIDTH` characters."""
    return textwrap.fill(name, NAME_WIDTH, drop_whitespace=False)


def _notes(
    counts: Sequence[KernelCount], step_bytes: float | None, roofs: Roofs | None
) -> Iterator[str]:
    total = sum(count.dram_bytes for count in counts) / len({count.repeat for count in counts})
    if step_bytes:
        yield (
            f"Share: of the step's {gigabytes(step_bytes)} GB. All profiled kernels move "
            f"{total / step_bytes:.1%} of these bytes. Copies and memsets are not kernels."
        )
    else:
        yield (
            f"Share: of the {gigabytes(total)} GB of all profiled kernels, because the bytes of "
            f"the step were not measured. Copies and memsets are not kernels."
        )
    yield "ms: the kernels' own time under the profiler, without the gaps between kernels."
    if roofs:
        yield (
            f"Of peak: DRAM bytes ÷ ms, as a share of the {roofs.bandwidth / 1e9:.4g} GB/s of "
            f"{roofs.name} ({roofs.source})."
        )
    unknown = {count.kernel for count in counts if category(count.name) is None}
    if unknown:
        yield f"Kernels without a category: {', '.join(sorted(unknown))}."


def roofline_tables(table: pd.DataFrame, roofs: Roofs) -> list[Table]:
    """Make a roofline table for each configuration, device and kind of bytes.

    Args:
        table: the result of `dpbench.results.roofline.apply_roofs`.
        roofs: the roofs that were applied.
    """
    tables = []
    for bytes_are, group in table.groupby("bytes_are", sort=False):
        for title, rows in titled(in_order(group)):
            known = {h: c for h, c in ROOFLINE_COLUMNS.items() if rows[c[0]].notna().any()}
            notes = [
                f"{roofs_in_words(roofs, rows.precision)} Elementwise operations are not counted. "
                f"The least time of a step is the sum of its phases' least times.",
                *launch_bound_notes(rows),
            ]
            name = f"{title}: roofline of {bytes_are}"
            tables.append(phase_lines(name, rows, rows.least_seconds, known, notes))
    return tables


ROOFLINE_COLUMNS: dict[str, Shown] = {
    "TFLOP": ("flops", lambda operations: gigabytes(operations / 1e3)),
    "GB": ("bytes", gigabytes),
    "FLOP\n/ B": ("intensity", "{:.1f}".format),
    "bound": ("bound", str),
    "least\nms": ("least_seconds", step_milliseconds),
    "time\nms": ("seconds", step_milliseconds),
    "% of\nroof": ("share", "{:.0%}".format),
}
"""The columns of a roofline table. The last two columns have numbers only for timed phases."""


def phase_lines(
    title: str,
    rows: pd.DataFrame,
    weights: pd.Series[float],
    columns: Mapping[str, Shown],
    notes: Iterable[str],
) -> Table:
    """Make a table with a line for the step of each trainer, followed by a line for each phase.

    A phase is shown if its weight, for some trainer, is at least the largest weight in the table
    times `SHOWN_SHARE`.
    """
    large = rows.phase[weights >= SHOWN_SHARE * weights.max()]
    lines = rows[rows.phase.isin([*large, STEP])]
    lines = ordered(lines.assign(of_phase=lines.phase != STEP), ["trainer", "of_phase", "phase"])
    lines = lines.assign(name=lines.trainer.where(lines.phase == STEP, "· " + lines.phase))
    return Table.of(title, lines, {"trainer\n· phase": ("name", str), **columns}, notes)


def launch_bound_notes(rows: pd.DataFrame) -> Iterator[str]:
    """Yield a note if a phase is launch-bound, and a note if it is unknown how busy the GPU was."""
    if (rows.busy < LAUNCH_BOUND).any():
        yield (
            f"Launch-bound: the GPU was busy for less than {LAUNCH_BOUND:.0%} of the time. The "
            f"share is in brackets. Neither roof explains the idle time."
        )
    timed = rows[(rows.phase == STEP) & rows.seconds.notna()]
    if unknown := [*dict.fromkeys(timed[timed.busy.isna()].trainer)]:
        yield (
            f"How busy the GPU was with {', '.join(unknown)} was not measured, so launch-bound "
            f"phases are not marked. --instrument cupti measures it."
        )


def roofs_in_words(roofs: Roofs, precisions: Iterable[str]) -> str:
    """Write a card's bandwidth, and its peak arithmetic and `Roofs.ridge` at some precisions."""
    peaks = [
        f"{roofs.flops[name] / 1e12:.4g} TFLOP/s at {name}, which are equal bounds at "
        f"{roofs.ridge(name):.1f} FLOP/B"
        for name in dict.fromkeys(precisions)
        if name in roofs.flops
    ]
    roof = " and ".join(filter(None, [f"{roofs.bandwidth / 1e9:.4g} GB/s", " or ".join(peaks)]))
    return f"Roofs of {roofs.name}: {roof} ({roofs.source})."
