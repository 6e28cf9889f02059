"""Ways in which a session's tests may lose what a limit must judge; none of them passes."""

from __future__ import annotations

import pytest

from dpbench.instruments.logical.counter import ByteCounter  # noqa: F401  # loads torch
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

ESCAPES: dict[str, tuple[str, str, str, dict[str, int]]] = {
    "a step moves ten times as much": (
        "SIZE = 100",
        "SIZE = 1000",
        "*1 regression against*",
        {"failed": 3},
    ),
    "skipped": (
        NAMED,
        f"@pytest.mark.skip\n{NAMED}",
        "*of standard-bs2-*: not in this session",
        {},
    ),
    "skips": (NAMED, f"{NAMED}    pytest.skip('not today')\n", "*not in this session", {}),
    "fails as expected": (
        NAMED,
        f"@pytest.mark.xfail\n{NAMED}    assert False\n",
        "*not in this session",
        {"xfailed": 1},
    ),
    "is not run": (
        NAMED,
        f"@pytest.mark.xfail(run=False)\n{NAMED}",
        "*not in this session",
        {"xfailed": 1},
    ),
    "a step's test is skipped": (
        "def test_steps(",
        "@pytest.mark.skip\ndef test_steps(",
        "*of test_suite.py::test_steps:first, test_suite.py::test_steps:second: not in this*",
        {},
    ),
    "measures nothing any more": (
        '    request.getfixturevalue("logical_io")("standard", batch_size=2, workload="layer")',
        "    pass",
        "*of standard-bs2-*: not in this session",
        {},
    ),
    "measures another case": (
        "batch_size=2",
        "batch_size=3",
        "*of standard-bs2-*: not in this*",
        {},
    ),
    "measures one step less": ("    logical_io(second)\n", "", "*steps:second: not in this*", {}),
    "has no parameters any more": (
        '["a/b", "a_b", pytest.param("x", id="x" * 300)]',
        "[]",
        "*test_paths[[]a_b[]]:<lambda>*: not in this session",
        {},
    ),
    "the module is skipped": (
        "SIZE = 100",
        "pytest.skip('not here', allow_module_level=True)",
        "*of *standard-bs2-*test_suite.py::test_steps:first*: not in this session",
        {},
    ),
}
"""What of the suite is replaced by what, a line that says so, and how many tests fail of it."""


def test_none_of_them_passes(project: RunSuite, pytester: pytest.Pytester) -> None:
    def counted(*arguments: str) -> pytest.RunResult:
        return project("-n0", *arguments, replayed=False)

    limit = ("--dpbench-compare-fail=logical_bytes:5%", "--dpbench-compare-first-run-ok")
    pytester.makepyfile(test_suite=SUITE, test_other="def test_other(logical_io): pass")
    counted("--dpbench-save=good").assert_outcomes(passed=6)
    assert len(saved(pytester.path, 1).outcomes) == 6
    counted("--dpbench-save=newer", "-k", "test_paths and a_b").assert_outcomes(passed=1)
    whole = counted(*limit)
    assert whole.ret == 0
    for escape, (old, new, line, outcomes) in ESCAPES.items():
        assert old in SUITE
        pytester.makepyfile(test_suite=SUITE.replace(old, new))
        result = counted(*limit)
        assert result.ret != 0, escape
        result.stdout.fnmatch_lines([line])
        found = result.parseoutcomes()
        assert {name: found.get(name, 0) for name in outcomes} == outcomes, escape
