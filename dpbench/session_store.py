"""What a session stores: results that its processes share, its run, and the files asked for."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dpbench.core.errors import ConfigurationError
from dpbench.core.files import (
    check_writable,
    in_words,
    is_stream,
    locked,
    write_text,
)
from dpbench.core.subject import Subject, subject_from
from dpbench.results.conditions import automatic_name, merge_interrupted
from dpbench.results.outcome import Outcome, merge_duplicates
from dpbench.results.outcome import document as as_document
from dpbench.results.run import Run
from dpbench.results.storage import Storage
from dpbench.show.outputs import write_output
from dpbench.show.view import TableOptions

if TYPE_CHECKING:
    from dpbench.core.settings import Settings

Keys = list[tuple[Subject, str]]
"""Cases, each with the name of an instrument that shall measure it."""

Hook = Callable[[dict[str, Any]], object]
"""Changes what the session writes."""


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

        def read(payload: Mapping[str, Any]) -> list[Request]:
            return [*map(Request.from_json, payload["requests"])]

        names = sorted(self._names(REQUESTS))
        return [request for name in names for request in self._load(name, read)]

    def outcomes(self) -> list[Outcome]:
        """Outcomes of cases in the order in which they were finished, with tests that asked."""
        measured = [self._load(name, Outcome.from_json) for name in self._names(OUTCOME)]
        there = {(outcome.case, outcome.instruments) for outcome in measured}
        # A test says what it asks for before that is measured, which may never end.
        asked = [each for each in self.requests if (each.case, each.instruments) in there]
        of_tests = [each.as_outcome() for each in asked if each.params is not None]
        return [*merge_duplicates([*measured, *of_tests])]

    def close(self) -> None:
        """Remove the directory, unless this is a fork of the process that made it."""
        if self._directory is not None and os.getpid() == self._owner:
            shutil.rmtree(self._directory, ignore_errors=True)


class RunWriter:
    """The files of a session, which each of its processes writes.

    Args:
        settings: what was asked for.
        view: what the tables show.
        notes: lines that the session prints at its end, to which it adds what is saved.
        problem: called with the reason if a file cannot be written.
        on_document: called with the run's document each time before it is written.
        path: the run's file, if another process has opened it.
    """

    def __init__(
        self,
        settings: Settings,
        view: TableOptions,
        notes: list[str],
        problem: Callable[[str], object],
        on_document: Hook,
        path: str | None = None,
    ) -> None:
        self.settings, self.view, self.notes, self.problem = settings, view, notes, problem
        self.path = Path(path) if path else None
        self._on_document = on_document
        self._held = ExitStack()
        """Holds the lock on the run's file."""
        self._error: OSError | None = None

    def open(self, device: str | None, begun: Run, session: Mapping[str, Any]) -> Run:
        """Lock the file of an interrupted run, or a new one with the next number.

        Args:
            device: what the session measures on; None without hardware.
            begun: the session before its first case.
            session: the ``session`` of the new file's document.

        Returns:
            The session before its first case, with the outcomes of the interrupted run.
        """
        settings, storage = self.settings, Storage(self.settings.storage)
        path = None
        if settings.resume:
            path = storage.interrupted(device, settings.shard, settings.save, self.notes)
        with ExitStack() as held:
            if path is not None:
                check_writable(path.parent)
                held.enter_context(storage.writing(path))  # before it is read
                begun = merge_interrupted(Run.load(path), begun)
            elif settings.save is None and not settings.autosave:
                raise ConfigurationError(f"no interrupted run in {storage.directory} to resume")
            else:
                name = automatic_name(begun) if settings.save is None else settings.save
                empty = as_document((), begun.environment, session)
                path = storage.allocate(name, device, json.dumps(empty))
                held.enter_context(storage.writing(path))
            self.path, self._held = path, held.pop_all()
        return begun

    def _now(self, *, last: bool) -> list[tuple[str, Path]]:
        """The outputs to write now: before the end only JSON, which a killed session needs."""
        files = self.settings.files.values()
        return [f for f in files if last or (f[0] == "json" and not is_stream(f[1]))]

    def wanted(self, *, last: bool) -> bool:
        """Whether there is a file to write."""
        return bool(self.path or self._now(last=last))

    def write(self, run: Run, session: Mapping[str, Any], *, last: bool) -> None:
        """Bring the run and JSON up to date; at the last write every file.

        Derived metrics are also computed only then: they take as long as counting dozens of cases.
        """
        document = {**(run.with_derived() if last else run).document, "session": deepcopy(session)}
        self._on_document(document)  # which may change all of it
        run = Run(self.path or Path("this session"), document)
        if self.path:
            self._error = None
            try:
                write_text(self.path, run.text)
            except OSError as error:
                self._error = error
        for kind, path in self._now(last=last):
            with reporting(self.problem):
                # A page's title is its file's name; the JSON text is made once for all files.
                named = run if kind == "json" else replace(run, path=path)
                write_output(kind, path, [named], self.view)

    def close(self) -> None:
        """Unlock the run's file and note what is saved; a file without cases is removed."""
        if (path := self.path) is None:
            return
        cases = 0
        with self._held, suppress(ConfigurationError, OSError):  # gone, or out of reach
            cases = len(Run.load(path).document.get("cases", ()))
            if not cases:
                path.unlink()
        if self._error is not None:
            self.problem(f"{in_words(self._error)}; cases in the file: {cases}")
        elif cases:
            here = Path.cwd()
            self.notes.append(f"saved {path.relative_to(here) if here in path.parents else path}")


@contextmanager
def reporting(problem: Callable[[str], object]) -> Iterator[None]:
    """Report an error about configuration or files as a problem instead of raising it."""
    try:
        yield
    except ConfigurationError as error:
        problem(str(error))
    except OSError as error:
        problem(in_words(error))
