"""The panels of the roofline: marks under the roofs, and bars of how much of a roof is reached."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from dpbench.case import ALL_PHASES
from dpbench.results.cards import Roofs
from dpbench.show.html.drawing import axis, bar_trace, name_axis, panel
from dpbench.show.html.palette import NEUTRAL, PHASE_STYLES, Style
from dpbench.show.html.parts import Panel, lines, milliseconds

TERA = 1e12

LARGEST, SMALLEST = 15.0, 4.5
"""Diameters of the first trainer's marks and of the last's, px: they lie in one another."""

BAR = 13
"""Height of a bar among others, px."""


@dataclass(frozen=True)
class Window:
    """What all roofs are seen through.

    Args:
        intensity: FLOP per byte, from left to right.
        speed: FLOP/s, from low to high.
        share: the largest share of a roof in any cell, %, at least 100.
    """

    intensity: tuple[float, float]
    speed: tuple[float, float]
    share: float


def window(table: pd.DataFrame, cards: Mapping[str, Roofs]) -> Window:
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


def panels(
    title: str, rows: pd.DataFrame, roofs: Roofs, look: Mapping[str, Style], window: Window
) -> list[Panel]:
    """The drawings of one cell of the grid.

    Args:
        title: which cell.
        rows: its phases, with their places under the roofs; see `dpbench.results.roofline.under`.
        roofs: of the card that ran them.
        look: the style of each trainer.
        window: what every roof is seen through.
    """
    by_trainer = {name: rows[rows.trainer == name] for name in look if name in set(rows.trainer)}
    shares = _shares(f"{title}: share of the roof", by_trainer, look, window.share)
    placed = rows[rows.flops > 0]
    if placed.empty:
        return [shares]
    return [_under_roof(title, placed, roofs, look, window), shares]


def _under_roof(
    title: str, placed: pd.DataFrame, roofs: Roofs, look: Mapping[str, Style], window: Window
) -> Panel:
    return panel(
        title,
        [_roof(roofs, str(placed.precision.iloc[0]), window), *_marks(placed, look)],
        340,
        xaxis=_log_axis("FLOP (counted) per DRAM byte (measured)", *window.intensity),
        yaxis=_log_axis("TFLOP/s", window.speed[0] / TERA, window.speed[1] / TERA),
    )


def _log_axis(title: str, low: float, high: float) -> dict[str, Any]:
    return axis(title, type="log", range=[math.log10(low), math.log10(high)], dtick=1)


def _roof(roofs: Roofs, precision: str, window: Window) -> Any:
    left, right = window.intensity
    peak = roofs.flops[precision] / TERA
    return go.Scatter(
        x=[left, roofs.ridge(precision), right],
        y=[roofs.bandwidth * left / TERA, peak, peak],
        mode="lines",
        line={"color": NEUTRAL, "width": 2.5},
        hoverinfo="skip",
    )


def _marks(placed: pd.DataFrame, look: Mapping[str, Style]) -> list[Any]:
    """A ring a phase, those of the first trainer the largest, so that none hides another."""
    said = {phase: _of_phase(str(phase), group) for phase, group in placed.groupby("phase")}
    trainers = [name for name in look if name in set(placed.trainer)]
    step = (LARGEST - SMALLEST) / max(len(trainers) - 1, 1)
    groups = [(name, placed[placed.trainer == name]) for name in trainers]
    return [
        go.Scatter(
            x=group.intensity.tolist(),
            y=(group.flops_per_second / TERA).tolist(),
            mode="markers",
            marker={
                "symbol": [f"{PHASE_STYLES[phase].symbol}-open" for phase in group.phase],
                "size": LARGEST - step * place,
                "color": look[name].colour,
                "line": {"width": 1.5},
            },
            cliponaxis=False,
            hoverinfo="text",
            hovertext=[said[phase] for phase in group.phase],
        )
        for place, (name, group) in enumerate(groups)
    ]


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


def _shares(
    title: str,
    by_trainer: Mapping[str, pd.DataFrame],
    look: Mapping[str, Style],
    highest: float,
) -> Panel:
    present = {phase for rows in by_trainer.values() for phase in rows.phase}
    phases = [name for name in ALL_PHASES if name in present]
    traces = []
    for name, rows in by_trainer.items():
        said = [_of_share(row) for row in rows.to_dict("records")]
        shares = (rows.share * 100).tolist()
        traces.append(bar_trace(name, rows.phase.tolist(), shares, look[name].colour, said))
    return panel(
        title,
        traces,
        max(340, 58 + BAR * len(phases) * (len(by_trainer) + 1)),
        barmode="group",
        bargap=0.2,
        xaxis=axis("least possible time ÷ measured time, %", range=[0, highest]),
        yaxis={**name_axis(phases), "categoryorder": "array", "categoryarray": phases},
    )


def _of_share(row: Mapping[Any, Any]) -> str:
    return lines(
        f"{row['trainer']}, {row['phase']}: {row['share']:.0%} of the roof",
        f"bound by {row['bound_by']}",
        f"{milliseconds(row['seconds'])} ms, at least {milliseconds(row['least_seconds'])} ms",
    )
