"""The charts of bytes, memory and busy time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from dpbench.core.case import ALL_PHASES
from dpbench.results.roofline import BUSY, LAUNCH_BOUND
from dpbench.results.rows import STEP
from dpbench.results.summary import IN_CACHE_BYTES
from dpbench.show.groups import ordered
from dpbench.show.html import figures
from dpbench.show.html.data import CASE, COUNTED, KEYS, MEASURED, PageData, pivot
from dpbench.show.html.figures import NEUTRAL, PHASE_STYLES, Chart, times
from dpbench.show.layout import gigabytes
from dpbench.show.tables import BUSY_OF, SHOWN_SHARE

COLOUR = PHASE_STYLES["backward"].colour
"""The colour of bars that stand for no phase and no trainer."""

BY_OPERATOR = "counted operator by operator without hardware, not measured"

IN_CACHE = (
    "Warning: some steps move less than 1 GB. At that size the data stays in the L2 cache, and "
    "ratios of DRAM bytes mean nothing."
)


def phases(material: PageData) -> Chart | None:
    """Bytes by trainer, stacked by phase; one panel per cell of the grid.

    A phase is left out if no case moves `SHOWN_SHARE` of its step there. A case that failed before
    any was counted keeps its place.
    """
    step = material.step_bytes(material.premise)
    wide = pivot(material.summary[material.summary.metric.isin(step.metric)], "phase")
    shown = [n for n in ALL_PHASES if n in wide and (wide[n] > SHOWN_SHARE * wide[STEP]).any()]
    if not shown:
        return None
    wide["ratio"] = wide[KEYS].merge(step, how="left").ratio
    if len(material.failed):
        failed = material.failed[[*CASE, "error"]]
        wide = ordered(pd.concat([wide, failed]).drop_duplicates(CASE), CASE)
    name = f"{material.bytes_name} bytes"
    return figures.bar_chart(
        "phases",
        f"{name[0].upper()}{name[1:]} by trainer and phase",
        BY_OPERATOR if material.premise == COUNTED else "measured by hardware counters",
        wide.assign(end=wide[STEP], label=list(map(_end_of_bar, wide.to_dict("records")))),
        {name: PHASE_STYLES[name].colour for name in shown},
        f"{material.bytes_name} GB per step ({material.premise})",
        columns={
            f"{STEP}, GB": (STEP, gigabytes),
            f"÷ {material.baseline}": ("ratio", times),
        },
        notes=[*_about_ratios(material)],
        stacked=True,
    )


def _end_of_bar(row: Mapping[Any, Any]) -> str:
    """The label at the end of a bar, or in place of the bar of a failed case."""
    if isinstance(row.get("error"), str):
        return f" failed: {figures.plain(row['error'])}"
    ratio = "" if pd.isna(row["ratio"]) else f" ({times(row['ratio'])})"
    return f" {gigabytes(row[STEP])}{ratio}"


def _about_ratios(material: PageData) -> Iterator[str]:
    """The notes on ratios of these bytes."""
    baseline, step = material.baseline, material.step_bytes(material.premise)
    yield f"At the end of a bar: GB of the whole step, and how many times {baseline}'s."
    limits = material.expected.get(step.metric.iloc[0])
    if limits and len(material.ratios):
        low, high = limits
        yield f"Expected range: {low:g} to {high:g} times {baseline}'s bytes."
    if material.premise == MEASURED and (step.value < IN_CACHE_BYTES).any():
        yield IN_CACHE


def memory(material: PageData) -> Chart | None:
    """Peak memory by trainer; one panel per cell of the grid."""
    peaks = material.peaks
    if peaks.empty:
        return None
    return figures.bar_chart(
        "memory",
        "Peak memory by trainer",
        BY_OPERATOR if material.premise == COUNTED else "measured by PyTorch's allocator",
        peaks.rename(columns={"value": "peak memory"}).assign(
            end=peaks.value, label=[f" {gigabytes(peak)}" for peak in peaks.value]
        ),
        {"peak memory": COLOUR},
        f"peak memory, GB ({material.premise})",
    )


def busy(material: PageData) -> Chart | None:
    """The share of each phase's time in which the GPU was busy; no chart if it is unknown.

    Phases that take too little to matter are left out.
    """
    summary, keys = material.summary, [*KEYS, "phase"]
    elapsed = summary[summary.metric == "gpu_elapsed_cycles"].set_index(keys).value
    rows = summary[summary.metric == BUSY].join(elapsed.rename("cycles"), on=keys)
    longest = rows.groupby(KEYS).cycles.transform("max")
    rows = rows[(rows.cycles > SHOWN_SHARE * longest) & rows.phase.isin(PHASE_STYLES)]
    if rows.empty:
        return None
    how_to_read = (
        f"Left of the line, at {LAUNCH_BOUND:.0%}, a phase is launch-bound: the GPU waits for the "
        f"CPU to launch its work, and neither bytes nor arithmetic explain the time. {BUSY_OF}"
    )
    return figures.bar_chart(
        "busy",
        "How busy the GPU was, by phase",
        "measured by hardware counters: the part of the time in which the GPU did anything",
        pivot(rows, "phase").assign(end=1.0, label=""),
        {name: s.colour for name, s in PHASE_STYLES.items() if name in set(rows.phase)},
        "busy, % of the time",
        unit="%",
        notes=[how_to_read],
        line=LAUNCH_BOUND,
    )


def against_logical(material: PageData) -> Chart | None:
    """Measured beside logical bytes of the same case."""
    both = material.beside_logical
    if both.empty:
        return None
    how_to_read = (
        "At the right: measured ÷ logical. Logical bytes are what operators must move if "
        "nothing stays in a cache between two of them."
    )
    return figures.bar_chart(
        "logical",
        "Measured against logical bytes",
        "DRAM bytes by hardware counters, and logical bytes counted without hardware",
        both.rename(columns={"value": "measured", "logical": "logical (counted)"}).assign(
            end=both[["value", "logical"]].max(axis=1),
            label=["" if pd.isna(over) else f" {over:.2f}" for over in both.over_logical],
        ),
        {"measured": COLOUR, "logical (counted)": NEUTRAL},
        "GB per step",
        columns={"measured ÷ logical": ("over_logical", "{:.3f}".format)},
        notes=[how_to_read],
    )
