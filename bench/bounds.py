"""Counts of the bounds in tests/logical, from one layer and two to all of the 1b model."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pandas as pd

BOUNDS = Path(__file__).parents[1] / "tests/logical/bounds.json"


@cache
def _operators() -> pd.DataFrame:
    """Counts of the bounds by cell, layers, phase and operator."""
    frame = pd.DataFrame(json.loads(BOUNDS.read_text(encoding="utf-8"))["operators"])
    cells = frame.batch_size.astype(str) + "x" + frame.seq_len.astype(str)
    layers = frame.model_size.str.split("x").str[2].astype(int)
    bytes_ = frame.read_bytes + frame.write_bytes
    return frame.assign(cell=cells, layers=layers, bytes=bytes_)


@cache
def of_24_layers(column: str, trainer: str, cell: str, words: tuple[str, ...]) -> float:
    """A count of all layers, in whose number it is affine (`tests/logical/layers.py`)."""
    cell = cell.split(",")[0]
    rows = _operators().query("trainer == @trainer and cell == @cell and precision == 'fp32'")
    for word in words:
        rows = rows[(rows.phase == word) | (rows.operator == word)]
    if rows.empty:
        raise LookupError(f"{BOUNDS.name} has nothing of {trainer} {cell} {' '.join(words)}")
    one, two = (float(rows[rows.layers == layers][column].sum()) for layers in (1, 2))
    return one + 23 * (two - one)
