"""The charts of ranks: sent bytes, and time in collectives."""

from __future__ import annotations

from itertools import cycle

import pandas as pd

from dpbench.core.case import ALL_PHASES
from dpbench.results.rows import STEP
from dpbench.show.html import figures
from dpbench.show.html.data import KEYS, MEASURED, PageData, pivot, titles
from dpbench.show.html.figures import PHASE_COLOURS, RANK_COLOURS, Chart
from dpbench.show.layout import gigabytes

HOW_TO_READ = (
    "A bar is the time between the beginning and the end of collectives on a rank. In this time "
    "the rank moves data, or waits for ranks that begin later. The rank for which the other ranks "
    "wait has the shortest bar."
)


def sent(data: PageData) -> Chart | None:
    """Draw the bytes that a rank sends to other ranks, by trainer, stacked by phase."""
    rows = data.summary[data.summary.metric == "collective_bytes"]
    wide = pivot(rows[rows.gpus > 1], "phase")
    shown = [name for name in ALL_PHASES if name in wide and wide[name].any()]
    if not shown:
        return None
    return figures.bar_chart(
        "sent",
        "Bytes that a rank sends, by trainer and phase",
        "counted from the sizes of tensors, as if collectives used a ring; not measured",
        wide.assign(end=wide[STEP], label=[f" {gigabytes(size)}" for size in wide[STEP]]),
        {name: PHASE_COLOURS[name] for name in shown},
        "GB that a rank sends in a step (counted)",
        columns={f"{STEP}, GB": (STEP, gigabytes)},
        stacked=True,
    )


def waits(data: PageData) -> Chart | None:
    """Draw the time of each rank in collectives, if a profiler recorded this time."""
    frames = [run.frame.assign(run=run.name) for run in data.runs]
    rows = pd.concat(frames, ignore_index=True)
    rows = rows[(rows.metric == "communication_seconds") & (rows.phase == STEP)]
    if rows.empty:
        return None
    rows = rows.assign(basis=MEASURED, title=titles(rows, data.summary))
    names = {rank: f"rank {rank}" for rank in sorted(rows["rank"].unique())}
    means = rows.groupby([*KEYS, "rank"], sort=False, as_index=False).value.mean()
    wide = pivot(means.assign(rank=means["rank"].map(names)), "rank")
    return figures.bar_chart(
        "waits",
        "Time in collectives, by rank",
        "recorded by the PyTorch profiler",
        wide.assign(end=wide[[*names.values()]].max(axis="columns"), label=""),
        dict(zip(names.values(), cycle(RANK_COLOURS))),
        "ms of a step in collectives (measured)",
        unit="ms",
        notes=[HOW_TO_READ],
    )
