"""Functions that read numbers and lay out tables, for the modules that make documents' tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from tabulate import tabulate

from bench.runs import value
from dpbench.results.roofline import WAITS

TABLES: dict[str, Callable[..., str]] = {}
"""Functions that return a table in Markdown, by name. Pages of documents name their function."""


class Place(NamedTuple):
    """A file of results, and a cell (batch size × sequence length) and a precision in the file.

    Attributes:
        standard: the file with the standard trainer, if it is another.
    """

    file: str
    cell: str = ""
    precision: str = "fp32"
    standard: str = ""

    @property
    def axes(self) -> dict[str, object]:
        axes: dict[str, object] = {"precision": self.precision}
        return {**axes, "cell": self.cell} if self.cell else axes

    @property
    def shown(self) -> str:
        return f"{self.cell.replace('x', ' × ')}, {self.precision}"


def by_length(files: str, precisions: Sequence[str] = ("fp32", "bf16")) -> list[Place]:
    """Return places per precision: 8 × 256 in file ``FILES-256``, 8 × 1024 in ``FILES-1024``."""
    return [Place(f"{files}-{n}", f"8x{n}", p) for p in precisions for n in (256, 1024)]


def table(function: Callable[..., str]) -> Callable[..., str]:
    """Register a function in `TABLES` under the name of the function. Use as a decorator."""
    TABLES[function.__name__] = function
    return function


def markdown(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table. Numbers are rounded to two decimals, and text is not changed."""
    cells = [[cell if isinstance(cell, str) else f"{cell:.2f}" for cell in row] for row in rows]
    return tabulate(cells, heads, tablefmt="github", disable_numparse=True)


def joined(numbers: Iterable[float], digits: int = 2) -> str:
    """Return numbers, rounded to ``digits`` decimals and joined by commas, for one table cell."""
    return ", ".join(f"{number:.{digits}f}" for number in numbers)


Metric = Callable[..., float]
"""Type of a function that returns a number for a `Place`, a trainer and a phase."""


def metric(name: str, scale: float = 1.0) -> Metric:
    """Return a function that reads the metric ``name`` of a run, and multiplies it by ``scale``."""

    def read(place: Place, trainer: str, phase: str = "step") -> float:
        file = place.standard if place.standard and trainer == "standard" else place.file
        return scale * value(file, name, phase, trainer=trainer, **place.axes)

    return read


gb = metric("dram_bytes", 1e-9)
ms = metric("step_time_seconds", 1e3)
peak = metric("peak_memory_bytes", 1e-9)
busy = metric("gpu_busy_share")


def ratio(metric: Metric, place: Place, trainer: str, to: str = "standard") -> float:
    """Divide a metric of ``trainer`` by the same metric of the trainer ``to``."""
    return metric(place, trainer) / metric(place, to)


def cost(place: Place, trainer: str, to: str = "standard") -> str:
    """Return time, DRAM bytes and peak memory of ``trainer``, each divided by that of ``to``.

    If both are the same trainer, the numbers are not divided, and are in ms, GB and GB. If a number
    was not measured, the text is "-".
    """
    try:
        if trainer == to:
            return joined((metric(place, trainer) for metric in (ms, gb, peak)), 1)
        return joined(ratio(metric, place, trainer, to) for metric in (ms, gb, peak))
    except LookupError:
        return "-"


def by_trainer(
    places: Mapping[str, Place],
    trainers: Sequence[str],
    corner: str = "time, bytes, memory",
    cell: Callable[[Place, str], str] = cost,
) -> str:
    """Return a table with a row for each trainer, standard first, and a column for each `Place`."""
    rows = [[t, *(cell(place, t) for place in places.values())] for t in ("standard", *trainers)]
    rows[0][0] = "standard: ms, GB, GB"
    return markdown(
        [corner, *(marked(n, p) if cell is cost else n for n, p in places.items())], rows
    )


def marked(name: str, place: Place) -> str:
    """Return the name of a place, with a star if the standard step's GPU waits for Python there."""
    return f"{name} \\*" if busy(place, "standard") < WAITS else name


def by_place(places: Mapping[str, Place], trainers: Sequence[str]) -> str:
    """Return a table with a row for each `Place` and a column for each trainer, standard first."""
    names = "standard", *trainers
    rows = [[marked(name, p), *(cost(p, t) for t in names)] for name, p in places.items()]
    return markdown(["time, bytes, memory", "standard: ms, GB, GB", *trainers], rows)
