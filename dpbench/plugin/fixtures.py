"""Which fixtures of dpbench a test takes, and with which case."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from dpbench.case import Case
from dpbench.settings import Settings

DEFINED_IN = "dpbench.plugin.each_test"
"""The module of dpbench's fixtures."""

NEEDS = {"ncu": "--ncu", "counters": "--cupti or --ncu"}
"""The fixtures that measure, and the options without which their tests are skipped."""

EVERY = (*NEEDS, "logical_io")


def measuring(settings: Settings) -> list[str]:
    """Those of `NEEDS` that measure in this session."""
    if settings.ncu or settings.instrument or settings.disable:
        return [*NEEDS]
    return ["counters"] if settings.cupti else []


def takes(item: pytest.Item, fixtures: Collection[str] = EVERY) -> bool:
    """Whether a test takes one of these fixtures of dpbench's, and not a project's own."""
    info = getattr(item, "_fixtureinfo", None)
    return info is not None and any(_is_ours(info.name2fixturedefs, name) for name in fixtures)


def _is_ours(definitions: dict[str, Any], fixture: str) -> bool:
    for definition in reversed(definitions.get(fixture, ())):
        if definition.func.__module__ == DEFINED_IN:
            return True
        if fixture not in definition.argnames:  # else it extends the one that it replaces
            return False
    return False


def case_of(item: pytest.Item) -> Case | None:
    """The case of the grid that a test is parametrised with, if it is."""
    callspec = getattr(item, "callspec", None)
    case = callspec.params.get("dpbench_case") if callspec else None
    return case if isinstance(case, Case) else None
