"""Tables of what profilers recorded: PyTorch's, Nsight Systems, and the kernels of ncu."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from io import StringIO
from typing import Any

import pandas as pd

from dpbench.core.case import ALL_PHASES, AXES
from dpbench.core.metrics import METRICS
from dpbench.results.kernels import KernelCount, category, short_name
from dpbench.results.outcome import Outcome
from dpbench.results.roofline import Roofs, known_roofs
from dpbench.results.rows import NO_HARDWARE, STEP, Measurement
from dpbench.results.summary import (
    dram_bytes_of_step,
    kernel_table,
    steps_by_rank,
    summary,
    to_frame,
)
from dpbench.show.layout import Shown, Table, as_text, gigabytes, milliseconds
from dpbench.show.tables import titled

PROFILER, TIMELINE = "PyTorch profiler", "Nsight Systems"
"""The values of `Metric.table` for metrics of the two tools."""

WAITED = (
    "Exposed: time in collectives while the rank ran nothing else. Waited: time in collectives "
    "minus the smallest time of any rank, summed over phases. This is a lower bound."
)

REPORT_WIDTH = 120
"""The width of a report in characters. A report is a file, so no terminal limits the width."""


def recorded_tables(summary: pd.DataFrame, frame: pd.DataFrame) -> list[Table]:
    """Make the tables by phase and the tables by rank of all cases that a profiler recorded.

    Args:
        summary: the summary of the run, for the tables by phase.
        frame: the long table of the run, which has the numbers of each rank.
    """
    tables = []
    for name in (PROFILER, TIMELINE):
        named = [metric.name for metric in METRICS.in_table(name)]
        rows = summary[summary.metric.isin(named)]
        for title, of_case in titled(rows, AXES) if len(rows) else ():
            wide = of_case.pivot(index="phase", columns="metric", values="value")
            tables.append(_by_phase(f"{title}: {name}, per step", wide, name))
    return [*tables, *_by_rank(frame)]


def _by_rank(frame: pd.DataFrame) -> Iterator[Table]:
    """Yield a table by rank for each case with recorded collectives on several ranks."""
    columns: dict[str, Shown] = {
        "rank": ("rank", str),
        "CPU\nms": ("cpu_time_seconds", milliseconds),
        "in collec-\ntives ms": ("communication_seconds", milliseconds),
        "exposed\nms": ("exposed_communication_seconds", milliseconds),
        "waited\nms": ("waited", milliseconds),
    }
    for title, of_case in titled(steps_by_rank(frame), AXES):
        wide = of_case.pivot_table(index="rank", columns="metric", values="value")
        if "waited" in wide and len(wide) > 1:
            yield Table.of(f"{title}: by rank, per step", wide.reset_index(), columns, [WAITED])


def _by_phase(title: str, wide: pd.DataFrame, table: str) -> Table:
    """Make a table with a line for each phase. A metric that is always 0 has no column."""
    columns: dict[str, Shown] = {"phase": ("phase", str)}
    writers = {"giga": gigabytes, "ms": milliseconds, "percent": "{:.0%}".format}
    for metric in METRICS.in_table(table):
        if metric.name in wide and wide[metric.name].any():
            header = f"{metric.heading} GB" if metric.form == "giga" else metric.heading
            columns[header] = (metric.name, writers.get(metric.form, "{:.0f}".format))
    notes = []
    if "device_time_seconds" in wide:
        ratio = wide.cpu_time_seconds[STEP] / wide.device_time_seconds[STEP]
        notes = [
            f"CPU time ÷ GPU time: {ratio:.2f}. The GPU time of a kernel belongs to the phase that "
            f"launched the kernel."
        ]
    elif "timeline_seconds" in wide and len(wide) > 1:
        notes = [SYNCHRONIZED]
    wide = wide.reindex([phase for phase in (*ALL_PHASES, STEP) if phase in wide.index])
    return Table.of(title, wide.rename_axis("phase").reset_index(), columns, notes)


def profile_report(rows: Sequence[Measurement], schedule: Mapping[str, int], operators: str) -> str:
    """Write the report of one profiled case: its phases, then PyTorch's tables of operators."""
    head = f"{rows[0].tool}, {rows[0].device}; schedule: "
    head += ", ".join(f"{name} {value}" for name, value in schedule.items())
    frame = to_frame(rows)
    tables = recorded_tables(summary(frame), frame)
    return f"{head}\n\n{as_text(tables, REPORT_WIDTH)}\n\n{operators}"


# --- Nsight Systems --------------------------------------------------------------------------

LINES = 10
"""The most lines in a table of statistics."""

SYNCHRONIZED = (
    "Phases were timed in steps that synchronize between phases, and the step in steps that do not "
    "synchronize. So the times of phases do not add up to the time of the step."
)

NO_STATISTICS = (
    "There are no statistics of nsys, because nsys is not on PATH, is older than 2023.1 or cannot "
    "read this file."
)


def timeline_tables(
    usages: Sequence[dict[str, Any]], statistics: Mapping[str, str], title: str
) -> list[Table]:
    """Make a table of the phases in a timeline, and a table for each report of ``nsys stats``.

    Args:
        usages: the metrics of each phase and step, as a timeline's ``usages`` returns them.
        statistics: the CSV text of each report by name, or empty if nsys cannot be used.
        title: the beginning of each table's title.
    """
    frame = pd.DataFrame(usages)
    frame["timeline_busy_share"] = frame.timeline_busy_seconds / frame.timeline_seconds
    by_phase = _by_phase(f"{title}: per step", frame.groupby("phase").median(), TIMELINE)
    if not statistics:
        return [replace(by_phase, notes=(*by_phase.notes, NO_STATISTICS))]
    return [by_phase, *(_statistics(f"{title}: {name}", text) for name, text in statistics.items())]


def _name(name: str) -> str:
    """Write a kernel's name without its arguments, and any other name in full."""
    return wrapped(short_name(name) if "(" in name else name)


def _statistics(title: str, text: str) -> Table:
    """Make the table of one report of ``nsys stats``, with the names in the first column."""
    lines = pd.read_csv(StringIO(text), dtype=str, keep_default_na=False).head(LINES)
    names = {name: (name, _name) for name in ("Name", "Operation", "Range") if name in lines}
    columns: dict[str, Shown] = names | {name: (name, str) for name in lines.columns.drop([*names])}
    return Table.of(title, lines, columns)


# --- kernels ---------------------------------------------------------------------------------

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
        notes = _kernel_notes(counts, step_bytes, roofs) if by == ["category"] else ()
        tables.append(Table.of(title, shown.reset_index(), columns, notes))
    return tables


def wrapped(name: str) -> str:
    """Break a kernel's name into lines of at most `NAME_WIDTH` characters."""
    return textwrap.fill(name, NAME_WIDTH, drop_whitespace=False)


def _kernel_notes(
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
