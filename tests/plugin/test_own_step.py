"""The fixtures take a function that does one step of a test's own training."""

from __future__ import annotations

import pytest

from dpbench.instruments.logical.counter import OperatorCounter  # noqa: F401  # loads torch
from dpbench.results.schema import parsed
from tests.plugin.conftest import RunSuite

SUITE = """
from dataclasses import replace
import pytest
import torch
from dpbench import Case, ConfigurationError, phase
weight = torch.zeros(1000, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=1.0)
taken = []

def plain():
    with phase("optimizer"):
        weight.grad = torch.ones(1000)
        optimizer.step()
    taken.append("plain")

def private():
    with phase("clip"):
        torch.ones(500).clone()
    plain()
"""
COUNTED = """
def test_ratio(logical_io):
    step, other = logical_io(private), logical_io(plain)
    assert len(taken) == 4, "each warms up once, and counts once"
    assert step.value("logical_bytes", "clip") == 6000  # 2000 B made, read and written
    assert step.value("logical_bytes", "optimizer") == other.logical_bytes > 0
    assert step.ratio_to(other) == step.logical_bytes / other.logical_bytes > 1
    assert logical_io(plain).logical_bytes == other.logical_bytes
    assert len(taken) == 4, "and is not taken again"

def test_two_of_a_name(logical_io):
    small, large = (lambda: torch.ones(10)), (lambda: torch.ones(20))
    assert logical_io(large).logical_bytes == 2 * logical_io(small).logical_bytes == 80

def test_fails(logical_io):
    def step():
        raise RuntimeError("on purpose")
    logical_io(step)

def test_forgets_to_call(logical_io):
    assert logical_io(lambda: plain).ratio_to(logical_io(plain)) < 3

def test_no_case(logical_io):
    with pytest.raises(ConfigurationError, match="3 is neither a case nor a function that takes"):
        logical_io(3)
    with pytest.raises(ConfigurationError, match="unknown field of a case 'batchsize'; choose"):
        logical_io("dpsgd", batchsize=3)

def test_case_with_another_field(logical_io):
    case = Case("standard", batch_size=2, workload="layer", set={"width": 8})
    assert logical_io(case, batch_size=5).case == replace(case, batch_size=5)
"""
TIMED = """
def test_times(ncu):
    report = ncu(private)
    assert len(taken) == 2 + 3
    assert report.value("step_time_seconds") > report.value("step_time_seconds", "clip") > 0
"""


@pytest.mark.slow
def test_its_operators_are_counted_by_phase(project: RunSuite, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_suite=SUITE + COUNTED)
    result = project("-n0", "--dpbench-json=run.json", "--dpbench-save=own", replayed=False)
    result.assert_outcomes(passed=4, failed=2)
    result.stdout.fnmatch_lines(
        [
            "CaseFailed: test_suite.py::test_fails:step: RuntimeError: on purpose (test_suite.py:*",
            "NothingCounted: *test_forgets_to_call:<lambda>: no PyTorch operator ran in 1 step*",
        ]
    )
    document = parsed((pytester.path / "run.json").read_bytes())
    assert [case["trainer"].partition("::")[2] for case in document["cases"]][:5] == [
        "test_ratio:private",
        "test_ratio:plain",
        "test_two_of_a_name:<lambda>",
        "test_two_of_a_name:<lambda>-2",
        "test_fails:step",
    ]
    pytester.makepyfile(test_suite=SUITE.replace("500", "600") + COUNTED)
    limits = ["--dpbench-compare", "--dpbench-compare-fail=logical_bytes@clip:5%"]
    again = project("-n0", "-k", "ratio", *limits, replayed=False)
    again.assert_outcomes(failed=1)


def test_its_phases_are_timed(project: RunSuite, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_suite=SUITE + TIMED)
    timed = ["--dpbench-instrument=timing", "--dpbench-device=cpu"]
    steps = ["--dpbench-warmup=2", "--dpbench-active=3"]
    project("-n0", *timed, *steps, replayed=False).assert_outcomes(passed=1)
    disabled = project("-n0", "--dpbench-disable", "-rA", replayed=False)
    disabled.stdout.fnmatch_lines(["E*assert 1 == (2 + 3)"])


def test_ncu_cannot_have_it(project: RunSuite, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_suite=SUITE + TIMED)
    result = project("-n0")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["dpbench: ncu cannot measure a step in pytest's process*use logical_io(step), *"]
    )


RUNS_TWICE = """
from _pytest.runner import runtestprotocol

def pytest_runtest_protocol(item, nextitem):
    for _ in range(2):
        item._initrequest()
        runtestprotocol(item, nextitem=nextitem)
    return True
"""


def test_that_runs_again_has_the_same_steps(project: RunSuite, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(RUNS_TWICE)
    pytester.makepyfile(
        test_suite=SUITE
        + """
def test_again(logical_io):
    def step():
        private()
    assert logical_io(step).logical_bytes
"""
    )
    project("-n0", "--dpbench-json=run.json", replayed=False).assert_outcomes(passed=2)
    document = parsed((pytester.path / "run.json").read_bytes())
    assert [case["trainer"] for case in document["cases"]] == ["test_suite.py::test_again:step"]
