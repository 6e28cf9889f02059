"""What the page's charts are made of: colours, and panels in plotly's JSON.

Phases have the colours of Okabe and Ito (https://jfly.uni-koeln.de/color/), trainers those of
Paul Tol's "bright" scheme (https://personal.sron.nl/~pault/), some a shade off for contrast on
white and on black. Both stay apart under the common kinds of colour blindness.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any, NamedTuple

import pandas as pd

from dpbench.case import OUTSIDE
from dpbench.show.layout import Shown, Table, gigabytes

CASE: Mapping[str, Shown] = {
    "configuration": ("title", str),
    "batch": ("batch_size", str),
    "sequence": ("seq_len", str),
    "trainer": ("trainer", str),
}
"""The columns of a table that name a case."""

UNITS: Mapping[str, tuple[float, Callable[[float], str]]] = {
    "GB": (1e9, gigabytes),
    "%": (0.01, lambda share: f"{share * 100:.0f}"),
}
"""Units of bars: how much one is, and how a number of them is written."""

ROW, BAR = 30, 13
"""Height of a trainer's stacked bar with its gap, and of one bar beside others, px."""

CHARACTER = 7
"""Width of a character in a label, px."""

LONGEST = 26
"""Characters of a text in a chart; the tables have it whole."""

LONGEST_NAME = 20
"""Characters of a name at the left of a chart: a phone has no room for more."""

Json = dict[str, Any]
"""A part of a figure, as plotly.js takes it."""
NEUTRAL = "#8C8C8C"
"""Visible on white and on black."""


class Style(NamedTuple):
    """How a phase is drawn: plotly's colour and symbol, and the symbol as text."""

    colour: str
    symbol: str
    glyph: str


PHASE_STYLES = {
    "forward": Style("#56B4E9", "circle", "○"),
    "backward": Style("#0072B2", "square", "□"),
    "clip": Style("#D55E00", "diamond", "◇"),
    "noise": Style("#CC79A7", "triangle-up", "△"),
    "optimizer": Style("#009E73", "triangle-down", "▽"),
    OUTSIDE: Style(NEUTRAL, "star", "☆"),
}

OWN_COLOURS = {
    "standard": "#7F8790",
    "dpsgd": "#EE6677",
    "dpsgd_ghost": "#4F86BB",
    "dpsgd_fgc": "#BB4A93",
}
OTHER_COLOURS = ("#228833", "#B8A522", "#3AA9C9", "#A0653B")


def trainer_colours(trainers: Iterable[str]) -> dict[str, str]:
    """A colour for each trainer: dpbench's own have always the same, others those left over."""
    present = set(trainers)
    others = zip(sorted(present - OWN_COLOURS.keys()), cycle(OTHER_COLOURS), strict=False)
    own = {name: colour for name, colour in OWN_COLOURS.items() if name in present}
    return own | dict(others)


class Panel(NamedTuple):
    """One drawing of a chart, as plotly's JSON; what all have in common the page adds."""

    title: str
    figure: Json


class Key(NamedTuple):
    """An entry of a legend; without a colour it has that of the text."""

    glyph: str
    text: str
    colour: str | None = None


@dataclass(frozen=True)
class Chart:
    """A section of the page.

    ``premise`` is where its numbers come from, ``keys`` its legend, ``table`` the same numbers
    as text; ``notes`` alone say why there is nothing to draw.
    """

    id: str
    title: str
    premise: str
    panels: Sequence[Panel] = ()
    keys: Sequence[Key] = ()
    table: Table | None = None
    notes: Sequence[str] = ()


def bar_chart(
    chart: Chart,
    rows: pd.DataFrame,
    colours: Mapping[str, str],
    scale: str,
    caption: str,
    *,
    unit: str = "GB",
    columns: Mapping[str, Shown] | None = None,
    stacked: bool = False,
    line: float | None = None,
) -> Chart:
    """A chart with a panel for each cell of the grid, in it bars for each trainer, and its table.

    Args:
        chart: without panels, legend and table.
        rows: one for each case, with the columns that become bars, and ``label``, which stands
            at ``end``.
        colours: of the bars, by column.
        scale: what the axis says; all panels have the same one.
        caption: of the table.
        unit: of the bars; one of `UNITS`.
        columns: what the table has beside the bars.
        stacked: whether a trainer's bars stand in one row.
        line: where a dashed line stands.
    """
    size, write = UNITS[unit]
    longest = rows.end.max() / size or 1
    # A label that begins at 0, where nothing was measured, needs no room beside the bars.
    room = 12 + CHARACTER * max(map(len, rows.label[rows.end.notna()]), default=0)
    height = ROW if stacked else max(ROW, BAR * (len(colours) + 1))
    layout: Json = {
        "margin": {"l": 10, "r": room, "t": 6, "b": 46},
        "barmode": "stack" if stacked else "group",
        "bargap": 0.25,
        "xaxis": {"title": {"text": scale}, "range": [0, longest]},
    }
    if line is not None:
        place = {"x0": line / size, "x1": line / size, "y0": 0, "y1": 1, "yref": "paper"}
        dashed = {"color": NEUTRAL, "dash": "dash", "width": 1.5}
        layout["shapes"] = [{"type": "line", "line": dashed, **place}]
    panels = []
    for title, of_cell in cells(rows):
        names = of_cell.trainer.tolist()
        layout["yaxis"] = {
            "type": "category",
            "autorange": "reversed",
            "ticks": "",
            "tickmode": "array",
            "tickvals": names,
            "ticktext": [plain(name, LONGEST_NAME) for name in names],
        }
        labels = {
            "type": "scatter",
            "mode": "text",
            "y": names,
            "x": (of_cell.end.fillna(0) / size).tolist(),
            "text": of_cell.label.tolist(),
            "textposition": "middle right",
            "cliponaxis": False,
            "hoverinfo": "skip",
        }
        traces = [_bars(of_cell, name, colour, unit) for name, colour in colours.items()]
        drawing = {"height": 58 + height * len(names), **layout}
        panels.append(Panel(title, {"data": [*traces, labels], "layout": drawing}))
    keys = [Key("■", name, colour) for name, colour in colours.items()] if len(colours) > 1 else []
    shown: dict[str, Shown] = {f"{name}, {unit}": (name, write) for name in colours}
    measured = rows.dropna(subset=[*colours, "end"], how="all")
    table = Table.of(caption, measured, {**CASE, **shown, **(columns or {})})
    return replace(chart, panels=panels, keys=keys, table=table)


def _bars(rows: pd.DataFrame, name: str, colour: str, unit: str) -> Json:
    size, write = UNITS[unit]
    values = rows[name].astype(object).where(rows[name].notna(), None).tolist()
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": rows.trainer.tolist(),
        "x": [None if value is None else value / size for value in values],
        "marker": {"color": colour},
        "hoverinfo": "text",
        "hovertext": [
            "" if value is None else lines(trainer, f"{name}: {write(value)} {unit}")
            for trainer, value in zip(rows.trainer, values, strict=True)
        ],
    }


def log_axis(title: str, seen: list[float]) -> Json:
    """An axis that is logarithmic, of what is seen; one scale for all panels."""
    ends = [math.log10(min(seen) / 1.6), math.log10(max(seen) * 1.6)] if seen else [0, 1]
    return {"title": {"text": title}, "type": "log", "range": ends, "dtick": 1}


def cells(rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Rows by cell of the grid, in the order in which they come, with the title of each."""
    for (title, batch, seq), group in rows.groupby(["title", "batch_size", "seq_len"], sort=False):
        yield f"{title}, batch {batch}{f' × sequence {seq}' if seq else ''}", group


def plain(text: str, longest: int = LONGEST) -> str:
    """Text for plotly, which would otherwise read tags and entities in it; long ones are cut."""
    shown = text if len(text) <= longest else f"{text[: longest - 1]}…"
    return html.escape(shown, quote=False)


def lines(*texts: object) -> str:
    """Lines of a text that appears when the pointer rests on a mark."""
    return "<br>".join(html.escape(str(text), quote=False) for text in texts)


times = "{:.2f}×".format
"""How a ratio is written."""
