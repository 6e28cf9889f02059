"""Numbers of committed runs: the only place where documents meet dpbench's results.

A file is named without ``h200-`` and ending: ``"methods-256"`` is
``docs/results/h200-methods-256.json``. Axes choose rows of it: ``cell="8x256"`` (batch size ×
sequence length), ``precision="bf16"``, or any column of dpbench's summary. What they leave must be
one number: of counted steps their mean, of timed ones their median.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pandas as pd

from dpbench.results.rows import NO_HARDWARE, STEP
from dpbench.results.run import Run
from dpbench.results.summary import of_one_instrument

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results"
BOUNDS = ROOT / "tests/logical/bounds.json"
"""Counts of the transformer at the width of ``1b`` with one layer and with two."""

LAYERS = 24
"""Layers of the ``1b`` model."""


def file_of(name: str) -> str:
    """The file of what was measured: on an H200, unless its name begins with ``h100-``."""
    return f"{name}.json" if name.startswith("h100-") else f"h200-{name}.json"


def path_of(file: str) -> Path:
    """The file of a run, measured or counted."""
    counted = RESULTS / f"{file}.json"
    return counted if counted.exists() else RESULTS / file_of(file)


@cache
def run(path: Path) -> Run:
    """A run, read once."""
    return Run.load(path)


@cache
def _metric(file: str, metric: str) -> pd.DataFrame:
    """The rows of one metric; peak memory as it was measured."""
    rows = run(path_of(file)).summary
    rows = of_one_instrument(rows[rows.metric == metric])
    if metric == "peak_memory_bytes":
        rows = rows[rows.device != NO_HARDWARE]
    cell = rows.batch_size.astype(str) + "x" + rows.seq_len.astype(str)
    return rows.assign(cell=cell)


@cache
def value(file: str, metric: str, phase: str = STEP, **axes: object) -> float:
    """One number, in base units.

    Raises:
        LookupError: the axes choose no number, or several.
    """
    rows = _metric(file, metric)
    for axis, wanted in {"phase": phase, **axes}.items():
        rows = rows[rows[axis] == wanted]
    if len(rows) != 1:
        raise LookupError(f"{file} has {len(rows)} {metric} of {axes} in {phase}")
    return float(rows.value.iloc[0])


def of_rank(file: str, metric: str, rank: int, phase: str = STEP, **axes: object) -> float:
    """One number of one rank, in base units: the median of its steps."""
    rows = run(path_of(file)).frame
    for axis, wanted in {"metric": metric, "phase": phase, "rank": rank, **axes}.items():
        rows = rows[rows[axis] == wanted]
    if rows.empty:
        raise LookupError(f"{file} has no {metric} of rank {rank} and {axes} in {phase}")
    return float(rows.value.median())


def collectives(file: str, **axes: object) -> int:
    """How often a rank sends in a step."""
    counts = pd.DataFrame(run(path_of(file)).document["operators"])
    counts = counts[counts.collective_bytes > 0]
    for axis, wanted in axes.items():
        counts = counts[counts[axis] == wanted]
    if counts.empty:
        raise LookupError(f"{file} has no collectives of {axes}")
    return int(counts.calls.sum())


@cache
def _operators() -> pd.DataFrame:
    counts = pd.DataFrame(run(BOUNDS).document["operators"])
    cells = counts.batch_size.astype(str) + "x" + counts.seq_len.astype(str)
    layers = counts.model_size.str.split("x").str[2].astype(int)
    return counts.assign(cell=cells, layers=layers, bytes=counts.read_bytes + counts.write_bytes)


@cache
def counted(column: str, trainer: str, cell: str) -> float:
    """``bytes`` or ``flops`` of a step of ``1b`` at fp32, which are affine in its layers."""
    counts = _operators()
    rows = counts[(counts.trainer == trainer) & (counts.cell == cell)]
    one, two = (float(rows.loc[rows.layers == layers, column].sum()) for layers in (1, 2))
    if not one:
        raise LookupError(f"{BOUNDS.name} has nothing of {trainer} at {cell}")
    return one + (LAYERS - 1) * (two - one)


def printed(file: str, *start: str) -> list[float]:
    """The numbers behind the words with which one line of a printed file begins."""
    lines = [line.split() for line in (RESULTS / file).read_text(encoding="utf-8").splitlines()]
    found = [line[len(start) :] for line in lines if line[: len(start)] == [*start]]
    if len(found) != 1:
        raise LookupError(f"{file} has {len(found)} lines that begin with {' '.join(start)}")
    return [float(word) for word in found[0] if re.fullmatch(r"[-+]?\d[\d.e+-]*", word)]
