"""Tables of what the PyTorch profiler and Nsight Systems recorded of a case."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pandas as pd

from dpbench.case import ALL_PHASES, AXES
from dpbench.metrics import METRICS
from dpbench.results.frame import summarise, to_frame
from dpbench.results.rows import STEP, Measurement, identity
from dpbench.results.timeline import Activity, Timeline
from dpbench.show.groups import titled
from dpbench.show.kernels import wrapped
from dpbench.show.layout import ABSENT, Shown, Table, as_text, gigabytes, milliseconds

PROFILER, TIMELINE = "PyTorch profiler", "Nsight Systems"
"""The tables of what these record, as `Metric.table` calls them."""

WAITED = (
    "Exposed: while nothing else of the rank's ran. Waited: by how much longer a rank was in "
    "collectives than the one that was there the shortest, phase by phase: at least that."
)

REPORT_WIDTH = 120
"""The width of a report, which is a file and no terminal."""


def recorded_tables(frame: pd.DataFrame) -> list[Table]:
    """For each case that a profiler recorded, a table with a line for each phase."""
    tables = []
    for name in (PROFILER, TIMELINE):
        rows = frame[frame.metric.isin([metric.name for metric in METRICS.in_table(name)])]
        for title, of_case in titled(summarise(rows), AXES) if len(rows) else ():
            wide = of_case.pivot(index="phase", columns="metric", values="value")
            tables.append(_by_phase(f"{title}: {name}, per step", wide, name))
    return [*tables, *_by_rank(frame)]


def _by_rank(frame: pd.DataFrame) -> Iterator[Table]:
    """For each case that was profiled over ranks, how long each was in collectives."""
    steps = frame[frame.phase == STEP]
    spent = frame[(frame.metric == "communication_seconds") & (frame.phase != STEP)]
    least = spent.value.groupby([spent[column] for column in identity("rank")]).transform("min")
    waited = spent.assign(metric="waited", value=spent.value - least)
    whole = waited.groupby(identity("phase"), sort=False, as_index=False).agg({"value": "sum"})
    rows = pd.concat([steps, whole])
    columns: dict[str, Shown] = {
        "rank": ("rank", str),
        "CPU\nms": ("cpu_time_seconds", milliseconds),
        "in collec-\ntives ms": ("communication_seconds", milliseconds),
        "exposed\nms": ("exposed_communication_seconds", milliseconds),
        "waited\nms": ("waited", milliseconds),
    }
    for title, of_case in titled(rows, AXES):
        wide = of_case.pivot_table(index="rank", columns="metric", values="value")
        if "waited" in wide and len(wide) > 1:
            yield Table.of(f"{title}: by rank, per step", wide.reset_index(), columns, [WAITED])


def _by_phase(title: str, wide: pd.DataFrame, table: str) -> Table:
    """A line for each phase; the columns are the metrics of the table that are not all zero."""
    columns: dict[str, Shown] = {"phase": ("phase", str)}
    writers = {"giga": gigabytes, "ms": milliseconds, "percent": "{:.0%}".format}
    for metric in METRICS.in_table(table):
        if metric.name in wide and wide[metric.name].any():
            header = f"{metric.heading} GB" if metric.form == "giga" else metric.heading
            columns[header] = (metric.name, writers.get(metric.form, "{:.0f}".format))
    notes = []
    if "device_time_seconds" in wide:
        ratio = wide.cpu_time_seconds[STEP] / wide.device_time_seconds[STEP]
        notes = [f"CPU time ÷ GPU time: {ratio:.2f}. GPU time is counted where it was launched."]
    elif "timeline_seconds" in wide and len(wide) > 1:
        notes = [SYNCHRONIZED]
    wide = wide.reindex([phase for phase in (*ALL_PHASES, STEP) if phase in wide.index])
    return Table.of(title, wide.rename_axis("phase").reset_index(), columns, notes)


def profile_report(rows: Sequence[Measurement], schedule: Mapping[str, int], operators: str) -> str:
    """The text report of one profiled case: its phases, then PyTorch's tables of operators."""
    head = f"{rows[0].tool}, {rows[0].device}; schedule: "
    head += ", ".join(f"{name} {value}" for name, value in schedule.items())
    return f"{head}\n\n{as_text(recorded_tables(to_frame(rows)), REPORT_WIDTH)}\n\n{operators}"


# --- Nsight Systems --------------------------------------------------------------------------

LINES = 10
"""The number of lines in a table of gaps or kernels."""

SYNCHRONIZED = (
    "Of a step whose phases wait for each other; the whole step's numbers are of others, in "
    "which the CPU runs ahead as it usually does."
)


def whole_timeline(timeline: Timeline, title: str) -> list[Table]:
    """Every table of one timeline."""
    head = f"{title}, {timeline.device}, {timeline.tool}"
    steps = max(len(timeline.whole_steps), 1)
    gaps, usages = timeline.gaps(), timeline.usages()
    usages["timeline_busy_share"] = usages.timeline_busy_seconds / usages.timeline_seconds
    listed = [
        _by_phase(f"{head}: per step", usages.groupby("phase").median(), TIMELINE),
        _waits(gaps, "phase", f"{head}: waits by phase, per step", steps),
        _waits(gaps, "waited_for", f"{head}: what the GPU waited for, per step", steps),
        _longest(timeline, gaps, f"{head}: the longest gaps"),
        _activities(timeline, f"{head}: kernels and copies, per step", steps),
    ]
    return [table for table in listed if table.cells]


def _waits(gaps: pd.DataFrame, by: str, title: str, steps: int) -> Table:
    """Gaps by what ended them, the longest sums first."""
    sums = gaps.groupby(by, sort=False).agg(
        count=("seconds", "size"), seconds=("seconds", "sum"), called=("called", "sum")
    )
    sums = sums.sort_values("seconds", ascending=False, kind="stable").head(LINES).reset_index()
    sums["each"] = sums.seconds / sums["count"]
    sums["share"] = sums.called / sums.seconds
    sums[["seconds", "count"]] /= steps
    columns: dict[str, Shown] = {
        by.replace("_", " "): (by, wrapped),
        "gaps": ("count", "{:.0f}".format),
        "ms": ("seconds", milliseconds),
        "µs each": ("each", lambda seconds: f"{seconds * 1e6:.1f}"),
        "in CUDA\ncalls": ("share", "{:.0%}".format),
    }
    notes = ["What the CPU did not spend in calls of CUDA it spent in Python and PyTorch."]
    return Table.of(title, sums, columns, notes if by == "phase" else ())


def _longest(timeline: Timeline, gaps: pd.DataFrame, title: str) -> Table:
    longest = gaps.nlargest(LINES, "seconds")
    started = {step.step: step.start for step in timeline.whole_steps}
    longest["at"] = (longest.start - longest.step.map(started)) / 1e9
    columns: dict[str, Shown] = {
        "at ms": ("at", milliseconds),
        "gap ms": ("seconds", milliseconds),
        "phase": ("phase", str),
        "waited for": ("waited_for", wrapped),
        "the CPU meanwhile": ("meanwhile", str),
    }
    longest["meanwhile"] = [
        _meanwhile(*values) for values in zip(longest.seconds, longest.calls, strict=True)
    ]
    return Table.of(title, longest, columns, ["at: after the start of its step."])


def _meanwhile(seconds: float, calls: dict[str, int]) -> str:
    """The calls in which the CPU spent most of a gap."""
    parts = sorted(calls.items(), key=lambda call: -call[1])[:2]
    said = [f"{name} {spent / seconds / 1e7:.0f}%" for name, spent in parts]
    return ",\n".join(said) or "no call of CUDA"


def _activities(timeline: Timeline, title: str, steps: int) -> Table:
    """What ran in whole steps, by name."""
    every = pd.DataFrame(timeline.activities, columns=Activity._fields)
    every["time"] = every.end - every.start
    inside = [every.launched.between(s.start, s.end, "left") for s in timeline.whole_steps]
    rows = pd.concat([every[:0], *(every[of_step] for of_step in inside)])
    sums = rows.groupby(["name", "kind"], sort=False).agg(
        count=("time", "size"), time=("time", "sum"), bytes=("bytes", "sum")
    )
    sums = sums.sort_values("time", ascending=False, kind="stable").reset_index()
    shown = sums[(sums.index < LINES) | (sums.kind != "kernel")].copy()
    shown["share"] = shown.time / sums.time.sum()
    shown["time"] /= 1e9 * steps
    shown[["count", "bytes"]] /= steps
    columns: dict[str, Shown] = {
        "kernel or copy": ("name", wrapped),
        "launches": ("count", "{:.0f}".format),
        "ms": ("time", milliseconds),
        "share": ("share", "{:.1%}".format),
        "GB": ("bytes", lambda moved: gigabytes(moved) if moved else ABSENT),
    }
    return Table.of(title, shown, columns)
