"""The panels of the roofline: marks under the roofs, and bars of how much of a roof is reached."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import pandas as pd
import plotly.graph_objects as go

from dpbench.case import ALL_PHASES, OUTSIDE
from dpbench.results.cards import Roofs
from dpbench.show.html.drawing import axis, panel, trainer_axis
from dpbench.show.html.palette import NEUTRAL, Style
from dpbench.show.html.parts import Panel, lines, milliseconds

TERA = 1e12

LARGEST, SMALLEST = 15.0, 4.5
"""Diameters of the first trainer's marks and of the last's, px: they lie in one another."""

BAR = 13
"""Height of a bar among others, px."""


class Mark(NamedTuple):
    """How a phase is drawn under a roof: plotly's symbol, and the same as text."""

    symbol: str
    glyph: str


MARKS = {
    "forward": Mark("circle", "○"),
    "backward": Mark("square", "□"),
    "clip": Mark("diamond", "◇"),
    "noise": Mark("triangle-up", "△"),
    "optimizer": Mark("triangle-down", "▽"),
    OUTSIDE: Mark("star", "☆"),
}


@dataclass(frozen=True)
class Window:
    """What all roofs are seen through: FLOP per byte, left to right; FLOP/s, low to high."""

    left: float
    right: float
    low: float
    high: float


def window(placed: pd.DataFrame, cards: Mapping[str, Roofs]) -> Window:
    """As much as the marks need, and the ridge and the peak of every roof above them."""
    ridges, peaks = [], []
    for (device, precision), _ in placed.groupby(["device", "precision"]):
        ridges.append(cards[str(device)].ridge(str(precision)))
        peaks.append(cards[str(device)].flops[str(precision)])
    left = min([*placed.intensity, *ridges], default=1.0) / 1.6
    right = max([*placed.intensity, *ridges], default=1.0) * 1.6
    low = min(placed.flops_per_second, default=TERA) / 2.5
    return Window(left, right, low, max(peaks, default=TERA) * 1.6)


def panels(
    title: str,
    rows: pd.DataFrame,
    cards: Mapping[str, Roofs],
    look: Mapping[str, Style],
    window: Window,
    highest: float,
) -> list[Panel]:
    """The drawings of one cell of the grid.

    Args:
        title: which cell.
        rows: its phases, with their places under the roofs; see `dpbench.results.roofline.under`.
        cards: the roofs by device.
        look: the style of each trainer.
        window: what every roof is seen through.
        highest: the largest share of a roof in any cell, %.
    """
    roofs = cards[rows.device.iloc[0]]
    placed = rows[rows.flops > 0]
    share = _shares(f"{title}: share of the roof", rows, look, highest)
    if placed.empty:
        return [share]
    return [_roof(title, placed, roofs, look, window), share]


def _roof(
    title: str, rows: pd.DataFrame, roofs: Roofs, look: Mapping[str, Style], window: Window
) -> Panel:
    precision = str(rows.precision.iloc[0])
    peak, ridge = roofs.flops[precision], roofs.ridge(precision)
    roof = go.Scatter(
        x=[window.left, ridge, window.right],
        y=[roofs.bandwidth * window.left / TERA, peak / TERA, peak / TERA],
        mode="lines",
        line={"color": NEUTRAL, "width": 2.5},
        hoverinfo="skip",
    )
    said = {phase: _of_phase(str(phase), group) for phase, group in rows.groupby("phase")}
    trainers = [name for name in look if name in set(rows.trainer)]
    marks = []
    for place, name in enumerate(trainers):  # the largest first, so that none hides another
        group = rows[rows.trainer == name]
        marks.append(
            go.Scatter(
                x=group.intensity.tolist(),
                y=(group.flops_per_second / TERA).tolist(),
                mode="markers",
                marker={
                    "symbol": [f"{MARKS[phase].symbol}-open" for phase in group.phase],
                    "size": LARGEST - (LARGEST - SMALLEST) * place / max(len(trainers) - 1, 1),
                    "color": look[name].colour,
                    "line": {"width": 1.5},
                },
                cliponaxis=False,
                hoverinfo="text",
                hovertext=[said[phase] for phase in group.phase],
            )
        )
    return panel(
        title,
        [roof, *marks],
        340,
        xaxis=axis(
            "FLOP (counted) per DRAM byte (measured)",
            type="log",
            range=[math.log10(window.left), math.log10(window.right)],
            dtick=1,
        ),
        yaxis=axis(
            "TFLOP/s",
            type="log",
            range=[math.log10(window.low / TERA), math.log10(window.high / TERA)],
            dtick=1,
        ),
    )


def _of_phase(phase: str, rows: pd.DataFrame) -> str:
    """What the marks of a phase say, a line a trainer: they may lie upon each other."""
    return lines(
        phase,
        *(
            f"{row['trainer']}: {row['intensity']:.1f} FLOP/B, "
            f"{row['flops_per_second'] / TERA:.1f} TFLOP/s, {row['share']:.0%} of the roof"
            for row in rows.to_dict("records")
        ),
    )


def _shares(title: str, rows: pd.DataFrame, look: Mapping[str, Style], highest: float) -> Panel:
    phases = [name for name in ALL_PHASES if name in set(rows.phase)]
    trainers = [name for name in look if name in set(rows.trainer)]
    traces = []
    for name in trainers:
        group = rows[rows.trainer == name]
        traces.append(
            go.Bar(
                y=group.phase.tolist(),
                x=(group.share * 100).tolist(),
                orientation="h",
                name=name,
                marker={"color": look[name].colour},
                hoverinfo="text",
                hovertext=[
                    lines(
                        f"{name}, {row['phase']}: {row['share']:.0%} of the roof",
                        f"bound by {row['bound_by']}",
                        f"{milliseconds(row['seconds'])} ms, at least "
                        f"{milliseconds(row['least_seconds'])} ms",
                    )
                    for row in group.to_dict("records")
                ],
            )
        )
    return panel(
        title,
        traces,
        max(340, 58 + BAR * len(phases) * (len(trainers) + 1)),
        barmode="group",
        bargap=0.2,
        xaxis=axis("least possible time ÷ measured time, %", range=[0, max(100.0, highest)]),
        yaxis={**trainer_axis(phases), "categoryorder": "array", "categoryarray": phases},
    )
