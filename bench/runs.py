"""Read numbers of committed runs for the documents.

A file is named without ``h200-`` and without its ending: ``"methods-256"`` is
``docs/results/h200-methods-256.json.xz``. Axes choose rows of a file: ``cell="8x256"`` (batch size
× sequence length), ``precision="bf16"``, or any column of a run's summary. The axes must choose
exactly one number. A count is the mean over the counted steps, and a time is the median over the
timed steps.
"""

from __future__ import annotations

import lzma
import re
from functools import cache
from pathlib import Path

import pandas as pd

from dpbench.results.rows import NO_HARDWARE, STEP
from dpbench.results.run import Run
from dpbench.results.schema import unpacked
from dpbench.results.summary import of_one_instrument

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results"
BOUNDS = ROOT / "tests/logical/bounds.json"
"""Run that counts the transformer at the width of the model ``1b``, with one and two layers."""

LAYERS = 24
"""Number of layers of the ``1b`` model."""


def file_of(name: str) -> str:
    """Return the name of a measured run's file."""
    return f"h200-{name}.json.xz"


def path_of(name: str) -> Path:
    """Return the path of a run: of the counted run with this name, else of the measured run."""
    counted = RESULTS / f"{name}.json.xz"
    return counted if counted.exists() else RESULTS / file_of(name)


def text_of(path: Path) -> str:
    """Return the JSON text of a run's file, which xz may have compressed."""
    return unpacked(path.read_bytes()).decode()


def write_packed(path: Path, text: str) -> None:
    """Write the JSON text of a run, compressed by xz if the file's name ends in ``.xz``."""
    data = text.encode()
    strongest = 9 | lzma.PRESET_EXTREME
    path.write_bytes(lzma.compress(data, preset=strongest) if path.suffix == ".xz" else data)


@cache
def run(path: Path) -> Run:
    """Return the run in a file. Each file is read only once."""
    return Run.load(path)


def chosen(rows: pd.DataFrame, what: str, **axes: object) -> pd.DataFrame:
    """Return the rows whose axes have these values.

    Raises:
        LookupError: no row has these values. The message contains ``what``.
    """
    for axis, wanted in axes.items():
        rows = rows[rows[axis] == wanted]
    if rows.empty:
        raise LookupError(f"no {what} with {axes}")
    return rows


@cache
def _metric(file: str, metric: str) -> pd.DataFrame:
    """Return the rows of one metric; for peak memory, only measured rows."""
    rows = run(path_of(file)).summary
    rows = of_one_instrument(rows[rows.metric == metric])
    if metric == "peak_memory_bytes":
        rows = rows[rows.device != NO_HARDWARE]
    return rows.assign(cell=_cells(rows))


def _cells(rows: pd.DataFrame) -> pd.Series[str]:
    return rows.batch_size.astype(str) + "x" + rows.seq_len.astype(str)


@cache
def value(file: str, metric: str, phase: str = STEP, **axes: object) -> float:
    """Return the number of a metric and phase in a file, in bytes, seconds or another base unit.

    Raises:
        LookupError: the axes choose no number, or several.
    """
    rows = chosen(_metric(file, metric), f"{metric} in {file}", phase=phase, **axes)
    if len(rows) > 1:
        raise LookupError(f"{file} has {len(rows)} {metric} of {axes} in {phase}")
    return float(rows.value.iloc[0])


def of_rank(file: str, metric: str, rank: int, phase: str = STEP, **axes: object) -> float:
    """Return the median over the steps of a metric of one rank, in base units."""
    axes = {"metric": metric, "phase": phase, "rank": rank, **axes}
    return float(chosen(run(path_of(file)).frame, f"row in {file}", **axes).value.median())


def collectives(file: str, **axes: object) -> int:
    """Return the number of collectives in which a rank sends bytes in a step."""
    counts = pd.DataFrame(run(path_of(file)).document["operators"])
    counts = counts[counts.collective_bytes > 0]
    return int(chosen(counts, f"collective in {file}", **axes).calls.sum())


@cache
def _operators() -> pd.DataFrame:
    counts = pd.DataFrame(run(BOUNDS).document["operators"])
    layers = counts.model_size.str.split("x").str[2].astype(int)
    moved = counts.read_bytes + counts.write_bytes
    return counts.assign(cell=_cells(counts), layers=layers, bytes=moved)


@cache
def counted(column: str, trainer: str, cell: str) -> float:
    """Return the logical ``bytes`` or the ``flops`` of a step of the model ``1b`` at fp32.

    Each layer adds the same amount, so counts of models with one and with two layers are enough.
    """
    one, two = (
        float(chosen(_operators(), BOUNDS.name, **axes)[column].sum())
        for axes in ({"trainer": trainer, "cell": cell, "layers": layers} for layers in (1, 2))
    )
    return one + (LAYERS - 1) * (two - one)


def printed(file: str, *start: str) -> list[float]:
    """Return the numbers in the line of a text file that begins with the words ``start``."""
    lines = [line.split() for line in (RESULTS / file).read_text(encoding="utf-8").splitlines()]
    found = [line[len(start) :] for line in lines if line[: len(start)] == [*start]]
    if len(found) != 1:
        raise LookupError(f"{file} has {len(found)} lines that begin with {' '.join(start)}")
    return [float(word) for word in found[0] if re.fullmatch(r"[-+]?\d[\d.e+-]*", word)]
