"""What all charts are drawn with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pandas as pd
import plotly.graph_objects as go

from dpbench.show.html.data import DRAM, Basis, basis_of
from dpbench.show.html.palette import Style, styles
from dpbench.show.html.parts import Key, Panel, plain
from dpbench.show.html.source import Source, failures_of, summary_of


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


GIGA = 1e9
ROW = 30
"""Height of a bar with its gap, px."""


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


def axis(title: str, **settings: Any) -> dict[str, Any]:
    """An axis with its unit in the title."""
    return {"title": {"text": title, "standoff": 8}, "automargin": True, **settings}


def trainer_axis(trainers: Iterable[str]) -> dict[str, Any]:
    """Trainers from top to bottom; long names are cut, and no name is read as markup."""
    names = list(trainers)
    return {
        "type": "category",
        "autorange": "reversed",
        "automargin": True,
        "ticks": "",
        "tickmode": "array",
        "tickvals": names,
        "ticktext": [plain(name) for name in names],
    }


def trainer_keys(look: Mapping[str, Style], trainers: Iterable[str]) -> list[Key]:
    """The legend of a chart with these trainers."""
    present = set(trainers)
    return [Key(style.glyph, name, style.colour) for name, style in look.items() if name in present]


def cells(found: pd.DataFrame) -> Iterator[tuple[str, int, int, pd.DataFrame]]:
    """Rows by configuration, batch size and sequence length, in the order in which they come."""
    for key, rows in found.groupby(["title", "batch_size", "seq_len"], sort=False):
        title, batch, seq = cast("tuple[str, int, int]", key)
        yield title, batch, seq, rows
