"""Outcomes of one session on disk, so that its processes measure each case once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from dpbench.case import Case
from dpbench.results.outcome import Outcome, write_text


class OutcomeStore:
    """A directory with one file per case and way to measure it.

    A process that dies takes nothing with it: what it had measured is there.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def once(
        self, case: Case, measure: Callable[[Case], Outcome], *, by: str = "measured"
    ) -> Outcome:
        """The outcome of a case: measured by whoever asks first, while others wait.

        Args:
            case: the case.
            measure: how to measure it, if nobody has.
            by: what it is measured with; outcomes by different instruments are kept apart.
        """
        name = f"{case.id}.{by}".replace("/", "_")
        saved = self.directory / f"{name}.json"
        with FileLock(self.directory / f"{name}.lock"):
            if saved.exists():
                return _load(saved)
            outcome = measure(case)
            write_text(saved, json.dumps(outcome.as_json()))
            return outcome

    def lock(self) -> FileLock:
        """A lock for what the session's processes write together."""
        return FileLock(self.directory / "session.lock")

    def outcomes(self) -> list[Outcome]:
        """Everything measured so far, in the order in which it was finished."""
        files = sorted(self.directory.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        return [_load(path) for path in files]


def _load(path: Path) -> Outcome:
    return Outcome.from_json(json.loads(path.read_text(encoding="utf-8")))
