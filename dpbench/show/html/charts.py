"""The charts of ratios, times, bytes, memory and busy time."""

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
from dpbench.show.html.data import BYTES, CASE, COUNTED, KEYS, MEASURED, PageData, pivot
from dpbench.show.html.figures import NEUTRAL, PHASE_COLOURS, Chart, times
from dpbench.show.layout import Shown, gigabytes, step_milliseconds
from dpbench.show.tables import BUSY_OF, SHOWN_SHARE

COLOUR = PHASE_COLOURS["backward"]
"""The colour of bars that do not represent a phase."""

RATIO_COLOURS = ("#0072B2", "#E69F00", "#8C8C8C")
"""The colours of bytes, time and memory in the chart of ratios."""

BY_OPERATOR = "counted operator by operator without hardware, not measured"

IN_CACHE = (
    "Warning: some steps move less than 1 GB. At that size much of the data stays in the L2 cache, "
    "so ratios of DRAM bytes mislead."
)


def ratios(data: PageData) -> Chart | None:
    """Draw the bytes, time and peak memory of a step as ratios to the baseline.

    This is the main result of the page.
    """
    basis, baseline = data.basis, data.baseline
    names = {
        BYTES[basis]: f"{data.bytes_name} bytes",
        "step_time_seconds": "time",
        "peak_memory_bytes": "peak memory",
    }
    rows = data.summary[(data.summary.phase == STEP) & data.summary.ratio.notna()]
    rows = rows[(rows.trainer != rows.baseline) & (rows.basis == basis)]
    wide = pivot(rows.assign(value=rows.ratio), "metric").rename(columns=names)
    colours = {
        name: c for name, c in zip(names.values(), RATIO_COLOURS, strict=True) if name in wide
    }
    if not colours:
        return None
    return figures.bar_chart(
        "ratios",
        f"A step's bytes, time and memory ÷ {baseline}'s",
        BY_OPERATOR if basis == COUNTED else "measured",
        wide.assign(end=wide[[*colours]].max(axis="columns"), label=""),
        colours,
        f"÷ {baseline}",
        unit="×",
        line=1.0,
    )


def step_times(data: PageData) -> Chart | None:
    """Draw the time of a step by trainer, stacked by phase, if steps were timed."""
    rows = data.summary[data.summary.metric == "step_time_seconds"]
    wide = pivot(rows, "phase")
    if STEP not in wide:
        return None
    steps = wide[KEYS].merge(rows[rows.phase == STEP].drop_duplicates(KEYS), "left", KEYS)
    ends = [f" {step_milliseconds(seconds)} ms" for seconds in wide[STEP]]
    ratio_text = ["" if pd.isna(ratio) else f" ({times(ratio)})" for ratio in steps.ratio]
    shown = [name for name in ALL_PHASES if name in wide]
    over_baseline: dict[str, Shown] = {f"÷ {data.baseline}": ("ratio", times)}
    return figures.bar_chart(
        "times",
        "Time of a step by trainer and phase",
        "times of unprofiled steps; medians over the steps",
        wide.assign(end=wide[STEP], label=[*map(str.__add__, ends, ratio_text)], ratio=steps.ratio),
        {name: PHASE_COLOURS[name] for name in shown} or {STEP: PHASE_COLOURS[STEP]},
        "ms per step (measured)",
        unit="ms",
        columns={**({f"{STEP}, ms": (STEP, step_milliseconds)} if shown else {}), **over_baseline},
        stacked=True,
    )


def phases(data: PageData) -> Chart | None:
    """Draw bytes by trainer, stacked by phase, with a panel for each cell of the grid.

    A phase is left out if it has at most `SHOWN_SHARE` of the step's bytes in all cases. A failed
    case without bytes has the name of its error instead of a bar.
    """
    step = data.step_bytes(data.basis)
    wide = pivot(data.summary[data.summary.metric.isin(step.metric)], "phase")
    shown = [n for n in ALL_PHASES if n in wide and (wide[n] > SHOWN_SHARE * wide[STEP]).any()]
    if not shown:
        return None
    wide["ratio"] = wide[KEYS].merge(step, how="left").ratio
    if len(data.failed):
        failed = data.failed[[*CASE, "error"]]
        wide = ordered(pd.concat([wide, failed]).drop_duplicates(CASE), CASE)
    name = f"{data.bytes_name} bytes"
    return figures.bar_chart(
        "phases",
        f"{name[0].upper()}{name[1:]} by trainer and phase",
        BY_OPERATOR if data.basis == COUNTED else "measured by hardware counters",
        wide.assign(end=wide[STEP], label=list(map(_end_of_bar, wide.to_dict("records")))),
        {name: PHASE_COLOURS[name] for name in shown},
        f"{data.bytes_name} GB per step ({data.basis})",
        columns={
            f"{STEP}, GB": (STEP, gigabytes),
            f"÷ {data.baseline}": ("ratio", times),
        },
        notes=[*_about_ratios(data)],
        stacked=True,
    )


def _end_of_bar(row: Mapping[Any, Any]) -> str:
    """Return the text at the end of a bar. For a failed case, the text is the name of the error."""
    if isinstance(row.get("error"), str):
        return f" failed: {figures.plain(row['error'])}"
    ratio = "" if pd.isna(row["ratio"]) else f" ({times(row['ratio'])})"
    return f" {gigabytes(row[STEP])}{ratio}"


def _about_ratios(data: PageData) -> Iterator[str]:
    """Yield the notes on the bytes that the page shows and on the ratios of these bytes."""
    baseline, step = data.baseline, data.step_bytes(data.basis)
    yield f"At the end of a bar: GB of the whole step, and the ratio to the step of {baseline}."
    limits = data.expected.get(step.metric.iloc[0])
    if limits and len(data.ratios):
        low, high = limits
        yield f"Expected range: {low:g} to {high:g} times {baseline}'s bytes."
    if data.basis == MEASURED and (step.value < IN_CACHE_BYTES).any():
        yield IN_CACHE


def memory(data: PageData) -> Chart | None:
    """Draw peak memory by trainer, with a panel for each cell of the grid."""
    peaks = data.peaks
    if peaks.empty:
        return None
    return figures.bar_chart(
        "memory",
        "Peak memory by trainer",
        BY_OPERATOR if data.basis == COUNTED else "measured by PyTorch's allocator",
        peaks.rename(columns={"value": "peak memory"}).assign(end=peaks.value, label=""),
        {"peak memory": COLOUR},
        f"peak memory, GB ({data.basis})",
    )


def busy(data: PageData) -> Chart | None:
    """Draw the share of each phase's time in which the GPU was busy, if the share was measured.

    A phase of a case is left out if it has at most `SHOWN_SHARE` of the GPU cycles of the step.
    """
    summary, keys = data.summary, [*KEYS, "phase"]
    elapsed = summary[summary.metric == "gpu_elapsed_cycles"].set_index(keys).value
    rows = summary[summary.metric == BUSY].join(elapsed.rename("cycles"), on=keys)
    longest = rows.groupby(KEYS).cycles.transform("max")
    rows = rows[(rows.cycles > SHOWN_SHARE * longest) & rows.phase.isin([*PHASE_COLOURS])]
    if rows.empty:
        return None
    how_to_read = (
        f"Left of the line, at {LAUNCH_BOUND:.0%}, a phase is launch-bound: the GPU waits for the "
        f"CPU to launch kernels, and neither bytes nor arithmetic explain the time. {BUSY_OF}"
    )
    return figures.bar_chart(
        "busy",
        "How busy the GPU was, by phase",
        "measured by hardware counters: the share of the time in which the GPU did anything",
        pivot(rows, "phase").assign(end=1.0, label=""),
        {name: colour for name, colour in PHASE_COLOURS.items() if name in set(rows.phase)},
        "busy, % of the time",
        unit="%",
        notes=[how_to_read],
        line=LAUNCH_BOUND,
    )


def against_logical(data: PageData) -> Chart | None:
    """Draw measured bytes and logical bytes of the same case side by side."""
    both = data.beside_logical
    if both.empty:
        return None
    how_to_read = (
        "At the right: measured ÷ logical. Logical bytes are the bytes that operators must move if "
        "no data stays in a cache from one operator to the next."
    )
    return figures.bar_chart(
        "logical",
        "Measured bytes and logical bytes",
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
