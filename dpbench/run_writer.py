"""The files that a session leaves: its run in the storage, and those that were asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpbench.core.errors import ConfigurationError
from dpbench.core.files import check_writable, in_words, is_stream, write_text
from dpbench.results.conditions import automatic_name, resumed
from dpbench.results.outcome import document as as_document
from dpbench.results.run import Run
from dpbench.results.storage import Storage
from dpbench.show.outputs import write_output
from dpbench.show.view import TableOptions

if TYPE_CHECKING:
    from dpbench.core.settings import Settings

Hook = Callable[[dict[str, Any]], object]
"""Changes what the session writes."""


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
                begun = resumed(Run.load(path), begun)
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
            cases = len(Run.load_head(path).document.get("cases", ()))
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
