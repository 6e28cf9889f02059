"""What all charts are drawn with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pandas as pd
import plotly.graph_objects as go

from dpbench.show.html.data import DRAM, Basis, basis_of
from dpbench.show.html.palette import Style, styles
from dpbench.show.html.parts import LONGEST_NAME, Key, Panel, plain
from dpbench.show.html.source import Source, cell_label, failures_of, summary_of

GIGA = 1e9

ROW = 30
"""Height of a bar with its gap, px."""

CHARACTER = 7
"""Width of a character in a label, px."""


@dataclass(frozen=True)
class Material:
    """What the charts of one page share.

    Args:
        summary: of `summary_of`.
        failed: of `failures_of`.
        basis: which bytes most charts are about.
        look: the style of every trainer on the page.
    """

    summary: pd.DataFrame = field(repr=False)
    failed: pd.DataFrame = field(repr=False)
    basis: Basis
    look: Mapping[str, Style] = field(repr=False)

    @classmethod
    def of(cls, sources: Sequence[Source]) -> Material:
        """The material of some runs."""
        summary = summary_of(sources)
        failed = failures_of(sources, summary)
        trainers = {*summary.trainer, *failed.trainer}
        return cls(summary, failed, basis_of(summary) or DRAM, styles(trainers))


def panel(title: str, traces: list[Any], height: int, **layout: Any) -> Panel:
    """A drawing without plotly's own template: the page brings its colours, light and dark."""
    settings = {
        "template": None,
        "height": height,
        "margin": {"l": 10, "r": 16, "t": 10, "b": 46},
        "showlegend": False,
        "dragmode": False,
        "hovermode": "closest",
    }
    figure = go.Figure(traces, go.Layout(**{**settings, **layout})).to_plotly_json()
    del figure["layout"]["template"]
    return Panel(title, figure, height)


def bar_panel(
    title: str, traces: list[Any], trainers: Sequence[str], labels: Sequence[str], **layout: Any
) -> Panel:
    """A drawing of one row a trainer, with room at its right for the longest of the labels."""
    room = 12 + CHARACTER * max(map(len, labels), default=0)
    return panel(
        title,
        traces,
        58 + ROW * len(trainers),
        margin={"l": 10, "r": room, "t": 6, "b": 46},
        yaxis=name_axis(trainers),
        **layout,
    )


def label_trace(trainers: Sequence[str], places: Sequence[float], labels: Sequence[str]) -> Any:
    """Text that stands at the right of some places."""
    return go.Scatter(
        y=trainers,
        x=places,
        text=labels,
        mode="text",
        textposition="middle right",
        cliponaxis=False,
        hoverinfo="skip",
    )


def bar_trace(
    name: str, places: Sequence[str], amounts: Sequence[float | None], colour: str, said: list[str]
) -> Any:
    """Bars of one colour, and what each says when the pointer rests on it."""
    return go.Bar(
        y=places,
        x=amounts,
        orientation="h",
        name=name,
        marker={"color": colour},
        hoverinfo="text",
        hovertext=said,
    )


def trainer_trace(
    x: Sequence[float], y: Sequence[float], style: Style, line: float, size: float, said: list[str]
) -> Any:
    """A trainer's points, joined by a line of so many px."""
    return go.Scatter(
        x=x,
        y=y,
        mode="lines+markers",
        line={"color": style.colour, "dash": style.dash, "width": line},
        marker={"symbol": style.symbol, "size": size},
        cliponaxis=False,
        hoverinfo="text",
        hovertext=said,
    )


def level(y: float, colour: str, dash: str) -> dict[str, Any]:
    """A line across a panel."""
    line = {"color": colour, "dash": dash, "width": 1.5}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": line}


def axis(title: str, **settings: Any) -> dict[str, Any]:
    """An axis with its unit in the title."""
    return {"title": {"text": title, "standoff": 8}, "automargin": True, **settings}


def name_axis(names: Iterable[str]) -> dict[str, Any]:
    """Names from top to bottom; long ones are cut, and none is read as markup."""
    values = list(names)
    return {
        "type": "category",
        "autorange": "reversed",
        "automargin": True,
        "ticks": "",
        "tickmode": "array",
        "tickvals": values,
        "ticktext": [plain(name, LONGEST_NAME) for name in values],
    }


def trainer_keys(look: Mapping[str, Style], trainers: Iterable[str]) -> list[Key]:
    """The legend of a chart with these trainers."""
    present = set(trainers)
    return [Key(style.glyph, name, style.colour) for name, style in look.items() if name in present]


def cells(rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Rows by cell of the grid, in the order in which they come, with the title of each."""
    for key, group in rows.groupby(["title", "batch_size", "seq_len"], sort=False):
        title, batch, seq = cast("tuple[str, int, int]", key)
        yield f"{title}, {cell_label(batch, seq)}", group
