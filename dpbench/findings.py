"""What the processes of a session have found, which each of them may ask for."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from dpbench.case import Case
from dpbench.results.outcome import Outcome, OutcomeStore, each_once

Asked = Sequence[tuple[Case, str]]
"""Cases, each with the name of an instrument that shall measure it."""


class Findings:
    """What the processes of a session have found.

    Args:
        directory: where they share it; None in the first process, which makes it when needed.
    """

    def __init__(self, directory: str | None = None) -> None:
        self._directory = Path(directory) if directory else None
        self._tests: Mapping[str, Asked] = {}

    @cached_property
    def store(self) -> OutcomeStore:
        """The files in the directory."""
        self._directory = self._directory or Path(tempfile.mkdtemp(prefix="dpbench-"))
        return OutcomeStore(self._directory)

    def share(self, **payload: Any) -> None:
        """Let all processes know what was found, each kind under its name."""
        self.store.tell(**payload)

    def _payloads(self, name: str) -> list[Any]:
        """What was shared under a name, by any process."""
        payloads = self.store.told() if self._directory else []
        return [payload[name] for payload in payloads if payload.get(name) is not None]

    def _distinct(self, name: str) -> list[dict[str, Any]]:
        """The entries of all lists that were shared under a name, each once."""
        known: list[dict[str, Any]] = []
        for entry in (entry for entries in self._payloads(name) for entry in entries):
            known += [entry] if entry not in known else []
        return known

    def outcomes(self) -> list[Outcome]:
        """Outcomes of cases, and which tests asked for them."""
        if self._directory is None:
            return []
        of_tests = [Outcome.from_json(entry) for e in self._payloads("outcomes") for entry in e]
        return [*each_once([*self.store.outcomes(), *of_tests])]

    @property
    def tests(self) -> Mapping[str, Asked]:
        """What each test, by its id, is known to ask for."""
        if not self._tests:
            for payload in self._payloads("tests")[:1]:
                self._tests = {test: _read(asked) for test, asked in payload.items()}
        return self._tests

    @property
    def limited(self) -> Asked | None:
        """What tests without limits of their own have asked for; None if there is no such test."""
        payloads = self._payloads("limited")
        return [key for asked in payloads for key in _read(asked)] if payloads else None

    @property
    def reference(self) -> str | None:
        """The file of the reference by which a test was judged first."""
        return next(iter(self._payloads("reference")), None)

    @property
    def regressions(self) -> list[dict[str, Any]]:
        """Rows of what got worse by more than a limit."""
        return self._distinct("regressions")

    @property
    def unjudged(self) -> list[dict[str, Any]]:
        """What limits could not judge: the fields of each `dpbench.results.gate.Unjudged`."""
        return self._distinct("unjudged")

    def close(self) -> None:
        """Remove the directory."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


def _read(asked: Iterable[tuple[dict[str, Any], str]]) -> list[tuple[Case, str]]:
    return [(Case.from_row(axes), name) for axes, name in asked]
