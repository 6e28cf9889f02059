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

import msgspec

from dpbench.core.files import locked, write_text
from dpbench.core.subject import Asked, Subject
from dpbench.results.limits import Judgement
from dpbench.results.outcome import Outcome, merge_duplicates

Parsed = TypeVar("Parsed")

Limits = tuple[str, ...] | None
"""The limits of a test's marker as texts, or None if the limits on the command line apply."""

OUTCOME, REQUESTS, JUDGED = ".json", ".requests", ".judged"
"""The extensions of files with an outcome, with requests of tests, and with what limits say."""


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
    limits: Limits = None
    params: Mapping[str, str] | None = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def asked(self) -> list[tuple[Subject, str]]:
        """Pairs of the case and each instrument; empty if the case is not known."""
        return [(self.case, name) for name in self.instruments] if self.case else []

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
        name = _name(case, by)
        with locked(self.directory / f"{name}.lock"):
            if not (outcome := self.outcome(case, by)):
                self.take({f"{name}{OUTCOME}": measure(case).as_json()})
                outcome = self.outcome(case, by)
            assert outcome
            return outcome

    def outcome(self, case: Subject, by: Sequence[str]) -> Outcome | None:
        """Return the outcome of a case with these instruments, or None if there is none yet."""
        name = f"{_name(case, by)}{OUTCOME}"
        known = name in self._read or name in self.unwritten or (self.directory / name).exists()
        return self._load(name, Outcome.from_json) if known else None

    def add(self, outcomes: Iterable[Outcome]) -> None:
        """Add outcomes that another process or an earlier run has measured."""
        for outcome in outcomes:
            self.once(outcome.case, {outcome.case: outcome}.__getitem__, by=outcome.instruments)

    def ask(self, requests: Iterable[Request]) -> None:
        """Share requests of tests with all processes."""
        self._tell(REQUESTS, {"requests": msgspec.to_builtins([*requests])})

    def tell_judged(self, limits: Limits, asked: Asked, judgement: Judgement) -> None:
        """Share with all processes what limits say of subjects."""
        keys = [repr((limits, *key)) for key in asked]
        self._tell(JUDGED, {"keys": keys, **msgspec.to_builtins(judgement)})

    def _tell(self, ending: str, data: dict[str, Any]) -> None:
        self.take({f"{time.monotonic_ns():020}-{os.getpid()}{ending}": data})

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
        """Return the names of files with an extension, in their order."""
        written = self._directory.glob(f"*{ending}") if self._directory else ()
        names = {path.name for path in written}
        return sorted(names | {name for name in self.unwritten if name.endswith(ending)})

    def _written_at(self, name: str) -> tuple[bool, int]:
        """Return a key that sorts files by time. Those that could not be written come last."""
        unwritten = name in self.unwritten
        return unwritten, 0 if unwritten else (self.directory / name).stat().st_mtime_ns

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
            return msgspec.convert(payload["requests"], list[Request])

        names = self._names(REQUESTS)
        return [request for name in names for request in self._load(name, read)]

    @property
    def judgements(self) -> list[Judgement]:
        """What limits say, as far as they were judged, the earliest first."""
        told = (self._load(name, dict) for name in self._names(JUDGED))
        return [msgspec.convert(each, Judgement) for each in told]

    def never_judged(self, limits: Limits, asked: Asked) -> list[tuple[Subject, str]]:
        """Return the subjects for which no process has told what these limits say."""
        told = {key for name in self._names(JUDGED) for key in self._load(name, dict)["keys"]}
        return [key for key in asked if repr((limits, *key)) not in told]

    def outcomes(self) -> list[Outcome]:
        """Return the outcomes with the tests that requested them, the earliest measured first."""
        names = sorted(self._names(OUTCOME), key=self._written_at)
        measured = [self._load(name, Outcome.from_json) for name in names]
        finished = {(outcome.case, outcome.instruments) for outcome in measured}
        # A case may have been requested but not measured yet.
        asked = [each for each in self.requests if (each.case, each.instruments) in finished]
        of_tests = [each.as_outcome() for each in asked if each.params is not None]
        return [*merge_duplicates([*measured, *of_tests])]

    def close(self) -> None:
        """Remove the directory, unless this process is a fork of the process that owns it."""
        if self._directory is not None and os.getpid() == self._owner:
            shutil.rmtree(self._directory, ignore_errors=True)


def _name(case: Subject, by: Sequence[str]) -> str:
    """Return a name for files: a hash, because ids may have characters that names cannot have."""
    return hashlib.sha256(repr((case, *by)).encode()).hexdigest()
