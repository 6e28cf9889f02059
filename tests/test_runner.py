"""One case through its instruments, beside what else is going on."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dpbench import Case
from dpbench.instruments.base import Instrument, InstrumentError, Running
from dpbench.results.rows import Measurement
from dpbench.runner import measure

CASE = Case("standard", batch_size=4, seq_len=64, model_size="tiny")


@dataclass(frozen=True)
class Rewriting(Instrument):
    """Writes the case's file when it starts, and reads it at the end; both meet in between."""

    name: ClassVar[str] = "rewriting"

    directory: Path
    text: str
    both_started: threading.Barrier
    patience: float

    def check(self) -> None:
        """It works anywhere."""

    def start(self, case: Case) -> Running:
        (self.directory / case.id).write_text(self.text)
        return Reading(self, self.directory / case.id)


@dataclass
class Reading(Running):
    """What was written must be there."""

    instrument: Rewriting
    path: Path

    def rows(self) -> list[Measurement]:
        with suppress(threading.BrokenBarrierError):
            self.instrument.both_started.wait(self.instrument.patience)
        if (found := self.path.read_text()) != self.instrument.text:
            raise InstrumentError(f"{found} is another session's")
        return []

    def cancel(self) -> None:
        """Nothing runs on."""


def at_once(*directories: Path, patience: float) -> tuple[list[str | None], bool]:
    """The errors of sessions with directories for their files, and whether all ran at once."""
    started = threading.Barrier(len(directories))
    instruments = [Rewriting(d, str(i), started, patience) for i, d in enumerate(directories)]
    with ThreadPoolExecutor() as pool:
        outcomes = list(pool.map(lambda instrument: measure(CASE, [instrument]), instruments))
    return [outcome.error for outcome in outcomes], not started.broken


def test_two_sessions_take_turns_where_they_write_the_same_files(tmp_path: Path) -> None:
    same = tmp_path / ".." / tmp_path.name
    assert at_once(tmp_path, same, patience=0.2) == ([None, None], False)


def test_sessions_with_files_of_their_own_do_not_wait(tmp_path: Path) -> None:
    assert at_once(tmp_path / "a", tmp_path / "b", patience=60) == ([None, None], True)


def test_directory_that_cannot_be_made_fails_the_case(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert at_once(tmp_path / "file", patience=0)[0] == ["FileExistsError"]
