"""What the page is made of: colours, charts of panels in plotly's JSON, tables of cells.

Phases have the colours of Okabe and Ito (https://jfly.uni-koeln.de/color/), trainers those of
Paul Tol's "bright" scheme (https://personal.sron.nl/~pault/), some a shade off for contrast on
white and on black. Both stay apart under the common kinds of colour blindness; trainers have a
symbol and a dash of their own as well.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pandas as pd
from pandas.api.types import is_numeric_dtype

from dpbench.case import ALL_PHASES, OUTSIDE
from dpbench.metrics import METRICS
from dpbench.results.outcome import NOT_TRIED
from dpbench.results.rows import STEP
from dpbench.show.html.data import DRAM, Basis, Source, basis_of, failures_of, summary_of
from dpbench.show.layout import gigabytes, written

GIGA = 1e9

ROW = 30
"""Height of a bar with its gap, px."""

CHARACTER = 7
"""Width of a character in a label, px."""

LONGEST = 26
"""Characters of a text in a chart; the tables have it whole."""

LONGEST_NAME = 20
"""Characters of a name at the left of a chart: a phone has no room for more."""

Json = dict[str, Any]
"""A part of a figure, as plotly.js takes it."""

# --- colours ---------------------------------------------------------------------------------

NEUTRAL = "#8C8C8C"
"""Visible on white and on black."""


class Style(NamedTuple):
    """How a phase or a trainer is drawn: plotly's colour and symbol, the symbol as text, a dash."""

    colour: str
    symbol: str
    glyph: str
    dash: str = "solid"


PHASE_STYLES = {
    "forward": Style("#56B4E9", "circle", "○"),
    "backward": Style("#0072B2", "square", "□"),
    "clip": Style("#D55E00", "diamond", "◇"),
    "noise": Style("#CC79A7", "triangle-up", "△"),
    "optimizer": Style("#009E73", "triangle-down", "▽"),
    OUTSIDE: Style(NEUTRAL, "star", "☆"),
}

_STYLES = (
    Style("#7F8790", "circle", "●", "dot"),
    Style("#EE6677", "square", "■", "solid"),
    Style("#4F86BB", "diamond", "◆", "dash"),
    Style("#BB4A93", "triangle-up", "▲", "dashdot"),
    Style("#228833", "x", "✖", "longdash"),
    Style("#B8A522", "star", "★", "longdashdot"),
    Style("#3AA9C9", "hexagon", "⬢", "solid"),
    Style("#A0653B", "cross", "✚", "dash"),
)

OURS = ("standard", "dpsgd", "dpsgd_ghost", "dpsgd_fgc")
"""The trainers with the first styles; dpbench's own, in the order in which tables have them."""


def styles(trainers: Iterable[str]) -> dict[str, Style]:
    """A style for each trainer: dpbench's own have always the same, others those left over."""
    present = set(trainers)
    left = _STYLES[len(OURS) :]
    own = {name: style for name, style in zip(OURS, _STYLES, strict=False) if name in present}
    others = enumerate(sorted(present - set(OURS)))
    return own | {name: left[place % len(left)] for place, name in others}


# --- charts ----------------------------------------------------------------------------------


class Panel(NamedTuple):
    """One drawing of a chart: plotly's JSON and its height in px."""

    title: str
    figure: Json
    height: int


class Key(NamedTuple):
    """An entry of a legend; without a colour it has that of the text."""

    glyph: str
    text: str
    colour: str | None = None


@dataclass(frozen=True)
class Chart:
    """A section of the page.

    ``premise`` is where its numbers come from, ``keys`` its legend, ``table`` the same numbers
    as text, ``missing`` why there is nothing to draw, ``width`` that of a panel at least, px.
    """

    id: str
    title: str
    premise: str = ""
    panels: list[Panel] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    table: DataTable | None = None
    notes: list[str] = field(default_factory=list)
    missing: str = ""
    width: int = 440


@dataclass(frozen=True)
class Material:
    """What the charts of one page share: frames, colours, and which bytes they are about.

    ``expected`` says by metric between which ratios to standard the reader expects it.
    """

    sources: Sequence[Source]
    summary: pd.DataFrame
    failed: pd.DataFrame
    basis: Basis
    look: Mapping[str, Style]
    expected: Mapping[str, tuple[float, float]]

    @classmethod
    def of(
        cls, sources: Sequence[Source], expected: Mapping[str, tuple[float, float]] | None = None
    ) -> Material:
        """The material of some runs; by default with the expectations of `METRICS`."""
        summary = summary_of(sources)
        failed = failures_of(sources, summary)
        look = styles({*summary.trainer, *failed.trainer})
        limits = METRICS.expected() if expected is None else expected
        return cls(sources, summary, failed, basis_of(summary) or DRAM, look, limits)

    def keys(self, trainers: Iterable[str]) -> list[Key]:
        """The legend of a chart with these trainers."""
        shown = set(trainers)
        return [Key(s.glyph, name, s.colour) for name, s in self.look.items() if name in shown]


def panel(title: str, traces: list[Json], height: int, **layout: Any) -> Panel:
    """A drawing without plotly's own template: the page brings its colours, light and dark."""
    settings = {
        "height": height,
        "margin": {"l": 10, "r": 16, "t": 10, "b": 46},
        "showlegend": False,
        "dragmode": False,
        "hovermode": "closest",
    }
    return Panel(title, {"data": traces, "layout": {**settings, **layout}}, height)


def bar_panel(
    title: str, traces: list[Json], ends: Json, labels: Sequence[str], **layout: Any
) -> Panel:
    """A drawing of one row a trainer, with room at its right for the longest of the labels.

    ``ends`` are the trainers (``y``), and where (``x``) which label (``text``) stands.
    """
    labelled = {
        **ends,
        "type": "scatter",
        "mode": "text",
        "textposition": "middle right",
        "cliponaxis": False,
        "hoverinfo": "skip",
    }
    room = 12 + CHARACTER * max(map(len, labels), default=0)
    return panel(
        title,
        [*traces, labelled],
        58 + ROW * len(ends["y"]),
        margin={"l": 10, "r": room, "t": 6, "b": 46},
        yaxis=name_axis(ends["y"]),
        **layout,
    )


def bars(
    name: str, places: Sequence[str], amounts: Sequence[float | None], colour: str, said: list[str]
) -> Json:
    """Bars of one colour, and what each says when the pointer rests on it."""
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": places,
        "x": amounts,
        "marker": {"color": colour},
        "hoverinfo": "text",
        "hovertext": said,
    }


def marks(x: Sequence[float], y: Sequence[Any], marker: Json, said: list[str], **more: Any) -> Json:
    """Points, and what each says when the pointer rests on it."""
    return {
        "type": "scatter",
        "mode": "markers",
        "x": x,
        "y": y,
        "marker": marker,
        "cliponaxis": False,
        "hoverinfo": "text",
        "hovertext": said,
        **more,
    }


def line(x: Sequence[Any], y: Sequence[Any], width: float) -> Json:
    """A grey line that says nothing."""
    drawn = {"color": NEUTRAL, "width": width}
    return {"type": "scatter", "mode": "lines", "x": x, "y": y, "line": drawn, "hoverinfo": "skip"}


def joined_marks(
    points: pd.DataFrame, look: Mapping[str, Style], width: float, size: float
) -> Iterator[Json]:
    """Each trainer's points, joined by a line of so many px.

    The columns are ``trainer``, ``x``, ``y``, ``said`` and, where text stands at the marks,
    ``label``.
    """
    for name, group in points.groupby("trainer", sort=False):
        style, mode = look[str(name)], "lines+markers"
        joined = {"color": style.colour, "dash": style.dash, "width": width}
        marker = {"symbol": style.symbol, "size": size}
        text = {}
        if "label" in group:
            mode += "+text"
            text = {"text": group.label.tolist(), "textfont": {"size": 11}}
            text["textposition"] = "top center"
        x, y, said = (group[name].tolist() for name in ("x", "y", "said"))
        yield marks(x, y, marker, said, mode=mode, line=joined, **text)


def level(y: float, dash: str) -> Json:
    """A line across a panel."""
    drawn = {"color": NEUTRAL, "dash": dash, "width": 1.5}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": drawn}


def upright(x: float, dash: str) -> Json:
    """A line from bottom to top of a panel."""
    drawn = {"color": NEUTRAL, "dash": dash, "width": 1.5}
    return {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": x, "x1": x, "line": drawn}


def axis(title: str, **settings: Any) -> Json:
    """An axis with its unit in the title."""
    return {"title": {"text": title, "standoff": 8}, "automargin": True, **settings}


def name_axis(names: Sequence[str]) -> Json:
    """Names from top to bottom; long ones are cut, and none is read as markup."""
    return {
        "type": "category",
        "autorange": "reversed",
        "automargin": True,
        "ticks": "",
        "tickmode": "array",
        "tickvals": names,
        "ticktext": [plain(name, LONGEST_NAME) for name in names],
    }


def cells(rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Rows by cell of the grid, in the order in which they come, with the title of each."""
    for (title, batch, seq), group in rows.groupby(["title", "batch_size", "seq_len"], sort=False):
        yield f"{title}, {cell_label(batch, seq)}", group


# --- tables and text -------------------------------------------------------------------------

Writer = Callable[[Any], str]


class Cell(NamedTuple):
    """A cell of a table: what a person reads, and the exact value that it is sorted by."""

    text: str
    value: float | str


@dataclass(frozen=True)
class DataTable:
    """A table that can be sorted. ``numeric`` says which columns are right-aligned."""

    caption: str
    headers: list[str]
    rows: list[list[Cell]]
    numeric: list[bool]

    @classmethod
    def of(
        cls, caption: str, frame: pd.DataFrame, headers: Mapping[str, str], **write: Writer
    ) -> DataTable:
        """The table of a frame's columns under these headers, written as `WRITERS` says."""
        writers = {name: {**WRITERS, **write}.get(name, str) for name in headers}
        columns = [[_cell(v, writer) for v in frame[name]] for name, writer in writers.items()]
        rows = [list(row) for row in zip(*columns, strict=True)]
        numeric = [w is not str or is_numeric_dtype(frame[name]) for name, w in writers.items()]
        return cls(caption, list(headers.values()), rows, numeric)


def _cell(value: Any, write: Writer) -> Cell:
    if pd.isna(value):
        return Cell(written(None, write), "")
    exact = value.item() if hasattr(value, "item") else value
    return Cell(write(exact), exact)


def fate(error: str) -> str:
    """What became of a case with this error: ``skipped`` before it cost anything, or ``failed``."""
    return "skipped" if error == NOT_TRIED else "failed"


def cell_label(batch_size: object, seq_len: object) -> str:
    """How the page names a cell of the grid."""
    return f"batch {batch_size}" + (f" × sequence {seq_len}" if seq_len else "")


def plain(text: str, longest: int = LONGEST) -> str:
    """Text for plotly, which would otherwise read tags and entities in it; long ones are cut."""
    shown = text if len(text) <= longest else f"{text[: longest - 1]}…"
    return html.escape(shown, quote=False)


def lines(*texts: object) -> str:
    """Lines of a text that appears when the pointer rests on a mark."""
    return "<br>".join(html.escape(str(text), quote=False) for text in texts)


def times(ratio: float) -> str:
    """A ratio, e.g. ``4.52×``."""
    return f"{ratio:.2f}×"


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds."""
    return f"{seconds * 1e3:.1f}"


def exact(value: float) -> str:
    """A number as it is, whole ones with their thousands apart."""
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 2**53 else repr(value)


WRITERS: dict[str, Writer] = {
    **dict.fromkeys(("value", "logical", "peak", "bytes", *ALL_PHASES, STEP), gigabytes),
    **dict.fromkeys(("ratio", "min", "max"), times),
    **dict.fromkeys(("seconds", "least_seconds"), milliseconds),
    "flops": lambda operations: gigabytes(operations / 1e3),  # TFLOP
    "intensity": "{:.1f}".format,
    "over_logical": "{:.3f}".format,
    "percent": "{:.0f}".format,
}
"""How the page's tables write a frame's columns; text is written as it is."""

CASE = {
    "title": "configuration",
    "batch_size": "batch",
    "seq_len": "sequence",
    "trainer": "trainer",
}
"""The columns that name a case."""
