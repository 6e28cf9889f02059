"""The tables of the documents, a function each; `bench.renew` puts them into the pages."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

from tabulate import tabulate

from bench.runs import RESULTS, collectives, counted, file_of, path_of, printed, value

TABLES: dict[str, Callable[..., str]] = {}
"""Each table by its name."""

Cells = Iterable[Sequence[object]]


class Place(NamedTuple):
    """Where trainers were measured: a file, and what chooses one cell of it."""

    file: str
    cell: str = ""
    precision: str = "fp32"

    @property
    def axes(self) -> dict[str, object]:
        axes: dict[str, object] = {"precision": self.precision}
        return {**axes, "cell": self.cell} if self.cell else axes

    @property
    def shown(self) -> str:
        return f"{self.cell.replace('x', ' × ')}, {self.precision}"


METHODS = [
    Place(f"methods-{length}", f"8x{length}", precision)
    for precision in ("fp32", "bf16")
    for length in (256, 1024)
]
PLACES = [
    *METHODS,
    *(Place("cupti-grid1-1", cell) for cell in ("16x256", "16x1024")),
    *(Place("methods-tf32", cell, "tf32") for cell in ("8x256", "8x1024")),
    *(Place("methods-16x1024", "16x1024", precision) for precision in ("tf32", "bf16")),
]
PRIVATE = ("dpsgd", "dpsgd_ghost", "dpsgd_fgc")
OPACUS = ("standard", *PRIVATE)
OWN = ("lean", "ghost_lean", "micro_batch", "book_keeping", "fused")
WORDS = tomllib.loads(Path(__file__).with_name("tables.toml").read_text(encoding="utf-8"))
"""What the files of a table are called in it."""
MODELS: dict[str, str] = WORDS["models"]
TUNING: dict[str, str] = WORDS["tuning"]
CHANGES: dict[str, tuple[str, str, str]] = WORDS["changes"]

SESSIONS = (
    *("methods-256", "methods-1024", "methods-tf32", "methods-16x1024", "opacus-changes"),
    *(f"{tool}-grid1-{session}" for tool in ("cupti", "ncu") for session in (1, 2, 3)),
    *("ncu-methods-256", "ncu-precisions", "ncu-precisions-16x1024"),
)
"""Runs of the built-in model. Some of them measured the same case."""

Metric = Callable[[Place, str], float]

SENT = "collective_bytes"
COUNTED_RANKS = "counted-ranks"
"""The run that counts one rank of several."""


def table(function: Callable[..., str]) -> Callable[..., str]:
    """Let pages name a function."""
    TABLES[function.__name__] = function
    return function


def markdown(heads: Sequence[str], rows: Cells) -> str:
    """A table: what is no text is shown with two digits behind the point."""
    cells = [[cell if isinstance(cell, str) else f"{cell:.2f}" for cell in row] for row in rows]
    return tabulate(cells, heads, tablefmt="github", disable_numparse=True)


def gb(place: Place, trainer: str, phase: str = "step") -> float:
    """DRAM bytes, in GB."""
    return value(place.file, "dram_bytes", phase, trainer=trainer, **place.axes) / 1e9


def ms(place: Place, trainer: str, phase: str = "step") -> float:
    """Time, in ms."""
    return value(place.file, "step_time_seconds", phase, trainer=trainer, **place.axes) * 1e3


def peak(place: Place, trainer: str) -> float:
    """Peak memory, in GB."""
    return value(place.file, "peak_memory_bytes", trainer=trainer, **place.axes) / 1e9


def ratio(metric: Metric, place: Place, trainer: str, to: str = "standard") -> float:
    """A metric of one trainer ÷ the same of another."""
    return metric(place, trainer) / metric(place, to)


def idle_ms(place: Place, trainer: str) -> float:
    """Time in which the GPU did nothing, in ms."""
    share = value(place.file, "gpu_busy_share", trainer=trainer, **place.axes)
    return ms(place, trainer) * (1 - share)


def by_cell(head: str, shown: Callable[[Place], str]) -> str:
    """A table with a row for each cell and a column for each precision."""
    found = {(place.cell, place.precision): shown(place) for place in PLACES}
    cells = dict.fromkeys(place.cell for place in PLACES)
    precisions = ("fp32", "tf32", "bf16")
    rows = ([c.replace("x", " × "), *(found.get((c, p), "-") for p in precisions)] for c in cells)
    return markdown([head, *precisions], rows)


def joined(numbers: Iterable[float], digits: int = 2) -> str:
    """Several numbers in one cell."""
    return ", ".join(f"{number:.{digits}f}" for number in numbers)


# --- what private training costs ------------------------------------------------------------------


@table
def step(*trainers: str) -> str:
    """A step of 8 × 256 at fp32 and bf16: bytes, time and peak memory, absolute or ÷ standard."""
    places = METHODS[0], METHODS[2]
    units = {gb: ("DRAM bytes", "GB", 1), ms: ("time", "ms", 0), peak: ("peak memory", "GB", 1)}
    rows = []
    for metric, (name, unit, digits) in units.items():
        absolute = " / ".join(f"{metric(place, 'standard'):.{digits}f}" for place in places)
        ratios = (
            " / ".join(f"{ratio(metric, place, trainer):.2f}" for place in places)
            for trainer in trainers
        )
        rows.append([name, f"{absolute} {unit}", *(f"× {numbers}" for numbers in ratios)])
    return markdown(["", "`standard`", *(f"`{name}`" for name in trainers)], rows)


@table
def methods() -> str:
    """Time, bytes and peak memory of each trainer ÷ standard, in four cells."""
    absolute = [joined((m(p, "standard") for m in (ms, gb, peak)), 1) for p in METHODS]
    rows = [["standard: ms, GB, GB", *absolute]]
    for trainer in (*PRIVATE, *OWN):
        cells = (joined(ratio(m, p, trainer) for m in (ms, gb, peak)) for p in METHODS)
        rows.append([trainer, *cells])
    return markdown(["time, bytes, memory", *(place.shown for place in METHODS)], rows)


@table
def phases() -> str:
    """DRAM bytes by phase at 8 × 256, fp32."""
    names = ("forward", "backward", "clip", "noise", "optimizer")
    rows = []
    for trainer in (*OPACUS, "fused"):
        absent = {"clip", "noise"} if trainer == "standard" else {"noise"}
        lacking = absent if trainer in ("standard", "fused") else set()
        cells = ("-" if n in lacking else f"{gb(METHODS[0], trainer, n):.1f}" for n in names)
        rows.append([trainer, *cells])
    return markdown(["GB", *names], rows)


@table
def changes(*pages: str) -> str:
    """What changes to Opacus save at 8 × 256, fp32, one by one and together."""
    place, rows = Place("opacus-changes"), []
    for page in pages:
        _, before, after = CHANGES[page]
        opacus, diff = (printed("upstream.txt", name, before)[1] for name in ("Opacus", page))
        differences = [m(place, before) - m(place, after) for m in (gb, ms)] if after else []
        shown = [f"{number:.1f}" for number in (opacus - diff, *differences)]
        rows.append([f"[{page}](upstream/{page}.md)", before, *shown, *["-"] * (3 - len(shown))])
    together = (
        ("all, `lean`", METHODS[0], "dpsgd", "lean"),
        ("all, `ghost_lean`", METHODS[0], "dpsgd_ghost", "ghost_lean"),
        ("in your loop, `zero_grad(set_to_none=True)`", place, "dpsgd_zeroing", "dpsgd"),
    )
    for what, where, before, after in together:
        differences = [m(where, before) - m(where, after) for m in (gb, ms)]
        of = "dpsgd" if after == "dpsgd" else before
        rows.append([what, of, "-", *(f"{difference:.1f}" for difference in differences)])
    return markdown(["change", "of", "counted GB saved", "DRAM GB saved", "ms saved"], rows)


@table
def ghost() -> str:
    """Ghost clipping ÷ flat clipping wherever both were measured."""

    def shown(place: Place) -> str:
        return joined(ratio(metric, place, "dpsgd_ghost", "dpsgd") for metric in (ms, gb, peak))

    return by_cell("time, bytes, memory", shown)


@table
def time() -> str:
    """What the time is made of that a private step takes more than a standard one."""
    found = json.loads(path_of("ceilings").read_text(encoding="utf-8"))["ceilings"]

    def shown(place: Place, trainer: str) -> str:
        more, flops, idle, moved = (
            quantity(place, trainer) - quantity(place, "standard")
            for quantity in (ms, lambda p, t: counted("flops", t, p.cell), idle_ms, gb)
        )
        least = flops / found["flops"][place.precision], moved * 1e9 / found["bandwidth"]
        shares = (*(1e3 * seconds / more for seconds in least), idle / more)
        return f"{more:.0f} ms: {', '.join(f'{100 * share:.0f}' for share in shares)}"

    rows = ([place.shown, *(shown(place, trainer) for trainer in PRIVATE)] for place in METHODS)
    return markdown(["more ms: %, %, %", *PRIVATE], rows)


@table
def models() -> str:
    """Other models at fp32: a standard step, and the others ÷ it."""
    return of_cells({name: Place(file) for file, name in MODELS.items()}, PRIVATE)


@table
def tuning() -> str:
    """Private training at bf16 as people run it, in the same form."""
    cells = {name: Place(file, precision="bf16") for file, name in TUNING.items()}
    return of_cells(cells, ("dpsgd", "dpsgd_ghost", "lean", "ghost_lean", "fused"))


def of_cells(cells: Mapping[str, Place], trainers: Sequence[str]) -> str:
    """A row for each cell: a standard step, and time, bytes and memory of others ÷ it."""
    rows = []
    for name, place in cells.items():
        row = [name, joined((metric(place, "standard") for metric in (ms, gb, peak)), 1)]
        for trainer in trainers:
            row.append("-")
            with suppress(LookupError):  # it was not measured there
                row[-1] = joined(ratio(metric, place, trainer) for metric in (ms, gb, peak))
        rows.append(row)
    return markdown(["time, bytes, memory", "standard: ms, GB, GB", *trainers], rows)


# --- how far to trust a number --------------------------------------------------------------------


@table
def measured() -> str:
    """DRAM bytes measured ÷ bytes counted, of a step at fp32."""
    built_in = [place for place in PLACES if place.precision == "fp32"]
    others = ("llama-256", "llama-512", "vit-64", "resnet-64")
    rows = []
    for trainer in OPACUS:
        known = [gb(p, trainer) * 1e9 / counted("bytes", trainer, p.cell) for p in built_in]
        logical = (value(file, "logical_bytes", trainer=trainer) for file in others)
        found = (gb(Place(f), trainer) * 1e9 / n for f, n in zip(others, logical, strict=True))
        rows.append([trainer, *known, *found])
    heads = [place.cell.replace("x", " × ") for place in built_in]
    return markdown(["", *heads, *(MODELS[file] for file in others)], rows)


@table
def sessions() -> str:
    """How far sessions differ, and CUPTI from ncu, the most among Opacus's trainers."""

    def shown(place: Place) -> str:
        moved, took = ([seen(metric, place, trainer) for trainer in OPACUS] for metric in (gb, ms))
        apart = max(
            abs(
                median(n for f, n in of.items() if f.startswith("ncu"))
                / median(n for f, n in of.items() if not f.startswith("ncu"))
                - 1
            )
            for of in moved
        )
        numbers = spread(moved), spread(took), apart
        return ", ".join("-" if n is None else f"{100 * n:.2f} %" for n in numbers)

    return by_cell("bytes, time, tools", shown)


def seen(metric: Metric, place: Place, trainer: str) -> dict[str, float]:
    """A metric of one case in each session that measured it."""
    found = {}
    for file in SESSIONS:
        with suppress(LookupError):
            found[file] = metric(place._replace(file=file), trainer)
    return found


def spread(of_trainers: Iterable[dict[str, float]]) -> float | None:
    """The largest number ÷ the smallest, less one, of the trainer of which it is the most."""
    values = ([*found.values()] for found in of_trainers)
    return max((max(of) / min(of) - 1 for of in values if len(of) > 1), default=None)


# --- several GPUs, diffs, peers, files ------------------------------------------------------------


@table
def ranks(parallel: str, *trainers: str) -> str:
    """What one rank sends and draws, counted."""
    rows = []
    standard = value(COUNTED_RANKS, SENT, trainer="standard", parallel=parallel, gpus=64)
    for trainer in trainers:
        axes = {"trainer": trainer, "parallel": parallel}
        sent = [value(COUNTED_RANKS, SENT, gpus=gpus, **axes) for gpus in (8, 64, 1024)]
        noise = "-"
        with suppress(LookupError):
            noise = f"{value(COUNTED_RANKS, 'logical_bytes', 'noise', gpus=64, **axes) / 1e9:.2f}"
        shown = (f"{number / 1e9:.2f}" for number in sent)
        calls = f"{collectives(COUNTED_RANKS, gpus=64, **axes):.0f}"
        rows.append([trainer, *shown, sent[1] / standard, calls, noise])
    heads = [parallel, "8 GPUs", "64 GPUs", "1024 GPUs", "÷ standard", "collectives", "noise GB"]
    return markdown(heads, rows)


@table
def diff(page: str, *trainers: str) -> str:
    """Logical GB of a step with the diff of a page."""
    rows = []
    for trainer in trainers:
        _, *before = printed("upstream.txt", "Opacus", trainer)
        _, *after = printed("upstream.txt", page, trainer)
        rows.append([trainer, *(f"{n:.1f}" for n in (before[0], after[0], before[1], after[1]))])
    return markdown(["", "fp32", "with it", "bf16", "with it"], rows)


@table
def diff_measured(before: str, after: str) -> str:
    """DRAM GB of a step with the same change as a trainer."""
    places = [Place("opacus-changes", precision=precision) for precision in ("fp32", "bf16")]
    numbers = [f"{gb(place, trainer):.1f}" for place in places for trainer in (before, after)]
    return markdown(["", "fp32", "with it", "bf16", "with it"], [[before, *numbers]])


@table
def saved() -> str:
    """What each diff saves, counted."""
    rows = []
    for page, (what, trainer, _) in CHANGES.items():
        before, after = (printed("upstream.txt", name, trainer) for name in ("Opacus", page))
        numbers = (f"{b - a:.1f}" for b, a in zip(before[1:], after[1:], strict=True))
        rows.append([f"[{page}]({page}.md): {what}", trainer, *numbers])
    return markdown(["change", "of", "GB saved at 8 × 256, fp32", "bf16"], rows)


@table
def diff_ranks(*pages: str) -> str:
    """What the diffs under FSDP2 change."""
    rows = []
    for page in ("Opacus", *pages):
        update, sent, noise, alike, passed, failed = printed("upstream-ranks.txt", page)
        shown = f"{update:.1f}", sent, noise, alike, f"{passed:.0f}, {failed:.0f}"
        rows.append([page, *shown])
    heads = ["", "update differs by", "sent GB", "noise GB", "r of one seed", "checks ok, failed"]
    return markdown(heads, rows)


@table
def peers() -> str:
    """Counted bytes of other people's trainers."""
    names = ("dpsgd", "backpack", "dpsgd_ghost", "fastdp", "fastdp:origin_params=embedding")
    rows = []
    for trainer in ("standard", *names, "book_keeping", "fused"):
        row = [f"`{trainer}`"]
        for file in ("counted-peers-two-layers", "counted-peers"):
            moved, standard = (
                value(file, "logical_bytes", trainer=name) for name in (trainer, "standard")
            )
            row += [f"{moved / 1e9:.1f}", f"{moved / standard:.2f}"]
        rows.append(row)
    return markdown(["trainer", "GB, two layers", "÷ standard", "GB, `1b`", "÷ standard"], rows)


@table
def peers_measured() -> str:
    """Time, bytes and memory of other people's private training ÷ standard, on an H200."""
    places = [
        Place(f"peers-{length}", f"8x{length}", precision)
        for precision in ("tf32", "bf16")
        for length in (256, 1024)
    ]
    rows = [["standard: ms, GB, GB"], ["fastdp"], ["fastdp:origin_params=embedding"], ["fused"]]
    for place in places:
        rows[0].append(joined((metric(place, "standard") for metric in (ms, gb, peak)), 1))
        for row in rows[1:]:
            row.append(joined(ratio(metric, place, row[0]) for metric in (ms, gb, peak)))
    rows.append(["jax-privacy", *map(of_jax, places[:2]), "-", "-"])
    heads = (f"{place.precision}, {place.cell.replace('x', ' × ')}" for place in places)
    return markdown(["time, bytes, memory", *heads], rows)


def of_jax(place: Place) -> str:
    """Time and bytes of a step of jax-privacy ÷ standard; JAX says nothing of memory."""
    printed = (RESULTS / f"h200-jax-{place.cell.partition('x')[2]}.txt").read_text("utf-8")
    found = {
        name: median(map(float, re.findall(rf"cupti +step +{name} +(\S+)", printed)))
        for name in ("step_time_seconds", "dram_read_bytes", "dram_write_bytes")
    }
    moved = (found["dram_read_bytes"] + found["dram_write_bytes"]) / 1e9
    took = 1e3 * found["step_time_seconds"]
    return joined((took / ms(place, "standard"), moved / gb(place, "standard"))) + ", -"


@table
def correlated() -> str:
    """Time, bytes and memory ÷ standard at 8 × 256 by bands of noise, and what one more adds."""
    bands = (1, 2, 4, 8, 16, 32)
    methods = (("fused", "drawn again", 32), ("lean", "stored", 16), ("dpsgd", "stored", 8))
    metrics = ms, gb, peak
    rows = []
    for precision, shown in (("fp32", methods), ("bf16", methods[:2])):
        for trainer, how, most in shown:
            place = Place("banded-256", "8x256", precision)

            def cell(name: str, place: Place = place) -> str:
                return joined(ratio(metric, place, name) for metric in metrics)

            banded = [f"{trainer}:bands={b},noise=banded" for b in bands[1:] if b <= most]
            gaps = ["-"] * (len(bands) - 1 - len(banded))
            blt = "-" if trainer == "fused" else cell(f"{trainer}:buffers=4,noise=blt")
            more = (metric(place, banded[-1]) - metric(place, trainer) for metric in metrics)
            each = joined((abs(number) / (most - 1) for number in more), 1)
            cells = map(cell, (trainer, *banded))
            rows.append([f"{trainer}, {how}, {precision}", *cells, *gaps, blt, each])
    heads = "time, bytes, memory; bands:", *map(str, bands), "blt, 4 buffers"
    return markdown([*heads, "each band more: ms, GB, GB"], rows)


@table
def evidence() -> str:
    """The files of docs/results and the commands that make them."""
    kinds = tomllib.loads((RESULTS / "evidence.toml").read_text(encoding="utf-8"))
    rows = []
    for name, options in kinds["measured"].items():
        rows.append([f"`{file_of(name)}`", f"`dpbench run {options} --json …`"])
    for kind in ("counted", "printed", "recorded"):
        rows += [[f"`{name}`", f"`{command}`"] for name, command in kinds[kind].items()]
    return markdown(["file", "command"], rows)
