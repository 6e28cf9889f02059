"""Cases without hardware, measured in forks of the session's process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from multiprocessing import active_children
from pathlib import Path
from typing import ClassVar

import pytest

from dpbench import runner
from dpbench.case import Case
from dpbench.cli import main
from dpbench.instruments.base import Instrument, Running
from dpbench.instruments.logical.instrument import Logical
from dpbench.results.outcome import Outcome
from dpbench.results.rows import Measurement
from dpbench.results.run import Run

CASES = [Case("standard", batch, 8, "200x32x1x2") for batch in (1, 2, 3, 4)]


@dataclass(frozen=True)
class ByBatch(Instrument):
    """Does for each case what its batch size says."""

    name: ClassVar[str] = "by_batch"
    hardware: ClassVar[bool] = False

    does: Callable[[int], object]

    def start(self, case: Case) -> Running:
        self.does(case.batch_size)
        return Nothing()


class Nothing(Running):
    def rows(self) -> list[Measurement]:
        return []


def measured(monkeypatch: pytest.MonkeyPatch, does: Callable[[int], object]) -> list[Outcome]:
    """What became of the cases, two at once."""
    monkeypatch.setattr(runner, "cores", lambda: 2)
    with closing(runner.Forks(CASES, [ByBatch(does)])) as forks:
        outcomes = [forks.measure(case) for case in CASES]
    assert not active_children()
    return outcomes


def test_a_fork_that_dies_fails_its_case_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = measured(monkeypatch, lambda batch: batch != 2 or os._exit(3))
    assert [outcome.case for outcome in outcomes] == CASES
    assert [outcome.error for outcome in outcomes] == [None, "CaseFailed", None, None]
    said = f"{CASES[1].id}: the process that measured it ended with exit code 3"
    assert outcomes[1].message == said
    assert {outcome.instruments for outcome in outcomes} == {("by_batch",)}


def test_what_one_changes_the_next_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = Path.cwd()

    def change_directory(batch: int) -> None:
        assert Path.cwd() == directory
        os.chdir("/")

    outcomes = measured(monkeypatch, change_directory)
    assert [outcome.error for outcome in outcomes] == [None] * 4
    assert Path.cwd() == directory


def test_closing_ends_those_that_still_measure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def hang_after_the_first(batch: int) -> None:
        if batch > 1:
            time.sleep(600)

    monkeypatch.setattr(runner, "cores", lambda: 4)
    with closing(runner.Forks(CASES, [ByBatch(hang_after_the_first)])) as forks:
        assert forks.measure(CASES[0]).error is None
        assert len(active_children()) == 3
    assert not active_children()


def test_a_grid_is_counted_in_order_and_to_the_byte(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "cores", lambda: 2)
    monkeypatch.chdir(tmp_path)
    sizes = [option for case in CASES for option in ("--batch-size", str(case.batch_size))]
    shape = ["--trainer", "standard", "--seq-len", "8", "--model-size", "200x32x1x2"]
    asked = ["run", "--instrument", "logical", *shape, *sizes, "--json", "run.json"]
    assert main(asked) == 0
    outcomes = Run.load(tmp_path / "run.json").outcomes
    assert [outcome.case for outcome in outcomes] == CASES
    for outcome in outcomes:
        assert outcome.rows == Logical().count(outcome.case).rows
