"""Shares the outcomes of cases and the requests of tests between the processes of a session."""

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

from dpbench.core.files import locked, write_text
from dpbench.core.subject import Subject, subject_from
from dpbench.results.outcome import Outcome, merge_duplicates

Keys = list[tuple[Subject, str]]
"""Pairs of a case and the name of an instrument that measures the case."""

Parsed = TypeVar("Parsed")

OUTCOME, REQUESTS = ".json", ".requests"
"""The extension of a file with an outcome, and the extension of a file with requests of tests."""


@dataclass(frozen=True)
class Request:
    """A test's request to measure a case.

    Args:
        test: the test's id; empty if a hook made the request outside tests.
        case: the case; None if the case is not known before the test runs.
        instruments: the names of the instruments.
        limits: the limits in the test's marker, as text; None if the limits on the command line
            apply.
        params: the test's parameters as text; None in requests that the plugin makes before the
            test runs, and in requests that hooks make outside tests.
        extra_info: what the test adds to the run's JSON document.
    """

    test: str
    case: Subject | None = None
    instruments: tuple[str, ...] = ()
    limits: tuple[str, ...] | None = None
    params: Mapping[str, str] | None = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def asked(self) -> list[tuple[Subject, str]]:
        """Pairs of the case and each instrument; empty if the case is not known."""
        return [(self.case, name) for name in self.instruments] if self.case else []

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON types, for `from_json`."""
        plain: dict[str, Any] = json.loads(json.dumps({**vars(self), "case": None}))
        return plain | {"case": {**self.case.columns} if self.case else None}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Request:
        """Return the request that `as_json` described."""
        known: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in data.items()}
        return cls(**known | {"case": subject_from(data["case"]) if data["case"] else None})

    def as_outcome(self) -> Outcome:
        """Return an outcome with the test and its ``extra_info``, but without measured rows."""
        assert self.case is not None
        tests = ({"test": self.test, "params": self.params},) if self.test else ()
        extra = self.extra_info
        return Outcome(self.case, (), instruments=self.instruments, extra_info=extra, tests=tests)


class SessionStore:
    """Shares outcomes and requests between the processes of a session, as files in a directory.

    The files remain if a process dies. If a file cannot be written, e.g. on a full disk, the
    dictionary ``unwritten`` keeps its content by file name.

    Args:
        directory: the shared directory; None in the first process, which creates
            the directory on first use.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        self._directory = Path(directory) if directory else None
        self._owner = os.getpid()
        self.unwritten: dict[str, dict[str, Any]] = {}
        self._read: dict[str, Any] = {}

    @property
    def directory(self) -> Path:
        """The shared directory."""
        self._directory = self._directory or Path(tempfile.mkdtemp(prefix="dpbench-"))
        return self._directory

    def once(
        self,
        case: Subject,
        measure: Callable[[Subject], Outcome],
        *,
        by: Sequence[str] = ("measured",),
    ) -> Outcome:
        """Return the outcome of a case, which the first process to call this method measures.

        Other processes that call this method meanwhile wait until the case is measured.

        Args:
            case: the case.
            measure: measures the case.
            by: the names of the instruments. For each combination of instruments, a case has a
                separate outcome.
        """
        # The name is a hash, because ids may contain characters that file names cannot contain.
        name = hashlib.sha256(repr((case, *by)).encode()).hexdigest()
        with locked(self.directory / f"{name}.lock"):
            name += OUTCOME
            if not (name in self.unwritten or (self.directory / name).exists()):
                self.take({name: measure(case).as_json()})
            return self._load(name, Outcome.from_json)

    def keep(self, outcomes: Iterable[Outcome]) -> None:
        """Add outcomes that another process or an earlier run has measured."""
        for outcome in outcomes:
            self.once(outcome.case, {outcome.case: outcome}.__getitem__, by=outcome.instruments)

    def ask(self, requests: Iterable[Request]) -> None:
        """Share requests of tests with all processes."""
        name = f"{time.monotonic_ns():020}-{os.getpid()}{REQUESTS}"
        self.take({name: {"requests": [each.as_json() for each in requests]}})

    def take(self, files: Mapping[str, dict[str, Any]]) -> None:
        """Write files, which may be files that another process could not write."""
        for name, data in files.items():
            try:
                write_text(self.directory / name, json.dumps(data))
            except OSError:
                self.unwritten[name] = data

    def lock(self) -> AbstractContextManager[int | None]:
        """Return a lock to hold while a process writes files that other processes also write."""
        return locked(self.directory / "session.lock")

    def _names(self, ending: str) -> list[str]:
        """Return the names of files with an extension, the earliest written first.

        The names of files that could not be written come last.
        """
        written = self._directory.glob(f"*{ending}") if self._directory else ()
        in_order = sorted(written, key=lambda path: (path.stat().st_mtime_ns, path.name))
        every = dict.fromkeys([*(path.name for path in in_order), *self.unwritten])
        return [name for name in every if name.endswith(ending)]

    def _load(self, name: str, parse: Callable[[dict[str, Any]], Parsed]) -> Parsed:
        """Return the parsed content of a file. The content is cached, because it never changes."""
        if name not in self._read:
            unwritten = self.unwritten.get(name)
            self._read[name] = parse(
                unwritten or json.loads((self.directory / name).read_text(encoding="utf-8"))
            )
        known: Parsed = self._read[name]
        return known

    @property
    def requests(self) -> list[Request]:
        """Requests of tests and hooks, the earliest first."""

        def read(payload: Mapping[str, Any]) -> list[Request]:
            return [*map(Request.from_json, payload["requests"])]

        names = sorted(self._names(REQUESTS))
        return [request for name in names for request in self._load(name, read)]

    def outcomes(self) -> list[Outcome]:
        """Return the outcomes with the tests that requested them, the earliest measured first."""
        measured = [self._load(name, Outcome.from_json) for name in self._names(OUTCOME)]
        finished = {(outcome.case, outcome.instruments) for outcome in measured}
        # A case may have been requested but not measured yet.
        asked = [each for each in self.requests if (each.case, each.instruments) in finished]
        of_tests = [each.as_outcome() for each in asked if each.params is not None]
        return [*merge_duplicates([*measured, *of_tests])]

    def close(self) -> None:
        """Remove the directory, unless this process is a fork of the process that owns it."""
        if self._directory is not None and os.getpid() == self._owner:
            shutil.rmtree(self._directory, ignore_errors=True)
