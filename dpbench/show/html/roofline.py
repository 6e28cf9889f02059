"""Charts that need logical counts too: the roofline by phase, measured against logical bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pandas as pd

from dpbench.case import ALL_PHASES, AXES, PHASES
from dpbench.errors import ConfigurationError
from dpbench.results.cards import Roofs, find_card
from dpbench.results.roofline import MEASURED_BYTES, intensities, under
from dpbench.results.rows import STEP
from dpbench.show.html import data, figures
from dpbench.show.html.data import UNMEASURED, has_case_of
from dpbench.show.html.figures import (
    CASE,
    GIGA,
    PHASE_STYLES,
    Chart,
    DataTable,
    Json,
    Key,
    Material,
    Panel,
    Style,
)
from dpbench.show.layout import gigabytes, written
from dpbench.show.tables import SHOWN_SHARE, in_order

NEEDS_LOGICAL = (
    "These runs hold no logical counts of the measured cases. The option --with-logical of "
    "dpbench report counts them, in seconds a case and without a GPU."
)

TERA = 1e12

LARGEST, SMALLEST = 15.0, 4.5
"""Diameters of the first trainer's marks and of the last's, px: they lie in one another."""

BAR = 13
"""Height of a bar among others, px."""

TITLE = "Roofline by phase"

PREMISE = (
    "DRAM bytes by hardware counters, time by phase from an unprofiled process, floating-point "
    "operations counted without hardware"
)

HOW_TO_READ = (
    "A mark is a phase of a trainer; rings about one centre are trainers at the same place. "
    "Operations are those of matrix products and attention. Phases without any have no place "
    "on the first kind of panel; they are in the second and in the table."
)

HEADERS = {
    **CASE,
    "phase": "phase",
    "flops": "TFLOP (counted)",
    "bytes": "DRAM GB (measured)",
    "intensity": "FLOP/B",
    "seconds": "ms (measured)",
    "least_seconds": "least ms",
    "bound_by": "bound by",
    "percent": "% of roof",
}


def roofline(material: Material) -> Chart:
    """Each phase under the roofs of the card that ran it; panels per cell of the grid."""
    drawn: list[pd.DataFrame] = []
    refusals: list[str] = []
    roofs: dict[str, Roofs] = {}
    for run, device, frame in _with_operations(material):
        try:
            roofs[device] = find_card(device)
            drawn.append(under(intensities(frame), roofs[device]).assign(run=run))
        except ConfigurationError as error:
            refusals.append(f"{device}: {error}.")
    if not drawn:
        why = " ".join(dict.fromkeys(refusals)) or NEEDS_LOGICAL
        if not refusals and data.step_bytes(material.summary, data.DRAM).empty:
            why = "No DRAM bytes were measured in these runs, so no phase has a place under a roof."
        return Chart("roofline", TITLE, missing=why)
    table = _phases_to_show(pd.concat(drawn, ignore_index=True), material.summary)
    window = _window(table, roofs)
    panels = []
    for what, rows in figures.cells(table):
        present = set(rows.trainer)
        look = {name: style for name, style in material.look.items() if name in present}
        if (rows.flops > 0).any():
            card = roofs[rows.device.iloc[0]]
            panels.append(_under_roof(what, rows[rows.flops > 0], card, look, window))
        panels.append(_shares(f"{what}: share of the roof", rows, look, window.share))
    placed = set(table.phase[table.flops > 0])
    keys = [Key("■", key.text, key.colour) for key in material.keys(table.trainer)]
    keys += [Key(style.glyph, name) for name, style in PHASE_STYLES.items() if name in placed]
    used = [_in_words(roofs[str(device)], rows) for device, rows in table.groupby("device")]
    caption = "Phases under the roofs: operations counted, bytes and time measured"
    as_text = DataTable.of(caption, table.assign(percent=table.share * 100), HEADERS)
    return Chart("roofline", TITLE, PREMISE, panels, keys, as_text, [*refusals, *used, HOW_TO_READ])


def _with_operations(material: Material) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """By run and device, the measured rows of cases whose operations some run has counted."""
    everything = pd.concat([source.frame for source in material.sources], ignore_index=True)
    counted = everything[everything.instrument == UNMEASURED]
    counted = counted.drop_duplicates([*AXES, "phase", "metric", "repeat"])
    for source in material.sources:
        measured = source.frame[source.frame.instrument != UNMEASURED]
        for device, rows in measured.groupby("device", sort=False):
            complete = has_case_of(rows, counted)
            for metric in ("dram_read_bytes", "step_time_seconds"):
                complete &= has_case_of(rows, rows[rows.metric == metric])
            if complete.any():
                theirs = counted[has_case_of(counted, rows[complete])]
                both = pd.concat([rows[complete], theirs], ignore_index=True)
                yield source.label, str(device), both


def _phases_to_show(table: pd.DataFrame, summary: pd.DataFrame) -> pd.DataFrame:
    """Every phase of measured steps, and what lies outside if that takes enough to matter."""
    case = ["run", *AXES, "device"]  # two runs may have measured the same
    titles = summary[summary.measured].drop_duplicates(case).set_index(case).title
    steps = table[table.phase == STEP].set_index(case).seconds
    table = table.join(titles, on=case).join(steps.rename("whole"), on=case)
    matters = table.phase.isin(PHASES) | (table.seconds / table.whole > SHOWN_SHARE)
    table = table[(table.bytes_are == MEASURED_BYTES) & matters & (table.phase != STEP)]
    order = {name: place for place, name in enumerate(ALL_PHASES)}
    return in_order(table.sort_values("phase", key=lambda c: c.map(order), kind="stable"))


def _in_words(roofs: Roofs, rows: pd.DataFrame) -> str:
    peaks = [
        f"{gigabytes(roofs.flops[precision] / 1e3)} TFLOP/s at {precision}"
        for precision in sorted(set(rows.precision))
    ]
    return (
        f"Roofs of {roofs.name}: {gigabytes(roofs.bandwidth)} GB/s, {', '.join(peaks)} "
        f"({roofs.premise})."
    )


class Window(NamedTuple):
    """What all roofs are seen through: FLOP/B, FLOP/s, and the largest share of a roof, %."""

    intensity: tuple[float, float]
    speed: tuple[float, float]
    share: float


def _window(table: pd.DataFrame, cards: Mapping[str, Roofs]) -> Window:
    """As much as the marks need, and the ridge and the peak of every roof above them."""
    placed = table[table.flops > 0]
    roofs = [
        (cards[str(device)], str(precision))
        for (device, precision), _ in placed.groupby(["device", "precision"])
    ]
    seen = [*placed.intensity, *(card.ridge(precision) for card, precision in roofs)] or [1.0]
    low = min(placed.flops_per_second, default=TERA) / 2.5
    high = max((card.flops[precision] for card, precision in roofs), default=TERA) * 1.6
    share = max(100.0, float(table.share.max()) * 100)
    return Window((min(seen) / 1.6, max(seen) * 1.6), (low, high), share)


def _under_roof(
    title: str, placed: pd.DataFrame, roofs: Roofs, look: Mapping[str, Style], window: Window
) -> Panel:
    """A ring a phase, those of the first trainer the largest, so that none hides another."""
    (left, right), (low, high), _ = window
    precision = str(placed.precision.iloc[0])
    peak = roofs.flops[precision] / TERA
    roof = figures.line(
        [left, roofs.ridge(precision), right], [roofs.bandwidth * left / TERA, peak, peak], 2.5
    )
    said = {
        phase: figures.lines(phase, *map(_under, group.to_dict("records")))
        for phase, group in placed.groupby("phase")
    }  # a line a trainer: they may lie upon each other
    groups = [(look[n], placed[placed.trainer == n]) for n in look if n in set(placed.trainer)]
    step = (LARGEST - SMALLEST) / max(len(groups) - 1, 1)
    rings = [
        figures.marks(
            group.intensity.tolist(),
            (group.flops_per_second / TERA).tolist(),
            {
                "symbol": [f"{PHASE_STYLES[phase].symbol}-open" for phase in group.phase],
                "size": LARGEST - step * place,
                "color": style.colour,
                "line": {"width": 1.5},
            },
            [said[phase] for phase in group.phase],
        )
        for place, (style, group) in enumerate(groups)
    ]
    return figures.panel(
        title,
        [roof, *rings],
        340,
        xaxis=_log_axis("FLOP (counted) per DRAM byte (measured)", left, right),
        yaxis=_log_axis("TFLOP/s", low / TERA, high / TERA),
    )


def _log_axis(title: str, low: float, high: float) -> Json:
    return figures.axis(title, type="log", range=[math.log10(low), math.log10(high)], dtick=1)


def _under(row: Mapping[Any, Any]) -> str:
    speed = f"{row['intensity']:.1f} FLOP/B, {row['flops_per_second'] / TERA:.1f} TFLOP/s"
    return f"{row['trainer']}: {speed}, {row['share']:.0%} of the roof"


def _shares(title: str, rows: pd.DataFrame, look: Mapping[str, Style], highest: float) -> Panel:
    """Bars of how much of a roof each phase reaches."""
    phases = [name for name in ALL_PHASES if name in set(rows.phase)]
    traces = []
    for name, style in look.items():
        theirs = rows[rows.trainer == name]
        said = [_of_share(row) for row in theirs.to_dict("records")]
        shares = (theirs.share * 100).tolist()
        traces.append(figures.bars(name, theirs.phase.tolist(), shares, style.colour, said))
    return figures.panel(
        title,
        traces,
        max(340, 58 + BAR * len(phases) * (len(look) + 1)),
        barmode="group",
        bargap=0.2,
        xaxis=figures.axis("least possible time ÷ measured time, %", range=[0, highest]),
        yaxis={**figures.name_axis(phases), "categoryorder": "array", "categoryarray": phases},
    )


def _of_share(row: Mapping[Any, Any]) -> str:
    taken, least = (figures.milliseconds(row[name]) for name in ("seconds", "least_seconds"))
    return figures.lines(
        f"{row['trainer']}, {row['phase']}: {row['share']:.0%} of the roof",
        f"bound by {row['bound_by']}",
        f"{taken} ms, at least {least} ms",
    )


# --- measured against logical bytes ----------------------------------------------------------


def against_logical(material: Material) -> Chart:
    """Measured against logical bytes, one panel per cell: two marks, told apart by shape."""
    title = "Measured against logical bytes"
    both = data.measured_against_logical(material.summary)
    if both.empty:
        measured = not data.step_bytes(material.summary, data.DRAM).empty
        why = NEEDS_LOGICAL if measured else "No DRAM bytes were measured in these runs."
        return Chart("logical", title, missing=why)
    longest = max(*both.value, *both.logical) / GIGA  # one scale for all panels
    headers = {"value": "measured, GB", "logical": "logical (counted), GB"}
    return Chart(
        "logical",
        title,
        "filled marks are measured, open marks are counted without hardware",
        [_pairs(what, rows, longest, material) for what, rows in figures.cells(both)],
        [
            Key("●", "measured: DRAM bytes, by hardware counters"),
            Key("◇", "counted: logical bytes, without hardware"),
        ],
        DataTable.of(
            "DRAM bytes of one step, measured, beside logical bytes, counted without hardware",
            both,
            {**CASE, **headers, "over_logical": "measured ÷ logical"},
        ),
        [
            "At the right: measured ÷ logical. Logical bytes are what operators must move if "
            "nothing stays in a cache between two of them."
        ],
    )


def _pairs(title: str, rows: pd.DataFrame, longest: float, material: Material) -> Panel:
    trainers = rows.trainer.tolist()
    colours = [material.look[name].colour for name in trainers]
    counted, measured = ((rows[name] / GIGA).tolist() for name in ("logical", "value"))
    joined = [x for pair in zip(measured, counted, strict=True) for x in (*pair, None)]
    traces = [figures.line(joined, [name for name in trainers for _ in range(3)], 2)]
    for what, places, marker in (
        (
            "logical (counted)",
            counted,
            {"symbol": "diamond-open", "size": 13, "line": {"width": 2.5}},
        ),
        ("measured", measured, {"symbol": "circle", "size": 11}),
    ):
        said = [
            figures.lines(name, f"{what}: {gigabytes(x * GIGA)} GB")
            for name, x in zip(trainers, places, strict=True)
        ]
        traces.append(figures.marks(places, trainers, {**marker, "color": colours}, said))
    labels = [written(quotient, "   {:.2f}".format, "") for quotient in rows.over_logical]
    ends = {"y": trainers, "x": [longest] * len(rows), "text": labels}
    across = figures.axis("GB per step", range=[0, longest * 1.02 or 1])
    return figures.bar_panel(title, traces, ends, labels, xaxis=across)
