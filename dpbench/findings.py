"""What the processes of a session have found, which each of them may ask for."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

from dpbench.core.case import Case
from dpbench.core.files import locked, write_text
from dpbench.results.outcome import Outcome, each_once

Asked = Sequence[tuple[Case, str]]
"""Cases, each with the name of an instrument that shall measure it."""

Made = TypeVar("Made")

OUTCOME, PAYLOAD = ".json", ".told"
"""The endings of files with what was measured, and with what was shared."""


class Findings:
    """What the processes of a session have found, a file for each case and for each payload.

    What a process has written survives it. What cannot be written (a full disk) stays with the
    process that found it, in `unwritten`, by the name of its file.

    Args:
        directory: where they share it; None in the first process, which makes it when needed.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        self._directory = Path(directory) if directory else None
        self._owner = os.getpid()
        self.unwritten: dict[str, dict[str, Any]] = {}
        self._read: dict[str, Any] = {}
        self._tests: Mapping[str, Asked] = {}

    @property
    def directory(self) -> Path:
        """Where the files are."""
        self._directory = self._directory or Path(tempfile.mkdtemp(prefix="dpbench-"))
        return self._directory

    def once(
        self, case: Case, measure: Callable[[Case], Outcome], *, by: Sequence[str] = ("measured",)
    ) -> Outcome:
        """The outcome of a case: measured by whoever asks first, while others wait.

        Outcomes ``by`` different instruments are kept apart.
        """
        # A step's case is named after its test, whose id may hold what no file name can.
        name = hashlib.sha256(repr((case, *by)).encode()).hexdigest()
        with locked(self.directory / f"{name}.lock"):
            name += OUTCOME
            if not (name in self.unwritten or (self.directory / name).exists()):
                self.take({name: measure(case).as_json()})
            return self._load(name, Outcome.from_json)

    def keep(self, outcomes: Iterable[Outcome]) -> None:
        """Take over outcomes of another process or run."""
        for outcome in outcomes:
            self.once(outcome.case, {outcome.case: outcome}.__getitem__, by=outcome.instruments)

    def share(self, **payload: Any) -> None:
        """Let all processes know what was found, each kind under its name; objects as fields."""
        name = f"{time.monotonic_ns():020}-{os.getpid()}{PAYLOAD}"
        self.take({name: json.loads(json.dumps(payload, default=vars))})

    def take(self, files: Mapping[str, dict[str, Any]]) -> None:
        """Write these files, which may be what another process could not write."""
        for name, data in files.items():
            try:
                write_text(self.directory / name, json.dumps(data))
            except OSError:
                self.unwritten[name] = data

    def lock(self) -> AbstractContextManager[int | None]:
        """A lock for files that several processes of the session write."""
        return locked(self.directory / "session.lock")

    def _names(self, ending: str) -> list[str]:
        """The files with an ending, in the order in which they were written."""
        written = self._directory.glob(f"*{ending}") if self._directory else ()
        in_order = sorted(written, key=lambda path: (path.stat().st_mtime_ns, path.name))
        every = dict.fromkeys([*(path.name for path in in_order), *self.unwritten])
        return [name for name in every if name.endswith(ending)]

    def _load(self, name: str, made: Callable[[dict[str, Any]], Made]) -> Made:
        """What is made of a file, which is written once."""
        if name not in self._read:
            unwritten = self.unwritten.get(name)
            self._read[name] = made(
                unwritten or json.loads((self.directory / name).read_text(encoding="utf-8"))
            )
        known: Made = self._read[name]
        return known

    def shared(self, name: str) -> list[Any]:
        """What was shared under a name, by any process."""
        payloads = [self._load(file, dict) for file in sorted(self._names(PAYLOAD))]
        return [payload[name] for payload in payloads if payload.get(name) is not None]

    def _distinct(self, name: str) -> list[dict[str, Any]]:
        """The entries of all lists that were shared under a name, each once."""
        known: list[dict[str, Any]] = []
        for entry in (entry for entries in self.shared(name) for entry in entries):
            known += [entry] if entry not in known else []
        return known

    def outcomes(self) -> list[Outcome]:
        """Outcomes of cases in the order in which they were finished, and of tests that asked."""
        measured = [self._load(name, Outcome.from_json) for name in self._names(OUTCOME)]
        there = {(outcome.case, outcome.instruments) for outcome in measured}
        of_tests = [Outcome.from_json(entry) for e in self.shared("outcomes") for entry in e]
        # A test says what it asks for before that is measured, which may never end.
        of_tests = [each for each in of_tests if (each.case, each.instruments) in there]
        return [*each_once([*measured, *of_tests])]

    @property
    def tests(self) -> Mapping[str, Asked]:
        """What each test, by its id, is known to ask for."""
        if not self._tests:
            for payload in self.shared("tests")[:1]:
                self._tests = {test: _read(asked) for test, asked in payload.items()}
        return self._tests

    @property
    def limited(self) -> Asked | None:
        """What tests without limits of their own have asked for; None if there is no such test."""
        payloads = self.shared("limited")
        return [key for asked in payloads for key in _read(asked)] if payloads else None

    @property
    def reference(self) -> str | None:
        """The file of the reference by which a test was judged first."""
        return next(iter(self.shared("reference")), None)

    @property
    def regressions(self) -> list[dict[str, Any]]:
        """Rows of what got worse by more than a limit."""
        return self._distinct("regressions")

    @property
    def unjudged(self) -> list[dict[str, Any]]:
        """What limits could not judge: the fields of each `dpbench.results.gate.Unjudged`."""
        return self._distinct("unjudged")

    def close(self) -> None:
        """Remove the directory, unless this is a fork of the process that made it."""
        if self._directory is not None and os.getpid() == self._owner:
            shutil.rmtree(self._directory, ignore_errors=True)


def _read(asked: Iterable[tuple[dict[str, Any], str]]) -> list[tuple[Case, str]]:
    return [(Case.from_row(axes), name) for axes, name in asked]
