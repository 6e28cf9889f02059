"""Runs as a session saves them, made from recorded reports."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from dpbench.core.case import Case
from dpbench.instruments.ncu.report import read
from dpbench.results.outcome import COMPLETE, Outcome, document
from dpbench.results.run import Run
from dpbench.results.storage import Storage

RECORDED = Path(__file__).parents[1] / "data" / "tiny-fp32"


@cache
def recorded(trainer: str) -> Outcome:
    """What a session measures when the recorded report is replayed."""
    case = Case(trainer, batch_size=4, seq_len=64, model_size="tiny")
    rows = read(RECORDED / f"report_{trainer}_bs4_seq64.ncu-rep", case)
    return Outcome(case, tuple(rows), 1.0, instruments=("ncu",))


def recorded_document(
    change: Callable[[dict[str, Any]], object] = lambda row: None, **session: Any
) -> dict[str, Any]:
    """The document of a run of both trainers, each row changed."""
    outcomes = [recorded("standard"), recorded("dpsgd")]
    made = document(outcomes, {}, {"status": COMPLETE, **session})
    for row in made["rows"]:
        change(row)
    return made


def save(folder: Path, name: str, made: dict[str, Any]) -> Path:
    """Put a document into the storage of a project."""
    return Storage(folder / ".dpbench").allocate(name, "NVIDIA H200", json.dumps(made))


def saved(folder: Path, number: int) -> Run:
    """A run out of the storage of a project."""
    storage = Storage(folder / ".dpbench")
    return Run.load(storage.find(str(number)))


def less(row: dict[str, Any]) -> None:
    """DP-SGD moved 10 % less."""
    if row["trainer"] == "dpsgd":
        row["value"] /= 1.1


def less_and_elsewhere(row: dict[str, Any]) -> None:
    """DP-SGD moved 10 % less, and it was another GPU."""
    less(row)
    row["device"] = "NVIDIA A100"


def halved(row: dict[str, Any]) -> None:
    """Everything moved half of it."""
    row["value"] /= 2


def values(document: dict[str, Any], trainer: str, instrument: str = "ncu") -> list[float]:
    """What a document says of a trainer, by an instrument."""
    rows = [row for row in document["rows"] if row["instrument"] == instrument]
    return [row["value"] for row in rows if row["trainer"] == trainer]


def command_in(log: Path) -> str:
    """The command of a measured process, in its log's first line."""
    return log.read_text().splitlines()[0]


def phases(rows: list[dict[str, Any]], metric: str) -> set[str]:
    """The phases of which rows have a metric."""
    return {row["phase"] for row in rows if row["metric"] == metric}
