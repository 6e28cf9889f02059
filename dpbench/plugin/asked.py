"""Which tests ask for cases, and whether each of them has come to an end."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dpbench.case import Case
from dpbench.errors import ConfigurationError
from dpbench.registry import locate
from dpbench.settings import Settings

FILE = "asked"
"""In the session's directory: what an xdist worker collected, for the controller."""

FIXTURES = "dpbench.pytest_plugin"
"""The module of dpbench's fixtures."""

NEEDS = {"ncu": "--ncu", "counters": "--cupti or --ncu"}
"""The fixtures that measure, and the options without which their tests are skipped."""


def measuring_fixtures(settings: Settings) -> list[str]:
    """Those of `NEEDS` that measure in this session."""
    if settings.ncu or settings.instrument or settings.disable:
        return [*NEEDS]
    return ["counters"] if settings.cupti else []


def takes(item: pytest.Item, fixture: str) -> bool:
    """Whether a test takes dpbench's fixture of this name, and not a project's own."""
    info = getattr(item, "_fixtureinfo", None)
    for definition in reversed(info.name2fixturedefs.get(fixture, ()) if info else ()):
        if definition.func.__module__ == FIXTURES:
            return True
        if fixture not in definition.argnames:  # else it extends the one that it replaces
            return False
    return False


def takes_any(item: pytest.Item) -> bool:
    """Whether a test takes one of dpbench's fixtures that measure or count."""
    return any(takes(item, fixture) for fixture in (*NEEDS, "logical_io"))


def case_of(item: pytest.Item) -> Case | None:
    """The case of the grid that a test is parametrised with, if it is."""
    callspec = getattr(item, "callspec", None)
    case = callspec.params.get("dpbench_case") if callspec else None
    return case if isinstance(case, Case) else None


@dataclass
class AskedCases:
    """The tests that ask for cases, and how those ended that have.

    Args:
        tests: the id of the grid's case that each asks for, by the test's; "" if it is not of it.
        problem: what one of them names that is not there, in a line; empty if all is.
        ended: why a test has not measured its case, if it has not, by the test's id.
    """

    tests: dict[str, str]
    problem: str = ""
    ended: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, items: Iterable[pytest.Item], fixtures: Collection[str]) -> AskedCases:
        """What these tests ask for, by any of these fixtures."""
        asking = [item for item in items if any(takes(item, fixture) for fixture in fixtures)]
        cases = {item.nodeid: case_of(item) for item in asking}
        tests = {test: case.id if case else "" for test, case in cases.items()}
        return cls(tests, _not_found({case for case in cases.values() if case}))

    def write(self, directory: Path) -> None:
        """Leave this for `read`."""
        with suppress(OSError):
            (directory / FILE).write_text(json.dumps([self.tests, self.problem]))

    def read(self, directory: Path) -> None:
        """Take over what a worker collected, if one did."""
        with suppress(OSError, ValueError):
            self.tests, self.problem = json.loads((directory / FILE).read_text())

    @property
    def cases(self) -> list[str]:
        """The ids of the grid's cases, in the order of the tests."""
        return [*dict.fromkeys(filter(None, self.tests.values()))]

    def hear(self, report: pytest.TestReport) -> None:
        """Note how a test ended."""
        if report.when != "teardown" and not (report.when == "setup" and report.passed):
            self.ended[report.nodeid] = _reason(report)

    @property
    def all_ended(self) -> bool:
        """Whether no test was kept from running: by Ctrl-C, an exit, a worker that is gone."""
        return self.tests.keys() <= self.ended.keys()

    def reasons(self, measured: Collection[str]) -> dict[str, str]:
        """Why cases have no outcome, by id."""
        return {
            case: self.ended[test]
            for test, case in self.tests.items()
            if case and case not in measured and test in self.ended
        }


def _reason(report: pytest.TestReport) -> str:
    """How a test ended, in a line."""
    details = report.longrepr
    if report.passed:
        text = "passed without measuring it"
    elif isinstance(details, tuple):  # where, and why it was skipped
        text = details[2]
    else:
        crash = getattr(details, "reprcrash", None)
        text = f"{report.outcome}: {crash.message if crash else details}"
    return f"{report.nodeid}: {text.partition(chr(10))[0]}"


def _not_found(cases: Iterable[Case]) -> str:
    """The first trainer or model whose module is nowhere, in words."""
    with pytest.MonkeyPatch.context() as patch:  # as for the process that measures it
        patch.setattr(sys, "path", [*sys.path, str(Path.cwd())])
        try:
            locate(cases)
        except ConfigurationError as error:
            return str(error)
    return ""
