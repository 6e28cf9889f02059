"""The charts of the page, from its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from dpbench.case import ALL_PHASES, AXES
from dpbench.errors import ConfigurationError
from dpbench.results.frame import CONFIGURATION, IN_CACHE_BYTES
from dpbench.results.roofline import (
    BUSY,
    LAUNCH_BOUND,
    MEASURED_BYTES,
    find_card,
    intensities,
    under,
)
from dpbench.results.rows import NO_HARDWARE, STEP
from dpbench.show.html import figures
from dpbench.show.html.data import CASE, COUNTED, KEYS, MEASURED, Material, pivot, titles
from dpbench.show.html.figures import NAMES, NEUTRAL, PHASE_STYLES, Chart, Json, times
from dpbench.show.kernels import ROOFLINE_COLUMNS, roofs_in_words
from dpbench.show.layout import Shown, Table, gigabytes
from dpbench.show.tables import BUSY_OF, SHOWN_SHARE, ordered

COLOUR = PHASE_STYLES["backward"].colour
"""Of bars that are about no phase and no trainer."""

BY_OPERATOR = "counted operator by operator without hardware, not measured"

IN_CACHE = (
    "Warning: some steps move less than 1 GB. At that size the data stays in the L2 cache, and "
    "ratios of DRAM bytes mean nothing."
)


def phases(material: Material) -> Chart | None:
    """Bytes by trainer, stacked by phase; one panel per cell of the grid.

    A phase is left out if no case moves `SHOWN_SHARE` of its step there. A case that failed
    before any was counted stands where it belongs.
    """
    step = material.step_bytes(material.premise)
    wide = pivot(material.summary[material.summary.metric.isin(step.metric)], "phase")
    shown = [n for n in ALL_PHASES if n in wide and (wide[n] > SHOWN_SHARE * wide[STEP]).any()]
    if not shown:
        return None
    wide["ratio"] = wide[KEYS].merge(step, how="left").ratio
    if len(material.failed):
        failed = material.failed[[*CASE, "error", "fate"]]
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
    """What stands at the end of a bar, or in its place if the case failed."""
    if isinstance(row.get("error"), str):
        return f" {row['fate']}: {figures.plain(row['error'])}"
    ratio = "" if pd.isna(row["ratio"]) else f" ({times(row['ratio'])})"
    return f" {gigabytes(row[STEP])}{ratio}"


def _about_ratios(material: Material) -> Iterator[str]:
    """What must be said beside ratios of these bytes."""
    baseline, step = material.baseline, material.step_bytes(material.premise)
    yield f"At the end of a bar: GB of the whole step, and how many times {baseline}'s."
    limits = material.expected.get(step.metric.iloc[0])
    if limits and len(material.ratios):
        low, high = limits
        yield f"Expected range: {low:g} to {high:g} times {baseline}'s bytes."
    if material.premise == MEASURED and (step.value < IN_CACHE_BYTES).any():
        yield IN_CACHE


def memory(material: Material) -> Chart | None:
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


def busy(material: Material) -> Chart | None:
    """For which part of each phase's time the GPU did anything; no chart where none is known.

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
        f"Left of the line, at {LAUNCH_BOUND:.0%}, the GPU waits for the CPU to launch its work, "
        f"and bytes do not explain the time. {BUSY_OF}"
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


def against_logical(material: Material) -> Chart | None:
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


# --- the roofline ----------------------------------------------------------------------------

TERA = 1e12


def roofline(material: Material) -> Chart | None:
    """Each phase under the roofs of the card that ran it; panels per cell of the grid."""
    table, refusals = _under_roofs(material)
    premise = (
        "DRAM bytes by hardware counters, time by phase from an unprofiled process, floating-point "
        "operations counted without hardware"
    )
    if table.empty:
        nothing = Table("Roofline by phase", [], [], tuple(refusals))
        return Chart("roofline", premise, nothing) if refusals else None
    placed = table[table.flops > 0]
    layout = {
        "height": 340,
        "xaxis": figures.log_axis(
            "FLOP (counted) per DRAM byte (measured)", [*placed.intensity, *placed.ridge]
        ),
        "yaxis": figures.log_axis("TFLOP/s", [*placed.tflops_per_second, *placed.peak]),
    }
    colours = figures.trainer_colours(table.trainer)
    panels = {
        cell: {"data": _marks_under(rows, colours), "layout": layout}
        for cell, rows in figures.cells(placed)
    }
    keys = figures.squares(colours)
    keys += [(s.glyph, n, "inherit") for n, s in PHASE_STYLES.items() if n in set(placed.phase)]
    if (placed.busy < LAUNCH_BOUND).any():
        waits = f"in a mark: GPU busy below {LAUNCH_BOUND:.0%}, waits for launches"
        keys.append(("·", waits, "inherit"))
    columns: dict[str, Shown] = {"phase": ("phase", str), **ROOFLINE_COLUMNS}
    columns = {header.replace("\n", " "): shown for header, shown in columns.items()}
    cards = [
        roofs_in_words(find_card(str(device)), sorted(rows.precision))
        for device, rows in table.groupby("device", sort=False)
    ]
    how_to_read = (
        "A mark is a phase of a trainer; rings about one centre are trainers at the same place. "
        "Operations are those of matrix products and attention. Phases without any have no place "
        "here; how much of its roof each reaches is in the table."
    )
    notes = [*refusals, *cards, how_to_read]
    as_text = Table.of("Roofline by phase", table, {**NAMES, **columns}, notes)
    return Chart("roofline", premise, as_text, panels, keys)


def _under_roofs(material: Material) -> tuple[pd.DataFrame, list[str]]:
    """The phases that take enough to matter under the roofs of their cards; why some have none."""
    tables, refusals = [], []
    everything = pd.concat([run.frame for run in material.runs], ignore_index=True)
    counted = everything[everything.device == NO_HARDWARE]
    counted = counted.drop_duplicates([*AXES, "phase", "metric", "repeat"])
    for run in material.runs:
        measured = run.frame[run.frame.device != NO_HARDWARE]
        if counted.empty or measured.empty:
            continue
        table = intensities(pd.concat([measured, counted]), complete=False)
        table = table[table.bytes_are == MEASURED_BYTES]
        for device, rows in table.groupby("device", sort=False):
            try:
                card = find_card(str(device))
                rows = under(rows, card).assign(run=run.name)
            except ConfigurationError as error:
                refusals.append(f"{device}: {error}.")
                continue
            peak, ridge = rows.precision.map(card.flops) / TERA, rows.precision.map(card.ridge)
            tables.append(rows.assign(peak=peak, ridge=ridge))
    if not tables:
        return pd.DataFrame(), refusals
    table = pd.concat(tables, ignore_index=True)
    whole = table.groupby(["run", *AXES, "device"]).seconds.transform("max")
    table = table[(table.seconds > SHOWN_SHARE * whole) & (table.phase != STEP)]
    speeds = table.flops_per_second / TERA
    table = table.assign(title=titles(table, material.summary), tflops_per_second=speeds)
    return ordered(table, [*CONFIGURATION, "device", "trainer", "phase"]), refusals


def _marks_under(placed: pd.DataFrame, colours: Mapping[str, str]) -> list[Json]:
    """The roof, and a ring a phase, the first trainer's the largest, so that none hides another."""
    ridge, peak = placed.ridge.iloc[0], placed.peak.iloc[0]
    present = [name for name in colours if name in set(placed.trainer)]
    sizes = dict(zip(present, np.linspace(15, 4.5, len(present)), strict=True))
    shapes = {phase: style.symbol for phase, style in PHASE_STYLES.items()}
    ends = (placed.busy < LAUNCH_BOUND).map({True: "-open-dot", False: "-open"})
    said = {
        phase: figures.lines(phase, *map(_under, group.to_dict("records")))
        for phase, group in placed.groupby("phase")
    }  # a line a trainer: they may lie upon each other
    x, y = [ridge * 1e-6, ridge, ridge * 1e6], [peak * 1e-6, peak, peak]
    line = {"color": NEUTRAL, "width": 2.5}
    roof = {"type": "scatter", "mode": "lines", "x": x, "y": y, "line": line, "hoverinfo": "skip"}
    rings = {
        "type": "scatter",
        "mode": "markers",
        "x": placed.intensity.tolist(),
        "y": placed.tflops_per_second.tolist(),
        "marker": {
            "symbol": (placed.phase.map(shapes) + ends).tolist(),
            "size": placed.trainer.map(sizes).tolist(),
            "color": placed.trainer.map(colours).tolist(),
            "line": {"width": 1.5},
            "opacity": 1,  # of several sizes plotly.js makes bubbles
        },
        "cliponaxis": False,
        "hoverinfo": "text",
        "hovertext": placed.phase.map(said).tolist(),
    }
    return [roof, rings]


def _under(row: Mapping[Any, Any]) -> str:
    speed = f"{row['intensity']:.1f} FLOP/B, {row['tflops_per_second']:.1f} TFLOP/s"
    return f"{row['trainer']}: {speed}, {row['share']:.0%} of the roof, bound by {row['bound_by']}"
