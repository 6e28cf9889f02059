"""A picture in SVG of the ratios of a step to the baseline, drawn without a browser."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dpbench.core.errors import ConfigurationError
from dpbench.results.run import Run
from dpbench.show.html.charts import ratios
from dpbench.show.html.data import PageData, labelled
from dpbench.show.html.figures import Chart
from dpbench.show.view import TableOptions

WIDTH = 9.0
"""The width of a picture in inches. An inch is 72 units of the SVG."""

ROW, FRAME = 0.17, 1.15
"""The height of a bar, and the total height of the title and the axis of a panel, in inches."""

TEXT, LINE = "#010203", "#040506"
"""Placeholders for the colours of text and lines, which `_text` replaces with the colours of
`STYLE`."""

STYLE = """<style>
:root { --text: #1b1f24; --line: #9aa1aa; }
@media (prefers-color-scheme: dark) { :root { --text: #e8eaed; --line: #6b737c; } }
</style>
"""

SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "dpbench",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": LINE,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def svg(runs: Sequence[Run], view: TableOptions) -> str:
    """Draw ratios to the baseline. This is the output for ``.svg``.

    With one version of Matplotlib, the same runs always give the same text. The picture has colours
    for light pages and for dark pages.
    """
    named = labelled((run.name, run.document) for run in runs)
    chart = ratios(PageData(named, view.expected))
    if chart is None:
        raise ConfigurationError(f"{', '.join(run.name for run in runs)}: no ratio to draw")
    with mpl.rc_context(SETTINGS):
        return _text(_drawn(chart))


def _drawn(chart: Chart) -> Figure:
    """Draw the panels of a chart, at most two in a row, with a title above and a legend below."""
    panels = [*chart.panels.items()]
    columns = min(len(panels), 2)
    rows = [panels[at : at + columns] for at in range(0, len(panels), columns)]
    bars = len(chart.colours) + 1  # the bars of a trainer, and a gap
    heights = [FRAME + ROW * bars * max(len(_names(figure)) for _, figure in row) for row in rows]
    figure = Figure((WIDTH, 0.6 + sum(heights)), layout="constrained")
    grid = figure.subplots(len(rows), columns, squeeze=False, height_ratios=heights)
    for row, line in zip(rows, grid, strict=True):
        for (title, panel), axes in zip(row, line, strict=False):
            _draw(axes, title, panel)
        for axes in line[len(row) :]:
            axes.set_axis_off()
    figure.suptitle(chart.table.title, fontweight="bold", x=0.01, ha="left")
    handles = [Patch(color=colour) for colour in chart.colours.values()]
    if handles:
        figure.legend(handles, [*chart.colours], loc="outside lower left", ncols=7, frameon=False)
    return figure


def _names(figure: Any) -> list[str]:
    """Return the trainers of a panel, from top to bottom."""
    names: list[str] = figure["layout"]["yaxis"]["categoryarray"]
    return names


def _draw(axes: Axes, title: str, figure: Any) -> None:
    """Draw the bars of a panel, with a text at the end of each bar."""
    layout, names = figure["layout"], _names(figure)
    bars = [trace for trace in figure["data"] if trace["type"] == "bar"]
    height = 0.75 / len(bars)
    for number, trace in enumerate(bars):
        shift = (number - (len(bars) - 1) / 2) * height
        places = [names.index(name) + shift for name in trace["y"]]
        drawn = axes.barh(places, trace["x"], height, color=trace["marker"]["color"])
        axes.bar_label(drawn, trace["text"], padding=2, fontsize=7)
    for shape in layout["shapes"]:
        axes.axvline(shape["x0"], color=LINE, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.margins(x=0.18)
    axes.set_xlim(left=0)
    axes.set_xlabel(layout["xaxis"]["title"]["text"])
    axes.set_title(title, fontsize=9, loc="left")


def _text(figure: Figure) -> str:
    """Return the SVG, with a style that has colours for light pages and for dark pages."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    for stand_in, name in ((TEXT, "text"), (LINE, "line")):
        text = text.replace(stand_in, f"var(--{name})")
    head, style, rest = text.partition("<defs>")
    return f"{head}{STYLE}{style}{rest}"
