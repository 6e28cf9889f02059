"""Outcomes of one session on disk, so that its processes measure each case once."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from dpbench.case import Case
from dpbench.files import locked, write_text
from dpbench.results.outcome import Outcome


class OutcomeStore:
    """A directory with one file per case and way to measure it.

    A process that dies takes nothing with it: what it had measured is there. What cannot be
    written (a full disk) stays with the process that measured it, in `unwritten`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.unwritten: dict[Path, Outcome] = {}
        self._read: dict[Path, Outcome] = {}

    def once(
        self, case: Case, measure: Callable[[Case], Outcome], *, by: Sequence[str] = ("measured",)
    ) -> Outcome:
        """The outcome of a case: measured by whoever asks first, while others wait.

        Args:
            case: the case.
            measure: how to measure it, if nobody has.
            by: what it is measured with; outcomes by different instruments are kept apart.
        """
        name = f"{case.id}.{'+'.join(by)}".replace("/", "_")
        path = self.directory / f"{name}.json"
        with locked(self.directory / f"{name}.lock"):
            if path in self.unwritten:
                return self.unwritten[path]
            if path.exists():
                return self._load(path)
            outcome = measure(case)
            try:
                write_text(path, json.dumps(outcome.as_json()))
            except OSError:
                self.unwritten[path] = outcome
            return outcome

    def keep(self, outcome: Outcome) -> None:
        """Take over an outcome that was measured elsewhere."""
        self.once(outcome.case, lambda case: outcome, by=outcome.instruments)

    def lock(self) -> AbstractContextManager[bool]:
        """A lock for what the session's processes write together."""
        return locked(self.directory / "session.lock")

    def outcomes(self) -> list[Outcome]:
        """Everything measured so far, in the order in which it was finished."""
        files = sorted(self.directory.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        return [*map(self._load, files), *self.unwritten.values()]

    def _load(self, path: Path) -> Outcome:
        if path not in self._read:  # it is written once
            self._read[path] = Outcome.from_json(json.loads(path.read_text(encoding="utf-8")))
        return self._read[path]
