"""Make tables about the cost of training methods, and about the accuracy of numbers."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from statistics import median

from bench.cells import (
    Metric,
    Place,
    busy,
    by_length,
    by_place,
    by_trainer,
    cost,
    gb,
    joined,
    markdown,
    ms,
    peak,
    table,
)
from bench.runs import RESULTS, counted, value

METHODS = by_length("methods")
COMPILED = [place._replace(standard=f"compiled-{place.file}") for place in METHODS[2:]]
"""Places whose standard step is compiled."""
PLACES = [
    *METHODS,
    *(Place("cupti-grid1-1", cell) for cell in ("16x256", "16x1024")),
    *(Place("methods-tf32", cell, "tf32") for cell in ("8x256", "8x1024")),
    *(Place("methods-16x1024", "16x1024", precision) for precision in ("tf32", "bf16")),
]
PRIVATE = ("dpsgd", "dpsgd_ghost", "dpsgd_fgc")
OPACUS = ("standard", *PRIVATE)
OWN = ("micro_batch", "fused")
WORDS = tomllib.loads(Path(__file__).with_name("tables.toml").read_text(encoding="utf-8"))
"""Texts that tables show for a file of docs/results or for a page of docs/upstream."""
MODELS: dict[str, str] = WORDS["models"]
TUNING: dict[str, str] = WORDS["tuning"]

SESSIONS = (
    *("methods-256", "methods-1024", "methods-tf32", "methods-16x1024", "opacus-changes"),
    *(f"{tool}-grid1-{session}" for tool in ("cupti", "ncu") for session in (1, 2, 3)),
    *("ncu-methods-256", "ncu-precisions", "ncu-precisions-16x1024"),
)
"""Runs of the built-in model, which measured some cases several times."""


def by_cell(corner: str, shown: Callable[[Place], str]) -> str:
    """Return a table with a row for each cell and a column for each precision."""
    found = {(place.cell, place.precision): shown(place) for place in PLACES}
    cells = dict.fromkeys(place.cell for place in PLACES)
    precisions = ("fp32", "tf32", "bf16")
    rows = ([c.replace("x", " × "), *(found.get((c, p), "-") for p in precisions)] for c in cells)
    return markdown([corner, *precisions], rows)


# --- the cost of private training -----------------------------------------------------------------


@table
def methods() -> str:
    """Return the cost of every built-in trainer in four cells, and divided by a compiled step."""
    places = {place.shown: place for place in METHODS}
    places |= {f"{place.shown}, compiled": place for place in COMPILED}
    return by_trainer(places, (*PRIVATE, *OWN))


@table
def phases() -> str:
    """Return DRAM bytes by phase at 8 × 256 and fp32."""
    absent = {"standard": ("clip", "noise"), "fused": ("noise",)}
    names = ("forward", "backward", "clip", "noise", "optimizer")
    rows = []
    for trainer in (*OPACUS, "fused"):
        lacking = absent.get(trainer, ())
        cells = ("-" if n in lacking else f"{gb(METHODS[0], trainer, n):.1f}" for n in names)
        rows.append([trainer, *cells])
    return markdown(["GB", *names], rows)


@table
def ghost() -> str:
    """Return the cost of Opacus's ghost clipping ÷ that of flat clipping, for each of `PLACES`."""
    return by_cell("time, bytes, memory", lambda place: cost(place, "dpsgd_ghost", to="dpsgd"))


@table
def time() -> str:
    """Return the extra time of private steps over standard steps, and three shares of this time."""
    roofs = json.loads((RESULTS / "h200-ceilings.json").read_text(encoding="utf-8"))["ceilings"]

    def shown(place: Place, trainer: str) -> str:
        more, flops, idle, moved = (
            quantity(place, trainer) - quantity(place, "standard")
            for quantity in (ms, lambda p, t: counted("flops", t, p.cell), idle_ms, gb)
        )
        least = flops / roofs["flops"][place.precision], moved * 1e9 / roofs["bandwidth"]
        shares = (*(1e3 * seconds / more for seconds in least), idle / more)
        return f"{more:.0f} ms: {', '.join(f'{100 * share:.0f}' for share in shares)}"

    rows = ([place.shown, *(shown(place, trainer) for trainer in PRIVATE)] for place in METHODS)
    return markdown(["more ms: %, %, %", *PRIVATE], rows)


def idle_ms(place: Place, trainer: str) -> float:
    """Return for how many ms of a step the GPU did nothing."""
    return ms(place, trainer) * (1 - busy(place, trainer))


@table
def models() -> str:
    """Return the cost of private trainers on other models, at fp32."""
    return by_place({name: Place(file) for file, name in MODELS.items()}, (*PRIVATE, "fused"))


@table
def tuning() -> str:
    """Return the cost of training at bf16: with LoRA or all parameters, and with AdamW or SGD."""
    places = {name: Place(file, precision="bf16") for file, name in TUNING.items()}
    name = TUNING["adamw-1024"]
    places[f"{name}, compiled"] = places[name]._replace(standard="compiled-adamw-1024")
    return by_place(places, ("dpsgd", "dpsgd_ghost", "fused"))


@table
def correlated() -> str:
    """Return the cost of correlated noise at 8 × 256 by bands, and the cost of a further band."""
    bands = (1, 2, 4, 8, 16, 32)
    names = ["fused", *(f"fused:bands={b},noise=banded" for b in bands[1:])]
    rows = []
    for precision in ("fp32", "bf16"):
        place = Place("banded-256", "8x256", precision)
        more = (metric(place, names[-1]) - metric(place, names[0]) for metric in (ms, gb, peak))
        each = joined((abs(number) / (bands[-1] - 1) for number in more), 1)
        rows.append([f"fused, {precision}", *(cost(place, name) for name in names), each])
    heads = "time, bytes, memory; bands:", *map(str, bands)
    return markdown([*heads, "each band more: ms, GB, GB"], rows)


# --- how far to trust a number --------------------------------------------------------------------


@table
def measured() -> str:
    """Return measured DRAM bytes ÷ counted bytes of a step at fp32."""
    return markdown(["", *OPACUS], ([name, *found] for name, found in over_counted().items()))


def over_counted() -> dict[str, list[float]]:
    """Return the measured ÷ the counted bytes of the trainers in `OPACUS`, by cell or model."""
    built_in = [place for place in PLACES if place.precision == "fp32"]
    found = {
        place.cell.replace("x", " × "): [
            gb(place, trainer) * 1e9 / counted("bytes", trainer, place.cell) for trainer in OPACUS
        ]
        for place in built_in
    }
    return found | {
        name: [
            gb(Place(file), trainer) * 1e9 / value(file, "logical_bytes", trainer=trainer)
            for trainer in OPACUS
        ]
        for file, name in MODELS.items()
    }


@table
def sessions() -> str:
    """Return how much bytes and times differ between sessions, and bytes between CUPTI and ncu.

    Each number is the largest relative difference among the trainers in `OPACUS`.
    """

    def shown(place: Place) -> str:
        moved, took = ([seen(metric, place, trainer) for trainer in OPACUS] for metric in (gb, ms))
        tools = max(
            abs(
                median(n for f, n in of.items() if f.startswith("ncu"))
                / median(n for f, n in of.items() if not f.startswith("ncu"))
                - 1
            )
            for of in moved
        )
        numbers = spread(moved), spread(took), tools
        return ", ".join("-" if n is None else f"{100 * n:.2f} %" for n in numbers)

    return by_cell("bytes, time, tools", shown)


def seen(metric: Metric, place: Place, trainer: str) -> dict[str, float]:
    """Return a metric of one case in each of `SESSIONS` that measured the case, by session."""
    found = {}
    for file in SESSIONS:
        with suppress(LookupError):
            found[file] = metric(place._replace(file=file), trainer)
    return found


def spread(of_trainers: Iterable[dict[str, float]]) -> float | None:
    """Return the largest of the trainers' spreads over sessions: (max - min) / min."""
    values = ([*found.values()] for found in of_trainers)
    return max((max(of) / min(of) - 1 for of in values if len(of) > 1), default=None)
