"""The files that a session leaves: its run in the storage, and those that were asked for."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpbench.errors import ConfigurationError
from dpbench.files import check_writable, in_words, is_stream, write_text
from dpbench.results.conditions import automatic_name, resumed
from dpbench.results.outcome import COMPLETE, Outcome, write_document
from dpbench.results.outcome import document as as_document
from dpbench.results.run import Run
from dpbench.results.storage import Storage

if TYPE_CHECKING:
    from dpbench.settings import Settings
    from dpbench.show.view import View

DERIVE_SECONDS = 60.0
"""How often ratios and tables are written before a session's end."""

Hook = Callable[[dict[str, Any]], object]
"""Changes what the session writes."""


class Files:
    """The files of a session, which each of its processes writes.

    Args:
        settings: what was asked for.
        view: what the tables show.
        notes: what the end of the session says; also, what is saved.
        problem: hears which file cannot be written.
        on_document: called with the run's document each time before it is written.
        path: the run's file, if another process has opened it.
    """

    def __init__(
        self,
        settings: Settings,
        view: View,
        notes: list[str],
        problem: Callable[[str], object],
        on_document: Hook,
        path: str | None = None,
    ) -> None:
        self.settings, self.view, self.notes, self.problem = settings, view, notes, problem
        self.path = Path(path) if path else None
        self._on_document = on_document
        self._held = ExitStack()
        """What keeps other sessions from the run's file."""
        self._error: OSError | None = None
        self._derived = time.monotonic()

    def open(self, device: str | None, begun: Run, session: Mapping[str, Any]) -> Run:
        """Take the next number in the storage, or an interrupted run's, and hold its file.

        Args:
            device: what the session measures on; None without hardware.
            begun: the session before its first case.
            session: how it stands.

        Returns:
            The session, as it goes on with what the interrupted run has.
        """
        settings, storage = self.settings, Storage(self.settings.storage)
        path = None
        if settings.resume:
            path, skipped = storage.interrupted(device, settings.shard)
            self.notes += skipped
        with ExitStack() as held:
            if path is not None:
                check_writable(path.parent)
                held.enter_context(storage.writing(path))  # before it is read
                begun = resumed(Run.load(path), begun)
            elif settings.save is None and not settings.autosave:
                raise ConfigurationError(f"no interrupted run in {storage.directory} to resume")
            else:
                name = automatic_name(begun) if settings.save is None else settings.save
                empty = as_document((), begun.environment, session, derive=False)
                path = storage.allocate(name, device, json.dumps(empty))
                held.enter_context(storage.writing(path))
            self.path, self._held = path, held.pop_all()
        return begun

    def _now(self, *, last: bool) -> dict[str, Path]:
        """The files that are written now, by the name of their field."""
        files = self.settings.files.items()
        return {n: path for n, path in files if last or not (n == "html" or is_stream(path))}

    def wanted(self, *, last: bool) -> bool:
        """Whether there is a file to write."""
        return bool(self.path or self._now(last=last))

    def write(
        self,
        outcomes: Sequence[Outcome],
        environment: Mapping[str, Any],
        session: Mapping[str, Any],
        *,
        last: bool,
        before: Run | None,
    ) -> None:
        """Bring the files up to date; at the last also the page and pipes.

        What follows from the rows is worked out seldom before that: it takes as long as dozens of
        cases that are counted, and a killed session needs its rows. The page shows also the run
        that was ``before``, if one is given that has rows.
        """
        files = self._now(last=last)
        derive = last or time.monotonic() - self._derived > DERIVE_SECONDS
        document = as_document(outcomes, environment, deepcopy(session), derive=derive)
        self._on_document(document)  # which may change all of it
        if self.path:
            self._error = None
            try:
                write_document(self.path, document)
            except OSError as error:
                self._error = error
        with reporting(self.problem):
            if "json" in files:
                write_document(files["json"], document)
        with reporting(self.problem):
            if derive:
                from dpbench.show.export import write_renderings

                asked = session["cases_asked"] if session["status"] != COMPLETE else 0
                missing = max(0, asked - len({outcome.case for outcome in outcomes}))
                write_renderings(outcomes, self.view, missing=missing, **files)
                self._derived = time.monotonic()
        with reporting(self.problem):
            if "html" in files:
                self._write_page(files["html"], document, before)

    def _write_page(self, path: Path, document: Mapping[str, Any], before: Run | None) -> None:
        from dpbench.show.html.data import Material, labelled
        from dpbench.show.html.page import render

        shown = [(before.name, before.document)] if before and before.sources else []
        shown.append((path.stem, document))
        write_text(path, render(Material(labelled(shown), self.view.expected)))

    def let_go(self) -> None:
        """Let go of the run's file, and say what is saved; one in which no case stands goes."""
        path, cases, holds = self.path, 0, ""
        if path is None:
            return
        with self._held, suppress(ConfigurationError, OSError):  # gone, or out of reach
            cases = len(Run.load_head(path).document.get("cases", ()))
            holds = f"; the file holds {cases} case{'s' if cases > 1 else ''}"
            if not cases:
                holds = "; nothing is saved"
                path.unlink()
        if self._error is not None:
            self.problem(f"{in_words(self._error)}{holds}")
        elif cases:
            here = Path.cwd()
            shown = path.relative_to(here) if path.is_relative_to(here) else path
            self.notes.append(f"saved {shown}")


@contextmanager
def reporting(problem: Callable[[str], object]) -> Iterator[None]:
    """Let what cannot be done keep nothing else from being done."""
    try:
        yield
    except ConfigurationError as error:
        problem(str(error))
    except OSError as error:
        problem(in_words(error))
