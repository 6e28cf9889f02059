"""Slow fixtures that all workers of a session share."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dpbench.child.messages import Steps
from dpbench.core.files import locked
from dpbench.results.outcome import Outcome
from tests.instruments.logical.ranks import Heard, Heards, case_of


@pytest.fixture(scope="session")
def heard(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Callable[[int], Heards]:
    """The counts of real gloo ranks."""
    folder = tmp_path_factory.getbasetemp()
    if worker_id != "master":
        folder = folder.parent

    @cache
    def heard(gpus: int) -> Heards:
        said = folder / f"heard-by-{gpus}.json"
        with locked(said.with_suffix(".lock")):
            if not said.exists():
                said.write_text(json.dumps(listened(gpus, tmp_path_factory.mktemp("ranks"))))
        ranks = json.loads(said.read_text())
        return [[Outcome.from_json(each) for each in rank["heard"]] for rank in ranks]

    return heard


def listened(gpus: int, folder: Path) -> list[dict[str, Any]]:
    """The record of each rank."""
    instrument = Heard(folder, device="cpu", steps=Steps(0, 1), timeout=300)
    running = instrument.start(case_of(gpus=gpus))
    try:
        ranks: list[dict[str, Any]] = running.outcome().details["ranks"]
        return ranks
    finally:
        running.cancel()
