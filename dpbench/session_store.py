"""Shares the results of a session's processes among them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from dpbench.core.case import Subject, subject_from
from dpbench.core.files import locked, write_text
from dpbench.results.outcome import Outcome, each_once

Asked = Sequence[tuple[Subject, str]]
"""Cases, each with the name of an instrument that shall measure it."""

Made = TypeVar("Made")

OUTCOME, REQUESTS = ".json", ".asked"
"""The endings of files with what was measured, and with what tests asked for."""


@dataclass(frozen=True)
class Request:
    """What a test asks for.

    Args:
        test: its id; empty for a hook that asks outside of every test.
        case: None if the test takes a fixture, and its parameters do not say for which case.
        instruments: those that shall measure the case.
        limits: the test's own, as written; None if those of the command line apply.
        params: its parameters as text; None as long as it has not called its fixture.
        extra_info: what it adds to the run's document.
    """

    test: str
    case: Subject | None = None
    instruments: tuple[str, ...] = ()
    limits: tuple[str, ...] | None = None
    params: Mapping[str, str] | None = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def asked(self) -> list[tuple[Subject, str]]:
        """The case by each of the instruments."""
        return [(self.case, name) for name in self.instruments] if self.case else []

    def as_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        plain: dict[str, Any] = json.loads(json.dumps({**vars(self), "case": None}))
        return plain | {"case": {**self.case.columns} if self.case else None}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Request:
        """The inverse of `as_json`."""
        known: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in data.items()}
        return cls(**known | {"case": subject_from(data["case"]) if data["case"] else None})

    def as_outcome(self) -> Outcome:
        """An outcome without rows: which test asked for a case, and what it added."""
        assert self.case is not None
        tests = ({"test": self.test, "params": self.params},) if self.test else ()
        extra = self.extra_info
        return Outcome(self.case, (), instruments=self.instruments, extra_info=extra, tests=tests)


class SessionStore:
    """Results shared by a session's processes: a file for each outcome and each test's request.

    Files survive the process that wrote them. What cannot be written (a full disk) is kept in
    memory, in `unwritten`, by file name.

    Args:
        directory: the shared directory; None in the first process, which makes it when needed.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        self._directory = Path(directory) if directory else None
        self._owner = os.getpid()
        self.unwritten: dict[str, dict[str, Any]] = {}
        self._read: dict[str, Any] = {}

    @property
    def directory(self) -> Path:
        """Where the files are."""
        self._directory = self._directory or Path(tempfile.mkdtemp(prefix="dpbench-"))
        return self._directory

    def once(
        self,
        case: Subject,
        measure: Callable[[Subject], Outcome],
        *,
        by: Sequence[str] = ("measured",),
    ) -> Outcome:
        """The outcome of a case: the first process to ask measures it, while others wait.

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

    def ask(self, requests: Iterable[Request]) -> None:
        """Let all processes know what tests ask for."""
        name = f"{time.monotonic_ns():020}-{os.getpid()}{REQUESTS}"
        self.take({name: {"requests": [each.as_json() for each in requests]}})

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
        """The parsed content of a file, which is written only once."""
        if name not in self._read:
            unwritten = self.unwritten.get(name)
            self._read[name] = made(
                unwritten or json.loads((self.directory / name).read_text(encoding="utf-8"))
            )
        known: Made = self._read[name]
        return known

    @property
    def requests(self) -> list[Request]:
        """What tests are known to ask for, in order: before they run, and when they do ask."""
        files = (self._load(name, _requests) for name in sorted(self._names(REQUESTS)))
        return [request for requests in files for request in requests]

    def outcomes(self) -> list[Outcome]:
        """Outcomes of cases in the order in which they were finished, with tests that asked."""
        measured = [self._load(name, Outcome.from_json) for name in self._names(OUTCOME)]
        there = {(outcome.case, outcome.instruments) for outcome in measured}
        # A test says what it asks for before that is measured, which may never end.
        asked = [each for each in self.requests if (each.case, each.instruments) in there]
        of_tests = [each.as_outcome() for each in asked if each.params is not None]
        return [*each_once([*measured, *of_tests])]

    def close(self) -> None:
        """Remove the directory, unless this is a fork of the process that made it."""
        if self._directory is not None and os.getpid() == self._owner:
            shutil.rmtree(self._directory, ignore_errors=True)


def _requests(payload: Mapping[str, Any]) -> list[Request]:
    return [*map(Request.from_json, payload["requests"])]
