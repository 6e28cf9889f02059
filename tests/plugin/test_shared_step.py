"""A step that a fixture measures has one name, whichever test comes first."""

from __future__ import annotations

import pytest

from dpbench.results.schema import parsed
from tests.plugin.conftest import RunSuite

CONFTEST = """
import pytest, torch

KNOWN = {}

def step_of(size):
    def step():
        values = torch.ones(size, requires_grad=True)
        (values * 2).sum().backward()
    return step

@pytest.fixture
def size():
    return 1000

@pytest.fixture
def report(logical_io):
    if "report" not in KNOWN:  # measured once, for all tests
        KNOWN["report"] = logical_io(step_of(1000))
    return KNOWN["report"]

@pytest.fixture
def sized(logical_io, size):
    return logical_io(step_of(size)), logical_io(lambda: step_of(size + 1)())

@pytest.fixture(scope="session")
def configured(request):
    return request.config.rootpath and 1000

@pytest.fixture
def of_session(logical_io, configured):
    if "session" not in KNOWN:
        KNOWN["session"] = logical_io(step_of(configured))
    return KNOWN["session"]

@pytest.fixture
def of_state(logical_io):
    return logical_io(step_of(STATE[0]))

STATE = [40]

@pytest.fixture
def of_each_test(logical_io, request):
    return logical_io(step_of(1000 * len(request.node.name)))
"""
SUITE = """
import pytest
from conftest import step_of

def test_a(report): pass
def test_b(report, logical_io): logical_io(step_of(50))
def test_c(of_each_test): pass
def test_longer(of_each_test): pass
def test_d(sized): pass
def test_g(of_session): pass
def test_h(of_session): pass
@pytest.mark.parametrize("size", [10, 20])
def test_e(sized, size): pass
"""
OTHER = """
import pytest

@pytest.fixture
def size(): return 30

def test_f(sized): pass
def test_i(of_state): STATE[0] = 45
def test_j(of_state): pass
from conftest import STATE
"""


@pytest.mark.slow
def test_names_are_those_of_fixtures_and_parameters_and_else_of_tests(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_suite=SUITE, test_other=OTHER)

    def counted(*words: str) -> pytest.RunResult:
        return project("--dpbench-json=run.json", *words, replayed=False)

    assert counted("-n0").ret == 0
    document = parsed((pytester.path / "run.json").read_bytes())
    moved: dict[str, float] = {}
    for row in document["rows"]:
        if row["metric"] == "logical_write_bytes":
            moved[row["trainer"]] = moved.get(row["trainer"], 0) + row["value"]
    size = 1000 / moved["conftest.py::report:step"]
    assert {name: value * size for name, value in moved.items() if "lambda" not in name} == (
        pytest.approx(
            {
                "conftest.py::report:step": 1000,
                "test_suite.py::test_b:step": 50,
                "test_suite.py::test_c:step": 6000,
                "test_suite.py::test_longer:step": 11000,
                "conftest.py::sized:step": 1000,
                "conftest.py::sized[size=10]:step": 10,
                "conftest.py::sized[size=20]:step": 20,
                "test_other.py::sized:step": 30,
                "conftest.py::of_session:step": 1000,
                "conftest.py::of_state:step": 40,
                "test_other.py::test_j:step": 45,
            },
            rel=0.02,
            abs=3,
        )
    )
    assert "conftest.py::sized[size=10]:<lambda>" in moved
    (pytester.path / "run.json").rename(pytester.path / "reference.json")
    limit = ("--dpbench-compare=reference.json", "--dpbench-compare-fail=logical_bytes:1%")
    for words in (["-n0", "-k", "test_b"], ["-n0", "-k", "f or 20 or test_h"], ["-n2"]):
        assert counted(*limit, *words).ret == 0, words
