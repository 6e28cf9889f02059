"""The flame graph of a step's logical bytes by phase, module, operator and source line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pandas as pd

from dpbench.results.kernels import OperatorCount
from dpbench.show.html.charts import BY_OPERATOR
from dpbench.show.html.data import PageData
from dpbench.show.html.figures import NEUTRAL, PHASE_COLOURS, Chart, Json, plain
from dpbench.show.layout import Shown, Table, gigabytes

SMALLEST = 0.002
"""A box is drawn if its share of the bytes of the step is larger than this."""

OUTSIDE_MODULES = "outside of modules"

HEIGHT = 420

COLUMNS: dict[str, Shown] = {
    "case": ("case", str),
    "phase": ("phase", str),
    "module": ("module", str),
    "operator": ("operator", str),
    "line": ("line", str),
    "GB": ("bytes", gigabytes),
}

HOW_TO_READ = (
    "The width of a box shows its bytes. Below a phase are its modules, below a module its "
    "operators, and below an operator the source lines that ran it. Click a box to show it alone, "
    "and click the top box to go up one level. Operators of backward have the modules and lines of "
    "forward. Boxes that are too small to draw leave an empty space."
)


def flames(data: PageData) -> Chart | None:
    """Draw a flame graph for each case whose operators have modules or source lines."""
    panels, lines = {}, []
    for run in data.runs:
        for outcome in run.outcomes:
            if any(each.module or each.line for each in outcome.operators):
                of_run = f", {run.name}" if len(data.runs) > 1 else ""
                name = f"{outcome.case.id}{of_run}"
                boxes = _boxes(outcome.operators)
                panels[name] = _icicle(boxes)
                lines += [(name, *place, size) for place, size in boxes.items() if len(place) == 4]
    if not panels:
        return None
    names = [name for name, _ in COLUMNS.values()]
    rows = pd.DataFrame(lines, columns=names).sort_values("bytes", ascending=False, kind="stable")
    table = Table.of("Bytes by module, operator and source line", rows, COLUMNS, [HOW_TO_READ])
    return Chart("flames", BY_OPERATOR, table, panels)


def _boxes(operators: Iterable[OperatorCount]) -> dict[tuple[str, ...], float]:
    """Return a dictionary from the path of each box to the bytes of the box.

    The path of the step is ``()``. Paths below the step are ``(phase,)``, ``(phase, module)`` and
    so on, down to the source line. Boxes that are too small to draw are left out.
    """
    boxes: dict[tuple[str, ...], float] = defaultdict(int)
    for each in operators:
        place = each.phase, each.module or OUTSIDE_MODULES, each.operator, each.line
        for depth in range(5):
            boxes[place[:depth]] += each.total_bytes
    least = SMALLEST * boxes[()]
    return {place: size for place, size in boxes.items() if size > least or not place}


def _icicle(boxes: dict[tuple[str, ...], float]) -> Json:
    number = {place: str(at) for at, place in enumerate(boxes)}
    trace = {
        "type": "icicle",
        "ids": [*number.values()],
        "labels": [plain(place[-1], longest=60) if place else "step" for place in boxes],
        "parents": [number[place[:-1]] if place else "" for place in boxes],
        "values": [*boxes.values()],
        "branchvalues": "total",
        "sort": True,
        "tiling": {"orientation": "v"},
        "marker": {"colors": [PHASE_COLOURS.get(p[0], NEUTRAL) if p else NEUTRAL for p in boxes]},
        "texttemplate": "%{label}",
        "hovertemplate": "%{label}<br>%{value:.3s}B, %{percentRoot:.1%} of the step<extra></extra>",
        "pathbar": {"visible": False},
    }
    layout = {
        "height": HEIGHT,
        "margin": {"t": 4, "r": 4, "b": 4, "l": 4},
        "uniformtext": {"minsize": 10, "mode": "hide"},
    }
    return {"data": [trace], "layout": layout}
