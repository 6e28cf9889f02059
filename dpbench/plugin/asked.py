"""Which cases of the grid the collected tests ask for, and whether these can be built at all."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from dpbench.case import Case
from dpbench.errors import ConfigurationError
from dpbench.registry import locate

FILE = "asked"
"""In the session's directory: what an xdist worker collected, for the controller."""


@dataclass(frozen=True)
class Asked:
    """What a session's tests ask for.

    Args:
        cases: ids, in the order of the tests.
        problem: what one of them names that is not there, in a line; empty if all is.
    """

    cases: list[str]
    problem: str = ""

    @classmethod
    def of(cls, items: Iterable[pytest.Item], *, measures: bool) -> Asked:
        """What these tests ask for; those with the ``ncu`` fixture only if the session measures."""
        asked = [
            item.callspec.params.get("dpbench_case")
            for item in items
            if isinstance(item, pytest.Function)
            and hasattr(item, "callspec")
            and (measures or "ncu" not in item.fixturenames)
        ]
        cases = {case.id: case for case in asked if isinstance(case, Case)}
        return cls([*cases], _not_found(cases.values()))

    def note(self, directory: Path) -> None:
        """Leave this for `noted`."""
        with suppress(OSError):
            (directory / FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def noted(cls, directory: Path | None) -> Asked | None:
        """What a worker noted, if one did."""
        if directory is None:
            return None
        try:
            return cls(**json.loads((directory / FILE).read_text()))
        except (OSError, ValueError):
            return None


def _not_found(cases: Iterable[Case]) -> str:
    """The first trainer or model whose module is nowhere, in words.

    The process that measures a case finds what lies in its directory, too.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(Path.cwd())])
        try:
            locate(cases)
        except ConfigurationError as error:
            return str(error)
    return ""
