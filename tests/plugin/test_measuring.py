"""``--ncu`` that measures nothing; with and without xdist."""

from __future__ import annotations

import pytest

from tests.plugin.conftest import RunSuite

WORKERS = {"one process": ["-p", "no:xdist"], "a worker": ["-n1"]}


@pytest.mark.parametrize(
    ("workers", "selection"),
    [
        ("one process", ["-k", "no_such_test"]),
        ("one process", ["-m", "not gpu"]),
        ("a worker", ["-m", "not gpu"]),
    ],
)
def test_a_run_that_measured_nothing_is_not_green(
    project: RunSuite, workers: str, selection: list[str]
) -> None:
    result = project(*WORKERS[workers], *selection)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stdout.fnmatch_lines(["*nothing was measured*-m gpu*"])
