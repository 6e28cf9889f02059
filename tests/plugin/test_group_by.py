"""``--dpbench-group-by`` and ``--dpbench-sort``: by what tests are called, as pytest-benchmark."""

from __future__ import annotations

import pytest

from dpbench.commands.cli import main
from dpbench.core.errors import ConfigurationError
from dpbench.core.settings import Settings
from dpbench.results.schema import parsed
from dpbench.show.view import TableOptions, label_of
from tests.plugin.conftest import RunSuite

SUITE = """
import pytest
CELL = {"batch_size": 4, "seq_len": 64, "model_size": "tiny"}

@pytest.mark.parametrize("trainer", ["standard", "dpsgd"])
@pytest.mark.parametrize("budget", [8])
def test_budget(ncu, trainer, budget):
    ncu(trainer, **CELL).extra_info["epsilon"] = budget

def test_both(ncu):
    ncu("dpsgd", **CELL)
    ncu("standard", **CELL)
"""


def titles(text: str) -> list[str]:
    return [line.partition(": MB per step")[0] for line in text.splitlines() if "MB per s" in line]


@pytest.mark.repeats
@pytest.mark.parametrize("workers", [["-n0"], ["-n1"]], ids=str)
def test_a_case_stands_in_the_group_of_each_test_that_asked_for_it(
    project: RunSuite,
    pytester: pytest.Pytester,
    capsys: pytest.CaptureFixture[str],
    workers: list[str],
) -> None:
    pytester.makepyfile(test_suite=SUITE)
    shown = ["--dpbench-columns=dram_bytes,dram_ratio", "--dpbench-sort=name"]
    by_function = project(
        *workers, *shown, "--dpbench-group-by=func", "--dpbench-json=run.json"
    ).stdout
    everywhere = "tiny fp32, NVIDIA H200"
    assert titles(by_function.str()) == [
        f"test_{name}, {everywhere}" for name in ("both", "budget")
    ]
    rows = [
        line.split()[0] for line in by_function.lines if line.startswith(("dpsgd ", "standard "))
    ]
    assert rows[:4] == ["dpsgd", "standard", "dpsgd", "standard"], "by name"
    cases = parsed((pytester.path / "run.json").read_bytes())["cases"]
    [(asked, added)] = [
        (case["tests"], case["extra_info"]) for case in cases if case["trainer"] == "dpsgd"
    ]
    assert added == {"epsilon": 8}
    assert asked[0] == {
        "test": "test_suite.py::test_budget[8-dpsgd]",
        "params": {"trainer": "dpsgd", "budget": "8"},
    }
    assert asked[1]["test"] == "test_suite.py::test_both"

    capsys.readouterr()  # a saved run can be shown so, too
    by = ["--group-by=param:trainer", *(option.replace("dpbench-", "") for option in shown)]
    assert main(["show", "run.json", *by]) == 0
    assert titles(capsys.readouterr().out) == [
        f"trainer={value}, {everywhere}" for value in ("-", "dpsgd", "standard")
    ]


@pytest.mark.parametrize(
    ("label", "text"),
    [
        ("name", "test_it[8-a::b]"),
        ("fullname", "tests/test_x.py::TestX::test_it[8-a::b]"),
        ("func", "test_it"),
        ("fullfunc", "tests/test_x.py::TestX::test_it"),
        ("param", "8-a::b"),
        ("param:budget", "budget=8"),
        ("param:other", "other=-"),
    ],
)
def test_labels_are_those_of_pytest_benchmark(label: str, text: str) -> None:
    test = {"test": "tests/test_x.py::TestX::test_it[8-a::b]", "params": {"budget": "8"}}
    assert label_of(test, label) == text


def test_other_labels_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="unknown group 'function'; choose from func, "):
        TableOptions.of(Settings(group_by="function"))
