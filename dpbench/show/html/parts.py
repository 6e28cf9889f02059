"""What the page is made of: charts of panels, tables of cells, and how they are written."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pandas as pd
from pandas.api.types import is_numeric_dtype

from dpbench.case import ALL_PHASES
from dpbench.results.rows import STEP
from dpbench.show.layout import gigabytes, written

LONGEST = 26
"""Characters of a text in a chart; the tables have it whole."""

LONGEST_NAME = 20
"""Characters of a name at the left of a chart: a phone has no room for more."""


class Cell(NamedTuple):
    """A cell of a table: what a person reads, and the exact value that it is sorted by."""

    text: str
    value: float | str


@dataclass(frozen=True)
class DataTable:
    """A table that can be sorted. ``numeric`` says which columns are right-aligned."""

    caption: str
    headers: list[str]
    rows: list[list[Cell]] = field(repr=False)
    numeric: list[bool] = field(repr=False)

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


@dataclass(frozen=True)
class Panel:
    """One drawing of a chart: plotly's JSON, its height in px, what it says in words."""

    title: str
    figure: Mapping[str, Any] = field(repr=False)
    height: int


class Key(NamedTuple):
    """An entry of a legend; without a colour it has that of the text."""

    glyph: str
    text: str
    colour: str | None = None


@dataclass(frozen=True)
class Chart:
    """A section of the page.

    Args:
        id: its anchor.
        title: its heading.
        premise: where its numbers come from.
        panels: its drawings.
        keys: its legend.
        table: the same numbers as text.
        notes: what must be known to read it right.
        missing: why there is nothing to draw, if there is not.
        width: of a panel at least, px.
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


def _cell(value: Any, write: Writer) -> Cell:
    if pd.isna(value):
        return Cell(written(None, write), "")
    exact = value.item() if hasattr(value, "item") else value
    return Cell(write(exact), exact)


def plain(text: object, longest: int = LONGEST) -> str:
    """Text for plotly, which would otherwise read tags and entities in it; long ones are cut."""
    whole = str(text)
    shown = whole if len(whole) <= longest else f"{whole[: longest - 1]}…"
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


Writer = Callable[[Any], str]

WRITERS: dict[str, Writer] = {
    **dict.fromkeys(("value", "logical", "peak", "bytes"), gigabytes),
    **dict.fromkeys((*ALL_PHASES, STEP), gigabytes),
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
