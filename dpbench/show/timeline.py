"""What Nsight Systems recorded, as tables: busy share, kernels, and what the GPU waited for."""

from __future__ import annotations

import pandas as pd

from dpbench.case import ALL_PHASES, AXES
from dpbench.results.frame import summarise
from dpbench.results.rows import STEP
from dpbench.results.timeline import Timeline
from dpbench.show.kernels import wrapped
from dpbench.show.layout import ABSENT, Shown, Table, gigabytes, milliseconds
from dpbench.show.tables import title_of

TOP = 10
"""Lines of a table that has no end."""

SYNCHRONIZED = (
    "Of a step whose phases wait for each other; the whole step's numbers are of others, in "
    "which the CPU runs ahead as it usually does."
)


def timeline_tables(frame: pd.DataFrame) -> list[Table]:
    """For each recorded case of a long table: how its phases used the GPU."""
    recorded = frame[frame.instrument == "nsys"]
    if recorded.empty:
        return []
    keys = [*AXES, "device"]
    return [
        _usage_table(
            f"{title_of(dict(zip(keys, case, strict=True)))}: Nsight Systems, per step",
            rows.pivot(index="phase", columns="metric", values="value"),
        )
        for case, rows in summarise(recorded).groupby(keys, sort=False)
    ]


def whole_timeline(timeline: Timeline, title: str) -> list[Table]:
    """Every table of one timeline."""
    head = f"{title}, {timeline.device}, {timeline.tool}"
    steps = max(len(timeline.whole_steps), 1)
    gaps = pd.DataFrame(
        [
            {**vars(gap), "seconds": gap.seconds, "called": gap.call_seconds}
            for gap in timeline.gaps()
        ],
        columns=["step", "start", "end", "phase", "waited_for", "calls", "seconds", "called"],
    )
    usages = pd.DataFrame(map(vars, timeline.usages()))
    usages = usages.groupby(["step", "phase"]).sum().groupby("phase").median()
    usages = usages.add_prefix("timeline_")
    usages["timeline_busy_share"] = usages.timeline_busy_seconds / usages.timeline_seconds
    found = [
        _usage_table(f"{head}: per step", usages),
        _waits(gaps, "phase", f"{head}: waits by phase, per step", steps),
        _waits(gaps, "waited_for", f"{head}: what the GPU waited for, per step", steps),
        _longest(timeline, gaps, f"{head}: the longest gaps"),
        _activities(timeline, f"{head}: kernels and copies, per step", steps),
    ]
    return [table for table in found if table.cells]


def _usage_table(title: str, wide: pd.DataFrame) -> Table:
    """A line for each phase; the columns are metrics."""
    wide = wide.reindex([phase for phase in (*ALL_PHASES, STEP) if phase in wide.index])
    columns: dict[str, Shown] = {
        "phase": ("phase", str),
        "ms": ("timeline_seconds", milliseconds),
        "GPU busy\nms": ("timeline_busy_seconds", milliseconds),
        "busy": ("timeline_busy_share", "{:.0%}".format),
        "launches": ("timeline_launches", "{:.0f}".format),
    }
    notes = [SYNCHRONIZED] if len(wide) > 1 else []
    return Table.of(title, wide.rename_axis("phase").reset_index(), columns, notes)


def _waits(gaps: pd.DataFrame, by: str, title: str, steps: int) -> Table:
    """Gaps by what ended them, the longest sums first."""
    sums = gaps.groupby(by, sort=False).agg(
        count=("seconds", "size"), seconds=("seconds", "sum"), called=("called", "sum")
    )
    sums = sums.sort_values("seconds", ascending=False, kind="stable").head(TOP).reset_index()
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
    longest = gaps.nlargest(TOP, "seconds")
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
    """What the CPU did in a gap: the calls that took most of it."""
    parts = sorted(calls.items(), key=lambda call: -call[1])[:2]
    said = [f"{name} {spent / seconds / 1e7:.0f}%" for name, spent in parts]
    return ",\n".join(said) or "no call of CUDA"


def _activities(timeline: Timeline, title: str, steps: int) -> Table:
    """What ran in whole steps, by name."""
    rows = pd.DataFrame(
        [
            (each.name, each.kind, each.end - each.start, each.bytes)
            for each in timeline.during(timeline.whole_steps)
        ],
        columns=["name", "kind", "time", "bytes"],
    )
    sums = rows.groupby(["name", "kind"], sort=False).agg(
        count=("time", "size"), time=("time", "sum"), bytes=("bytes", "sum")
    )
    sums = sums.sort_values("time", ascending=False, kind="stable").reset_index()
    shown = sums[(sums.index < TOP) | (sums.kind != "kernel")].copy()
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
