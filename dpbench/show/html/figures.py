"""The parts of charts: colours, and panels in plotly's JSON.

Phases have the colours of Okabe and Ito (https://jfly.uni-koeln.de/color/), ranks those of Paul
Tol's "bright" scheme (https://personal.sron.nl/~pault/), some a shade off for contrast on white and
on black. Both stay apart under the common kinds of colour blindness.
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
"""The columns that name a case; the batch size of a script is only known if it was given."""

UNITS: Mapping[str, tuple[float, Callable[[float], str]]] = {
    "GB": (1e9, gigabytes),
    "ms": (1e-3, step_milliseconds),
    "%": (0.01, lambda share: f"{share * 100:.0f}"),
    "×": (1.0, "{:.2f}".format),
}
"""Units of bars: their size, and how a value is written."""

ROW, BAR, CHARACTER = 30, 13, 7
"""Heights of a stacked bar and of a grouped bar, and width of a character, in pixels."""

LONGEST_NUMBER = 6
"""Characters of a number beside its bar."""

BESIDE = {"textposition": "outside", "cliponaxis": False, "constraintext": "none"}
"""Where a bar's number stands."""

LONGEST = 20
"""Characters of a name in a chart, to fit a phone; tables have the whole name."""

Json = dict[str, Any]
"""A part of a figure, as plotly.js takes it."""
NEUTRAL = "#8C8C8C"
"""Visible on white and on black."""


PHASE_COLOURS = {
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "clip": "#D55E00",
    "noise": "#CC79A7",
    "optimizer": "#009E73",
    OUTSIDE: NEUTRAL,
    STEP: "#7F8790",
}

RANK_COLOURS = ("#7F8790", "#EE6677", "#4F86BB", "#BB4A93", "#228833", "#B8A522", "#3AA9C9")


@dataclass(frozen=True)
class Chart:
    """A section of the page: a table that is drawn as well.

    ``basis`` is where its numbers come from, ``panels`` are plotly's figures by title, to which
    the page adds what they have in common, ``colours`` is their legend. If there is nothing to
    draw, the table has no lines, and its notes say why.
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
    """A chart with a panel for each cell of the grid, in it bars for each trainer.

    ``rows`` are cases. The columns that ``colours`` names become bars, in one row if ``stacked``,
    in a ``unit`` of `UNITS`; ``label`` stands at ``end``, and a dashed line at ``line``. Each panel
    has a scale of its own; its axis says what ``scale`` does. The table has ``columns`` beside the
    bars.
    """
    size, write = UNITS[unit]
    # A label that begins at 0, where nothing was measured, needs no room beside the bars.
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
    """The axis of trainers at the left, from the top, each of some height."""
    shown = [plain(name) for name in names]
    axis: Json = {"type": "category", "categoryarray": names, "tickvals": names, "ticktext": shown}
    return {"height": 58 + height * len(names), "yaxis": {**axis, "autorange": "reversed"}}


def _bars(
    rows: pd.DataFrame, colours: Mapping[str, str], unit: str, stacked: bool
) -> Iterator[Json]:
    """The bars of each colour, numbered if side by side, then the labels at their ends."""
    size, write = UNITS[unit]
    for name, colour in colours.items():
        known = rows.dropna(subset=name)
        if known.empty:  # plotly.js draws no grid for a trace without bars
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
            **({} if stacked else {"text": [*map(write, known[name])], **BESIDE}),
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
    """Rows by cell of the grid, in the order in which they come, with the title of each."""
    for (title, batch, seq), group in rows.groupby(["title", "batch_size", "seq_len"], sort=False):
        size = [f"{name} {n}" for name, n in (("batch", batch), ("sequence", seq)) if n]
        yield ", ".join(filter(None, (str(title), " × ".join(size)))), group


def plain(text: str, longest: int = LONGEST) -> str:
    """A name for plotly: tags and entities are escaped, long names are cut."""
    shown = text if len(text) <= longest else f"{text[: longest - 1]}…"
    return html.escape(shown, quote=False)


def lines(*texts: object) -> str:
    """The text of a tooltip, in lines."""
    return "<br>".join(html.escape(str(text), quote=False) for text in texts)


times = "{:.2f}×".format
"""How a ratio is written."""
