"""Writes the files of a session: the saved run, and the files that options name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpbench.core.errors import ConfigurationError
from dpbench.core.files import check_writable, in_words, write_text
from dpbench.results.conditions import automatic_name, merge_interrupted
from dpbench.results.outcome import document as as_document
from dpbench.results.rows import NO_HARDWARE
from dpbench.results.run import Run
from dpbench.results.storage import Storage
from dpbench.show.view import TableOptions

if TYPE_CHECKING:
    from dpbench.core.gpu import Gpu
    from dpbench.core.settings import Settings
    from dpbench.instruments.interface import Instrument

Hook = Callable[[dict[str, Any]], object]
"""A function that may change a dictionary before the session writes the dictionary."""


class RunWriter:
    """Writes the files of a session. Each process of the session has one writer.

    Args:
        settings: the session's settings.
        view: the options of the tables.
        notes: lines that the session prints at its end. `close` adds the path of the saved run.
        problem: called with the reason if a file cannot be written.
        on_document: called with the run's document before each write of the run.
        path: the file of the saved run, if another process has opened the file.
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
        self._lock = ExitStack()
        """Holds the lock on the run's file."""
        self._error: OSError | None = None

    def open(self, device: str | None, begun: Run, session: Mapping[str, Any]) -> Run:
        """Lock the file of an interrupted run, or create and lock the file of a new run.

        Args:
            device: the device on which the run is measured, see `device_of`.
            begun: the run of this session, still without outcomes.
            session: the ``session`` entry of a new file.

        Returns:
            The run of this session, which has the outcomes of the interrupted run if there is one.
        """
        settings, storage = self.settings, Storage(self.settings.storage)
        path = None
        if settings.resume:
            path = storage.interrupted(device, settings.shard, settings.save, self.notes)
        with ExitStack() as held:
            if path is not None:
                check_writable(path.parent)
                held.enter_context(storage.writing(path))  # lock the file before reading it
                begun = merge_interrupted(Run.load(path), begun)
            elif settings.save is None and not settings.autosave:
                raise ConfigurationError(f"no interrupted run in {storage.directory} to resume")
            else:
                name = automatic_name(begun) if settings.save is None else settings.save
                empty = as_document((), begun.environment, session)
                path = storage.allocate(name, device, json.dumps(empty))
                held.enter_context(storage.writing(path))
            self.path, self._lock = path, held.pop_all()
        return begun

    def _outputs(self, *, last: bool) -> list[tuple[str, Path]]:
        """Return the outputs to write now.

        Before the last write, these are only JSON files, so that they have the outcomes so far if
        the session is killed.
        """
        files = self.settings.files.values()
        return [f for f in files if last or f[0] == "json"]

    def wanted(self, *, last: bool) -> bool:
        """Return True if there is a file to write now."""
        return bool(self.path or self._outputs(last=last))

    def write(self, run: Run, session: Mapping[str, Any], *, last: bool) -> None:
        """Write the run and JSON files. If ``last`` is True, also write all other outputs.

        Ratios and other derived metrics are computed for the last write only, because this takes
        long.
        """
        document = {**(run.with_derived() if last else run).document, "session": deepcopy(session)}
        self._on_document(document)
        run = Run(self.path or Path("this session"), document)
        if self.path:
            self._error = None
            try:
                write_text(self.path, run.text)
            except OSError as error:
                self._error = error
        for kind, path in self._outputs(last=last):
            from dpbench.show.outputs import write_output  # imports pandas

            with reporting(self.problem):
                # JSON files do not show the file's name, so all of them can have the same text.
                named = run if kind == "json" else replace(run, path=path)
                write_output(kind, path, [named], self.view)

    def close(self) -> None:
        """Unlock the run's file and add a note with its path. Remove a file without cases."""
        if (path := self.path) is None:
            return
        cases = 0
        with self._lock, suppress(ConfigurationError, OSError):  # the file may be gone
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
    """Call ``problem`` with the message of a `ConfigurationError` or `OSError` in the block."""
    try:
        yield
    except ConfigurationError as error:
        problem(str(error))
    except OSError as error:
        problem(in_words(error))


def device_of(instruments: Iterable[Instrument], settings: Settings, gpu: Gpu | None) -> str | None:
    """Return the device on which instruments measure, or None if no instrument uses hardware."""
    if not any(instrument.hardware for instrument in instruments):
        return None
    return gpu.name if gpu and settings.device == "cuda" else "cpu"


def sources(
    instruments: Iterable[Instrument], settings: Settings, gpu: Gpu | None
) -> list[tuple[str, str]]:
    """Return pairs of a device and an instrument, from which a session can have rows.

    For pytest, the pair of the instrument ``logical`` is always included, because a test can count
    logical bytes with any options.
    """
    pairs = [(device_of([i], settings, gpu) or NO_HARDWARE, i.name) for i in instruments]
    return list(dict.fromkeys([*pairs, *([(NO_HARDWARE, "logical")] * settings.of_pytest)]))
