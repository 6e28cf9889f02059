"""A project's own fixture of the name ``ncu`` is its own."""

from __future__ import annotations

import pytest

from tests.plugin.conftest import RunSuite

OWN = """
import pytest

@pytest.fixture
def ncu():
    return "New Caledonia University"

def test_own(ncu):
    assert ncu.startswith("New")
"""
EXTENDED = """
import pytest

@pytest.fixture
def ncu(ncu):
    return ncu

def test_extended(ncu):
    pass
"""


@pytest.mark.parametrize(("suite", "outcome"), [(OWN, "passed"), (EXTENDED, "skipped")])
def test_only_what_uses_that_of_dpbench_waits_for_the_option(
    project: RunSuite, pytester: pytest.Pytester, suite: str, outcome: str
) -> None:
    pytester.makepyfile(test_suite=suite)
    project("-n0", replayed=False).assert_outcomes(**{outcome: 1})
