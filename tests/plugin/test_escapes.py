"""What a session's tests ask for no more is named; what they do ask for must be judged."""

from __future__ import annotations

import pytest

from dpbench.instruments.logical.counter import OperatorCounter  # noqa: F401  # loads torch
from tests.plugin.conftest import RunSuite
from tests.plugin.saved_runs import saved

SUITE = """
import pytest
import torch

SIZE = 100

def first():
    torch.ones(SIZE).clone()

def second():
    torch.ones(50).clone()

def test_steps(logical_io):
    logical_io(first)
    logical_io(second)

@pytest.mark.parametrize("path", ["a/b", "a_b", pytest.param("x", id="x" * 300)])
def test_paths(logical_io, path):
    size = 10 if path == "a/b" else SIZE
    logical_io(lambda: torch.ones(size).clone())

def test_by_name(request):
    request.getfixturevalue("logical_io")("standard", batch_size=2, workload="layer")
"""
NAMED = "def test_by_name(request):\n"

CHANGES: dict[str, tuple[str, str, str]] = {
    "skipped": (NAMED, f"@pytest.mark.skip\n{NAMED}", "standard-bs2-*"),
    "skips": (NAMED, f"{NAMED}    pytest.skip('not today')\n", "standard-bs2-*"),
    "measures another case": ("batch_size=2", "batch_size=3", "standard-bs2-*"),
}
"""What of the suite is replaced by what, and what it asks for no more."""

LIMIT = ("--dpbench-compare-fail=logical_bytes:5%", "--dpbench-compare-first-run-ok")


@pytest.mark.slow
def test_what_is_asked_for_no_more_is_named(project: RunSuite, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_suite=SUITE)
    project("-n0", "--dpbench-save=good", replayed=False).assert_outcomes(passed=5)
    assert len(saved(pytester.path, 1).outcomes) == 6
    for change, (old, new, lost) in CHANGES.items():
        assert old in SUITE
        pytester.makepyfile(test_suite=SUITE.replace(old, new))
        result = project("-n0", *LIMIT, replayed=False)
        assert result.ret == 0, change
        result.stdout.fnmatch_lines([f"dpbench: not compared, because not requested: {lost}"])


def test_every_test_of_what_got_worse_fails(project: RunSuite, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_suite=SUITE)
    project("-n0", "--dpbench-save=good", replayed=False).assert_outcomes(passed=5)
    pytester.makepyfile(test_suite=SUITE.replace("SIZE = 100", "SIZE = 1000"))
    result = project("-n0", *LIMIT, replayed=False)
    result.assert_outcomes(passed=2, failed=3)
    result.stdout.fnmatch_lines(["dpbench: 1 regression against 0001_good; see the section*"])


SKIPPED = """
import pytest

@pytest.mark.skip
def test_limited(dpbench_case, logical_io):
    logical_io(dpbench_case)
"""


def test_what_is_asked_for_and_not_measured_fails(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(test_suite=SKIPPED.replace("@pytest.mark.skip", ""))
    project("-n0", "--dpbench-save=good", replayed=False).assert_outcomes(passed=2)
    pytester.makepyfile(test_suite=SKIPPED)
    result = project("-n0", *LIMIT, replayed=False)
    result.assert_outcomes(skipped=2)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    why = "ERROR: dpbench: logical_bytes:5% was not checked for"
    result.stdout.fnmatch_lines([f"{why} {name}-*: not in this*" for name in ("standard", "dpsgd")])
