"""The file of a session: said before it begins, written as it goes, resumed if it broke off."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from dpbench.errors import ConfigurationError
from dpbench.files import in_words
from dpbench.results.conditions import Conditions
from dpbench.results.outcome import INTERRUPTED, Outcome, document, write_document
from dpbench.results.run import Run
from dpbench.results.storage import Storage, automatic_name


class RunFile:
    """The file of a session that is running: whole at any moment, ``interrupted`` until its end.

    Args:
        path: the file.
        held: what holds the file against other sessions; none in a process that only writes.
    """

    def __init__(self, path: Path, held: ExitStack | None = None) -> None:
        self.path = path
        self._held = held or ExitStack()

    @classmethod
    def create(
        cls, storage: Storage, name: str | None, device: str | None, conditions: Conditions
    ) -> RunFile:
        """A new file in a storage; without a name, commit and time are its name."""
        if name is None:
            started = datetime.fromisoformat(conditions.started)
            name = automatic_name(conditions.environment.get("code"), started)
        text = json.dumps(document([], conditions.environment, conditions.session(INTERRUPTED)))
        try:
            path = storage.allocate(name, device, text)
        except OSError as error:
            raise ConfigurationError(in_words(error)) from error
        held = ExitStack()
        held.enter_context(storage.writing(path))
        return cls(path, held)

    @classmethod
    def resume(
        cls, storage: Storage, path: Path, conditions: Conditions
    ) -> tuple[RunFile, Conditions, list[Outcome]]:
        """The file of an interrupted run, to go on with it; it is held before it is read.

        Returns:
            The file, the conditions as they go on, and the outcomes that need not be measured
            again: those that did not fail.

        Raises:
            ConfigurationError: a session is writing it, it is not interrupted any more, or
                versions, code, grid or settings are not what they were.
        """
        with ExitStack() as held:
            held.enter_context(storage.writing(path))
            run = Run.load(path)
            if run.status != INTERRUPTED:
                raise ConfigurationError(f"{path} has been completed by another session")
            differences = list(conditions.differences(run.environment, run.session))
            if run.updates:
                differences.append("cases were written into it later")
            if differences:
                raise ConfigurationError(
                    f"{path} cannot be resumed, for this session differs: {'; '.join(differences)}"
                )
            asked = max(run.cases_asked, conditions.cases_asked)
            conditions = replace(conditions, earlier_seconds=run.seconds or 0.0, cases_asked=asked)
            kept = [outcome for outcome in run.outcomes if outcome.error is None]
            return cls(path, held.pop_all()), conditions, kept

    def write(self, document: Mapping[str, Any]) -> None:
        """Bring the file up to date; if it cannot be written, what it held is still there."""
        write_document(self.path, document)

    def close(self) -> None:
        """Let go of the file."""
        self._held.close()

    def give_up(self, error: OSError) -> str:
        """Let go of a file that could not be written; one in which no case stands is removed.

        Returns:
            What went wrong, and what is saved all the same.
        """
        what = in_words(error)
        try:
            held = len(Run.load(self.path).outcomes)
        except ConfigurationError:  # gone, or out of reach
            self.close()
            return what
        if held:
            self.close()
            return f"{what}; the file holds {held} case{'s' if held > 1 else ''}"
        self.discard()
        return f"{what}; nothing is saved"

    def discard(self) -> None:
        """Remove the file, and let go of it."""
        self.path.unlink(missing_ok=True)
        self.close()
