"""The parts of charts: colours, and panels in plotly's JSON.

The colours of phases are by Okabe and Ito (https://jfly.uni-koeln.de/color/), who chose them for
readers with colour blindness, too. Here, some are lighter or darker, for contrast on white and on
black.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from dpbench.core.case import OUTSIDE
from dpbench.results.rows import STEP
from dpbench.show.layout import ABSENT, Shown, Table, gigabytes, step_milliseconds

NAMES: Mapping[str, Shown] = {
    "configuration": ("title", str),
    "batch": ("batch_size", lambda size: str(size or ABSENT)),
    "sequence": ("seq_len", lambda length: str(length or ABSENT)),
    "trainer": ("trainer", str),
}
"""The columns that name a case. A script has a batch size only if the user gives one."""

UNITS: Mapping[str, tuple[float, Callable[[float], str]]] = {
    "GB": (1e9, gigabytes),
    "ms": (1e-3, step_milliseconds),
    "×": (1.0, "{:.2f}".format),
}
"""The units of bars. Each unit has its size in base units, and the function that writes values."""

ROW, BAR, CHARACTER = 30, 13, 7
"""The height of a line of stacked bars, the height of a grouped bar, and the width of a character,
in pixels."""

LONGEST_NUMBER = 6
"""The most characters of a number at the end of a bar, for the margin of the chart."""

END_OF_BAR = {"textposition": "outside", "cliponaxis": False, "constraintext": "none"}
"""Plotly's options that put a number at the end of a bar."""

LONGEST = 20
"""The most characters of a name in a chart, so that the chart fits a phone. Tables have full
names."""

Json = dict[str, Any]
"""A figure or a part of a figure, in the form that plotly.js takes."""
NEUTRAL = "#8C8C8C"
"""A grey that is visible on white and on black."""


PHASE_COLOURS = {
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "clip": "#D55E00",
    "noise": "#CC79A7",
    "optimizer": "#009E73",
    OUTSIDE: NEUTRAL,
    STEP: "#7F8790",
}


@dataclass(frozen=True)
class Chart:
    """A section of the page: a table, and figures that draw its numbers.

    Args:
        id: the identifier of the section.
        basis: the origin of the numbers, e.g. "measured by hardware counters".
        table: the numbers. If there are no numbers, the notes of the table say why.
        panels: plotly's figures by title. The page adds the settings that all figures share.
        colours: the colours of the legend by name.
    """

    id: str
    basis: str
    table: Table
    panels: Mapping[str, Json] = field(default_factory=dict)
    colours: Mapping[str, str] = field(default_factory=dict)


def bar_chart(
    id: str,
    title: str,
    basis: str,
    rows: pd.DataFrame,
    colours: Mapping[str, str],
    scale: str,
    *,
    unit: str = "GB",
    columns: Mapping[str, Shown] | None = None,
    notes: Sequence[str] = (),
    stacked: bool = False,
    line: float | None = None,
) -> Chart:
    """Draw a panel for each cell of the grid, with bars for each trainer.

    Args:
        id: the identifier of the section.
        title: the title of the section and of its table.
        basis: the origin of the numbers.
        rows: a row for each case. The text in column ``label`` is drawn at the value in ``end``.
        colours: the columns of ``rows`` that are drawn as bars, with their colours.
        scale: the title of the axis of numbers.
        unit: the unit of the bars, a key of `UNITS`.
        columns: columns of the table in addition to the bars.
        notes: the notes below the table.
        stacked: whether the bars of a trainer are drawn end to end on one line.
        line: the value at which a dashed line is drawn, or None.
    """
    size, write = UNITS[unit]
    # The label of a case without bars begins at 0 and fits into the panel, so it needs no margin.
    longest = max(map(len, rows.label[rows.end.notna()]), default=0)
    layout: Json = {
        "margin": {"r": 12 + CHARACTER * (longest if stacked else max(longest, LONGEST_NUMBER))},
        "barmode": "stack" if stacked else "group",
        "bargap": 0.25,
    }
    if line is not None:
        place = {"x0": line / size, "x1": line / size, "y0": 0, "y1": 1, "yref": "paper"}
        dashed = {"color": NEUTRAL, "dash": "dash", "width": 1.5}
        layout["shapes"] = [{"type": "line", "line": dashed, **place}]
    height = ROW if stacked else max(ROW, BAR * (len(colours) + 1))
    panels: dict[str, Json] = {
        cell: {
            "data": [*_bars(of_cell, colours, unit, stacked)],
            "layout": layout
            | _names(of_cell.trainer.tolist(), height)
            | {"xaxis": {"title": {"text": scale}, "range": [0, of_cell.end.max() / size or 1]}},
        }
        for cell, of_cell in cells(rows)
    }
    numbers = {f"{name}, {unit}": (name, write) for name in colours} | dict(columns or {})
    known = rows.dropna(subset=[name for name, _ in numbers.values()], how="all")
    table = Table.of(title, known, {**NAMES, **numbers}, notes)
    return Chart(id, basis, table, panels, colours if len(colours) > 1 else {})


def _names(names: list[str], height: int) -> Json:
    """Make the axis with the names of trainers. ``height`` is for one trainer, in pixels."""
    shown = [plain(name) for name in names]
    axis: Json = {"type": "category", "categoryarray": names, "tickvals": names, "ticktext": shown}
    return {"height": 58 + height * len(names), "yaxis": {**axis, "autorange": "reversed"}}


def _bars(
    rows: pd.DataFrame, colours: Mapping[str, str], unit: str, stacked: bool
) -> Iterator[Json]:
    """Yield the bars of each colour, then the labels. Stacked bars are drawn without numbers."""
    size, write = UNITS[unit]
    for name, colour in colours.items():
        known = rows.dropna(subset=name)
        if known.empty:  # a trace without bars would hide the grid in plotly.js
            continue
        texts = [f"{name}: {write(value)} {unit}" for value in known[name]]
        yield {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "x": (known[name] / size).tolist(),
            "y": known.trainer.tolist(),
            "marker": {"color": colour},
            "hoverinfo": "text",
            "hovertext": list(map(lines, known.trainer, texts)),
            **({} if stacked else {"text": [*map(write, known[name])], **END_OF_BAR}),
        }
    yield {
        "type": "scatter",
        "mode": "text",
        "x": (rows.end.fillna(0) / size).tolist(),
        "y": rows.trainer.tolist(),
        "text": rows.label.tolist(),
        "textposition": "middle right",
        "cliponaxis": False,
        "hoverinfo": "skip",
    }


def cells(rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the title and the rows of each cell of the grid, in order of appearance."""
    for (title, batch, seq), group in rows.groupby(["title", "batch_size", "seq_len"], sort=False):
        size = [f"{name} {n}" for name, n in (("batch", batch), ("sequence", seq)) if n]
        yield ", ".join(filter(None, (str(title), " × ".join(size)))), group


def plain(text: str, longest: int = LONGEST) -> str:
    """Shorten a name, and escape HTML in it so that plotly shows the characters unchanged."""
    shown = text if len(text) <= longest else f"{text[: longest - 1]}…"
    return html.escape(shown, quote=False)


def lines(*texts: object) -> str:
    """Join lines to the HTML text of a tooltip."""
    return "<br>".join(html.escape(str(text), quote=False) for text in texts)


times = "{:.2f}×".format
"""The function that writes a ratio, e.g. ``1.07×``."""
