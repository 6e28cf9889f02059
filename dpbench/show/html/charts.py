"""The charts of the page, from its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from dpbench.case import ALL_PHASES, AXES, PHASES
from dpbench.errors import ConfigurationError
from dpbench.results.frame import CONFIGURATION
from dpbench.results.roofline import (
    BUSY,
    LAUNCH_BOUND,
    MEASURED_BYTES,
    Roofs,
    find_card,
    intensities,
    under,
)
from dpbench.results.rows import STEP
from dpbench.show.html import figures
from dpbench.show.html.data import (
    CELL,
    KEYS,
    LOGICAL,
    UNMEASURED,
    Material,
    pivot,
)
from dpbench.show.html.figures import (
    CASE,
    NEUTRAL,
    PHASE_STYLES,
    Chart,
    Json,
    Key,
    Panel,
    times,
)
from dpbench.show.kernels import ROOFLINE_COLUMNS, roofs_in_words
from dpbench.show.layout import Shown, Table, gigabytes
from dpbench.show.tables import BUSY_OF, SHOWN_SHARE, in_order, ordered

COLOUR, COLOUR_OF_STEP = PHASE_STYLES["backward"].colour, "#7F8790"
"""Of bars that are about no phase and no trainer, and of the whole step's beside its phases."""


def phases(material: Material) -> Chart | None:
    """Bytes by trainer, stacked by phase; one panel per cell of the grid.

    A phase is left out if no case moves `SHOWN_SHARE` of its step there. A case that failed
    before any was counted stands where it belongs.
    """
    basis = material.basis
    wide = pivot(material.summary[material.summary.metric == basis.metric], "phase")
    wide = wide.reindex(columns=[*wide.columns, *({STEP} - {*wide.columns})])
    wide["ratio"] = wide[KEYS].merge(material.step_bytes(basis), how="left").ratio
    shown = [n for n in ALL_PHASES if n in wide and (wide[n] > SHOWN_SHARE * wide[STEP]).any()]
    if not shown:
        return None
    keys = [name for name in KEYS if name != "device"]
    known = pd.MultiIndex.from_frame(wide[keys])
    failed = material.failed[~pd.MultiIndex.from_frame(material.failed[keys]).isin(known)]
    if len(failed):
        failed = failed.drop(columns=[*PHASES], errors="ignore")
        wide = in_order(pd.concat([wide, failed], ignore_index=True), CELL)
    ends = f"At the end of a bar: GB of the whole step, and how many times {material.baseline}'s."
    return figures.bar_chart(
        Chart(
            "phases",
            f"{basis.name} by trainer and phase",
            basis.premise,
            notes=[ends, *material.of_ratios],
        ),
        wide.assign(end=wide[STEP], label=list(map(_end_of_bar, wide.to_dict("records")))),
        {name: PHASE_STYLES[name].colour for name in shown},
        basis.short,
        f"{basis.name} of one step by phase, {basis.premise}; ratio to {material.baseline}",
        columns={
            f"{STEP}, GB": (STEP, gigabytes),
            f"÷ {material.baseline}": ("ratio", times),
        },
        stacked=True,
    )


def _end_of_bar(row: Mapping[Any, Any]) -> str:
    """What stands at the end of a bar, or in its place if the case failed."""
    if isinstance(row.get("error"), str):
        return f" {figures.plain(row['fate'] + ': ' + row['error'])}"
    ratio = "" if pd.isna(row["ratio"]) else f" ({times(row['ratio'])})"
    return f" {gigabytes(row[STEP])}{ratio}"


def memory(material: Material) -> Chart | None:
    """Peak memory by trainer; one panel per cell of the grid."""
    peaks = material.peaks
    if peaks.empty:
        return None
    premise = "measured by PyTorch's allocator"
    if material.basis is LOGICAL:
        premise = material.basis.premise
    return figures.bar_chart(
        Chart("memory", "Peak memory by trainer", premise),
        peaks.assign(
            **{"peak memory": peaks.value},
            end=peaks.value,
            label=[f" {gigabytes(peak)}" for peak in peaks.value],
        ),
        {"peak memory": COLOUR},
        f"peak memory, GB ({material.basis.verb})",
        f"Peak memory of one step ({premise})",
    )


def busy(material: Material) -> Chart | None:
    """For which part of each phase's time the GPU did anything; no chart where none is known.

    Phases that take too little to matter are left out.
    """
    summary, keys = material.summary, [*KEYS, "phase"]
    if BUSY not in {*summary.metric}:
        return None
    elapsed = summary[summary.metric == "gpu_elapsed_cycles"].set_index(keys).value
    rows = summary[summary.metric == BUSY].join(elapsed.rename("cycles"), on=keys)
    longest = rows.groupby(KEYS).cycles.transform("max")
    rows = rows[(rows.cycles > SHOWN_SHARE * longest) & rows.phase.isin([*ALL_PHASES, STEP])]
    if rows.empty:
        return None
    colours = {name: style.colour for name, style in PHASE_STYLES.items()} | {STEP: COLOUR_OF_STEP}
    how_to_read = (
        f"Left of the line, at {LAUNCH_BOUND:.0%}, the GPU waits for the CPU to launch its work, "
        f"and bytes do not explain the time. {BUSY_OF}"
    )
    return figures.bar_chart(
        Chart(
            "busy",
            "How busy the GPU was, by phase",
            "measured by hardware counters: the part of the time in which the GPU did anything",
            notes=[how_to_read],
        ),
        pivot(rows, "phase").assign(end=1.0, label=""),
        {name: colour for name, colour in colours.items() if name in set(rows.phase)},
        "busy, % of the time",
        "Part of its time in which the GPU was busy, by phase",
        unit="%",
        line=LAUNCH_BOUND,
    )


def against_logical(material: Material) -> Chart | None:
    """Measured beside logical bytes of the same case."""
    both = material.beside_logical
    if both.empty:
        return None
    return figures.bar_chart(
        Chart(
            "logical",
            "Measured against logical bytes",
            "DRAM bytes by hardware counters, and logical bytes counted without hardware",
            notes=[
                "At the right: measured ÷ logical. Logical bytes are what operators must move if "
                "nothing stays in a cache between two of them."
            ],
        ),
        both.assign(
            **{"measured": both.value, "logical (counted)": both.logical},
            end=both[["value", "logical"]].max(axis=1),
            label=["" if pd.isna(over) else f" {over:.2f}" for over in both.over_logical],
        ),
        {"measured": COLOUR, "logical (counted)": NEUTRAL},
        "GB per step",
        "DRAM bytes of one step, measured, beside logical bytes, counted without hardware",
        columns={"measured ÷ logical": ("over_logical", "{:.3f}".format)},
    )


# --- the roofline ----------------------------------------------------------------------------

TERA = 1e12


def roofline(material: Material) -> Chart | None:
    """Each phase under the roofs of the card that ran it; panels per cell of the grid."""
    drawn: list[pd.DataFrame] = []
    refusals: list[str] = []
    cards: dict[str, Roofs] = {}
    everything = pd.concat([run.frame for run in material.runs], ignore_index=True)
    counted = everything[everything.instrument == UNMEASURED]
    counted = counted.drop_duplicates([*AXES, "phase", "metric", "repeat"])
    for run in material.runs:
        measured = run.frame[run.frame.instrument != UNMEASURED]
        table = intensities(pd.concat([measured, counted]), complete=False)
        table = table[table.bytes_are == MEASURED_BYTES]
        for device, rows in table.groupby("device", sort=False):
            try:
                card = cards[str(device)] = find_card(str(device))
                rows = under(rows, card).assign(run=run.name)
            except ConfigurationError as error:
                refusals.append(f"{device}: {error}.")
                continue
            ridges = [card.ridge(precision) for precision in rows.precision]
            drawn.append(rows.assign(peak=rows.precision.map(card.flops), ridge=ridges))
    chart = Chart(
        "roofline",
        "Roofline by phase",
        "DRAM bytes by hardware counters, time by phase from an unprofiled process, floating-point "
        "operations counted without hardware",
        notes=refusals,
    )
    table = _phases_to_show(drawn, material.summary) if drawn else pd.DataFrame()
    if table.empty:
        return chart if refusals else None
    placed = table[table.flops > 0]
    speeds = [*placed.flops_per_second / TERA, *placed.peak / TERA]
    layout = {
        "height": 340,
        "xaxis": figures.log_axis(
            "FLOP (counted) per DRAM byte (measured)", [*placed.intensity, *placed.ridge]
        ),
        "yaxis": figures.log_axis("TFLOP/s", speeds),
    }
    colours = figures.trainer_colours({*material.summary.trainer, *material.failed.trainer})
    colours = {name: colour for name, colour in colours.items() if name in set(table.trainer)}
    panels = [
        Panel(what, {"data": [*_marks_under(rows, colours)], "layout": layout})
        for what, rows in figures.cells(placed)
    ]
    keys = [Key("■", name, colour) for name, colour in colours.items()]
    keys += [Key(s.glyph, name) for name, s in PHASE_STYLES.items() if name in set(placed.phase)]
    if (placed.busy < LAUNCH_BOUND).any():
        keys.append(Key("·", f"in a mark: GPU busy below {LAUNCH_BOUND:.0%}, waits for launches"))
    used = [
        roofs_in_words(card, sorted(precisions))
        for device, card in cards.items()
        if len(precisions := table.precision[table.device == device])
    ]
    columns: dict[str, Shown] = {
        **CASE,
        "phase": ("phase", str),
        **ROOFLINE_COLUMNS,
    }
    as_text = Table.of(
        "Phases under the roofs: operations counted, DRAM bytes and time measured",
        table,
        {header.replace("\n", " "): shown for header, shown in columns.items()},
    )
    how_to_read = (
        "A mark is a phase of a trainer; rings about one centre are trainers at the same place. "
        "Operations are those of matrix products and attention. Phases without any have no place "
        "here; how much of its roof every phase reaches is in the table."
    )
    notes = [*refusals, *used, how_to_read]
    return replace(chart, panels=panels, keys=keys, table=as_text, notes=notes)


def _phases_to_show(tables: Sequence[pd.DataFrame], summary: pd.DataFrame) -> pd.DataFrame:
    """Every phase of timed steps, and what lies outside if that takes enough to matter."""
    case, table = ["run", *AXES, "device"], pd.concat(tables, ignore_index=True)
    titles = summary[summary.measured].drop_duplicates(case).set_index(case).title
    steps = table[table.phase == STEP].set_index(case).seconds
    table = table.join(titles, on=case).join(steps.rename("whole"), on=case)
    matters = table.phase.isin(PHASES) | (table.seconds / table.whole > SHOWN_SHARE)
    table = table[table.whole.notna() & matters & (table.phase != STEP)]
    return ordered(table, [*CONFIGURATION, "device", "trainer", "phase"])


def _marks_under(placed: pd.DataFrame, colours: Mapping[str, str]) -> Iterator[Json]:
    """The roof, and a ring a phase, the first trainer's the largest, so that none hides another."""
    ridge, peak = placed.ridge.iloc[0], placed.peak.iloc[0] / TERA
    x, y = np.array([1e-6, 1, 1e6]) * ridge, np.array([1e-6, 1, 1]) * peak
    line = {"color": NEUTRAL, "width": 2.5}
    roof = {"type": "scatter", "mode": "lines", "x": x.tolist(), "y": y.tolist(), "line": line}
    yield {**roof, "hoverinfo": "skip"}
    said = {
        phase: figures.lines(phase, *map(_under, group.to_dict("records")))
        for phase, group in placed.groupby("phase")
    }  # a line a trainer: they may lie upon each other
    present = [name for name in colours if name in set(placed.trainer)]
    for name, size in zip(present, np.linspace(15, 4.5, len(present)), strict=True):
        group = placed[placed.trainer == name]
        yield {
            "type": "scatter",
            "mode": "markers",
            "x": group.intensity.tolist(),
            "y": (group.flops_per_second / TERA).tolist(),
            "marker": {
                "symbol": [
                    f"{PHASE_STYLES[phase].symbol}-open{'-dot' * waits}"
                    for phase, waits in zip(group.phase, group.busy < LAUNCH_BOUND, strict=True)
                ],
                "size": float(size),
                "color": colours[name],
                "line": {"width": 1.5},
            },
            "cliponaxis": False,
            "hoverinfo": "text",
            "hovertext": [said[phase] for phase in group.phase],
        }


def _under(row: Mapping[Any, Any]) -> str:
    speed = f"{row['intensity']:.1f} FLOP/B, {row['flops_per_second'] / TERA:.1f} TFLOP/s"
    return f"{row['trainer']}: {speed}, {row['share']:.0%} of the roof, bound by {row['bound_by']}"
