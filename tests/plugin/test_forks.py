"""What a session measured is judged, whoever measured it: a fork of a test, a hook, a retry."""

from __future__ import annotations

import pytest

from dpbench.instruments.logical.counter import OperatorCounter  # noqa: F401  # loads torch
from tests.plugin.conftest import RunSuite
from tests.plugin.saved_runs import saved

MEASURES = """
import os
import torch

def step():
    torch.ones(int(os.environ["SIZE"])).clone()

def in_fork(function):
    child = os.fork()
    if not child:
        try:
            function()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
"""

LATER = """
import pytest
from measures import in_fork, step
kept = []

@pytest.fixture
def counts(logical_io):
    kept.append(logical_io)
"""

FORKED = """
import pytest
from _pytest.runner import runtestprotocol

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):  # as pytest-forked has it, which sends the reports back, too
    in_fork(lambda: runtestprotocol(item, log=False))
    for when in ("setup", "call", "teardown"):
        call = pytest.CallInfo(None, None, 0, 0, 0, when, _ispytest=True)
        report = pytest.TestReport.from_item_and_call(item, call)
        item.ihook.pytest_runtest_logreport(report=report)
    return True
"""

RETRIED = """
import pytest
from _pytest.runner import runtestprotocol

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):  # as pytest-rerunfailures: only the last try counts
    runtestprotocol(item, nextitem=nextitem, log=False)
    item._initrequest()
    for report in runtestprotocol(item, nextitem=nextitem, log=False):
        item.ihook.pytest_runtest_logreport(report=report)
    return True
"""

KEPT = "def test_it(counts): pass"

SUITES: dict[str, tuple[str, str]] = {
    "a fork of a test": (
        "from measures import *\ndef test_it(logical_io): in_fork(lambda: logical_io(step))",
        "",
    ),
    "a fork of a fork, by name": (
        "from measures import *\n"
        "def test_it(request):\n"
        "    in_fork(lambda: in_fork(lambda: request.getfixturevalue('logical_io')(step)))",
        "",
    ),
    "a test that runs in a fork": (
        "from measures import step\ndef test_it(logical_io): logical_io(step)",
        FORKED,
    ),
    "a fork after the test": (
        KEPT,
        "def pytest_runtest_logfinish(): in_fork(lambda: kept[-1](step))",
    ),
    "the first of two tries": (
        "from measures import step\n"
        "tries = []\n"
        "def test_it(logical_io):\n"
        "    tries.append(1)\n"
        "    len(tries) > 1 or logical_io(step)",
        RETRIED,
    ),
}

SWIFT = ("a fork of a test", "the first of two tries")
"""One suite in which a test measures in a fork, and one in which its last try measures nothing."""


@pytest.mark.repeats
@pytest.mark.parametrize(
    "suite", [pytest.param(each, marks=[pytest.mark.slow] * (each not in SWIFT)) for each in SUITES]
)
def test_it_is_judged(
    project: RunSuite, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, suite: str
) -> None:
    test, conftest = SUITES[suite]
    pytester.makepyfile(test_suite=test, measures=MEASURES)
    pytester.makeconftest(LATER + conftest)
    pytester.syspathinsert()
    ended = {}
    for name, size in (("good", 100), ("same", 100), ("worse", 1000)):
        monkeypatch.setenv("SIZE", str(size))
        limit = () if name == "good" else ("--dpbench-compare-fail=logical_bytes:5%",)
        # pytest's own faulthandler waits in a fork for the timer's thread, which it lacks.
        alone = ("-n0", "-p", "no:faulthandler", f"--dpbench-save={name}")
        ended[name] = project(*alone, *limit, replayed=False)
    assert (ended["good"].ret, ended["same"].ret) == (0, 0)
    assert saved(pytester.path, 2).verdict == "complete"
    assert ended["worse"].ret == pytest.ExitCode.TESTS_FAILED
    ended["worse"].stdout.fnmatch_lines(
        ["*logical_bytes@step of *: 1.20 kB -> 12.0 kB, +900.00%, limit 5%*"]
    )
    assert saved(pytester.path, 3).verdict == "regressed"


@pytest.mark.repeats
@pytest.mark.parametrize("how", ["in_fork(lambda: kept[-1](step))", "kept[-1](step)"])
def test_what_is_measured_after_the_session_was_judged_fails_it(
    project: RunSuite, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    test = "from measures import step\ndef test_it(counts, logical_io): logical_io(step)"
    pytester.makepyfile(test_suite=test, measures=MEASURES)
    pytester.makeconftest(f"{LATER}def pytest_sessionfinish(): {how}")
    pytester.syspathinsert()
    monkeypatch.setenv("SIZE", "100")
    alone = ("-n0", "-p", "no:faulthandler")
    assert project(*alone, "--dpbench-save=good", replayed=False).ret == 0
    result = project(*alone, "--dpbench-compare-fail=logical_bytes:5%", replayed=False)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["ERROR: dpbench: measured after the last test, so limits were not*"]
    )


@pytest.mark.slow
def test_what_a_fork_did_not_live_to_measure_is_unjudged(
    project: RunSuite, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    dies = "step if int(os.environ['SIZE']) < 1000 else lambda: os._exit(0)"
    test = (
        "from measures import *\n"
        "def step_or_die(): (" + dies + ")()\n"
        "def test_it(logical_io):\n"
        "    logical_io(lambda: torch.ones(9).clone())\n"
        "    in_fork(lambda: logical_io(step_or_die))"
    )
    pytester.makepyfile(test_suite=test, measures=MEASURES)
    pytester.makeconftest("")
    pytester.syspathinsert()
    monkeypatch.setenv("SIZE", "100")
    assert project("-n0", "--dpbench-save=good", replayed=False).ret == 0
    monkeypatch.setenv("SIZE", "1000")
    limit = "--dpbench-compare-fail=logical_bytes:5%"
    result = project("-n0", limit, replayed=False)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*was not checked for *:step_or_die: not in this session"])


@pytest.mark.slow
def test_a_limit_that_no_test_is_for_fails_and_says_why(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    pytester.makeconftest("")
    pytester.makepyfile(
        """
        def test_other(): pass
        def test_it(logical_io): logical_io("standard", batch_size=2, workload="layer")
        """
    )
    limit = "--dpbench-compare-fail=logical_bytes:5%"
    assert project("-n0", "--dpbench-save=good", replayed=False).ret == 0
    assert project("-n0", limit, replayed=False).ret == 0
    for chosen in (["-k", "other"], ["-k", "none"], ["--dpbench-skip"]):
        result = project("-n0", limit, *chosen, replayed=False)
        assert result.ret == pytest.ExitCode.TESTS_FAILED, chosen
        [line] = [line for line in result.stdout.lines if line.startswith("ERROR: dpbench:")]
        assert "was not checked" in line
