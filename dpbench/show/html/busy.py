"""The chart of how busy the GPU was, by phase."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pandas as pd

from dpbench.case import ALL_PHASES
from dpbench.results.roofline import BUSY, LAUNCH_BOUND
from dpbench.results.rows import STEP
from dpbench.show.html import figures
from dpbench.show.html.data import KEYS
from dpbench.show.html.figures import CASE, Chart, DataTable, Material, Panel, Style
from dpbench.show.html.roofline import BAR
from dpbench.show.tables import SHOWN_SHARE

HOW_TO_READ = (
    f"Left of the line, at {LAUNCH_BOUND:.0%}, the GPU waits for the CPU to launch its work, and "
    f"bytes do not explain the time. Phases are synchronized at their borders, the whole step is "
    f"not."
)


def busy(material: Material) -> Iterator[Chart]:
    """For which part of each phase's time the GPU did anything; no chart where none is known."""
    rows = _rows(material.summary)
    if rows.empty:
        return
    yield Chart(
        "busy",
        "How busy the GPU was, by phase",
        "measured by hardware counters: the part of the time in which the GPU did anything",
        [_panel(title, cell, material.look) for title, cell in figures.cells(rows)],
        material.keys(rows.trainer),
        DataTable.of(
            "Part of its time in which the GPU was busy, by phase",
            rows.assign(percent=rows.value * 100),
            {**CASE, "phase": "phase", "percent": "busy, %"},
        ),
        [HOW_TO_READ],
    )


def _rows(summary: pd.DataFrame) -> pd.DataFrame:
    """The share of each case's phases that take enough to matter, and of its step."""
    times = summary[summary.metric == "gpu_elapsed_cycles"].set_index([*KEYS, "phase"]).value
    rows = summary[summary.metric == BUSY]
    rows = rows.join(times.rename("cycles"), on=[*KEYS, "phase"])
    longest = rows.cycles.groupby([rows[key] for key in KEYS]).transform("max")
    order = {name: place for place, name in enumerate([*ALL_PHASES, STEP])}
    rows = rows[(rows.cycles > SHOWN_SHARE * longest) & rows.phase.isin(order)]
    return rows.sort_values("phase", key=lambda phases: phases.map(order), kind="stable")


def _panel(title: str, rows: pd.DataFrame, look: Mapping[str, Style]) -> Panel:
    """Bars by phase, one a trainer."""
    phases = list(dict.fromkeys(rows.phase))
    present = {name: style for name, style in look.items() if name in set(rows.trainer)}
    traces = []
    for name, style in present.items():
        theirs = rows[rows.trainer == name]
        said = [
            figures.lines(f"{name}, {phase}: busy {share:.0%}")
            for phase, share in zip(theirs.phase, theirs.value, strict=True)
        ]
        shares = (theirs.value * 100).tolist()
        traces.append(figures.bars(name, theirs.phase.tolist(), shares, style.colour, said))
    return figures.panel(
        title,
        traces,
        58 + BAR * len(phases) * (len(present) + 1),
        barmode="group",
        bargap=0.2,
        shapes=[figures.upright(LAUNCH_BOUND * 100, "dot")],
        xaxis=figures.axis("busy, % of the time", range=[0, 100]),
        yaxis={**figures.name_axis(phases), "categoryorder": "array", "categoryarray": phases},
    )
