"""``--cupti`` and the fixture ``counters``: bytes and times from one process a case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dpbench.results.schema import parsed
from dpbench.results.storage import Storage
from tests.plugin.conftest import RunSuite
from tests.programs import program

COUNTING = """
import pathlib, sys
from dpbench.child.task import Task
from dpbench.child.messages import report
from dpbench.instruments.cupti.recorder import cupti_rows
from dpbench.results.outcome import Outcome

task = Task.read(pathlib.Path(sys.argv[-1]))
case, is_cupti = task.case, task.instrument.name == "cupti"
with open("started.txt", "a") as stream:
    print(case.trainer, "cupti" if is_cupti else "plain", file=stream)
if not is_cupti:
    sys.exit("a process that counts nothing")
read = {"standard": 4e9, "dpsgd": 10e9}[case.trainer]
forward = {"dram_read_bytes": read, "dram_write_bytes": 1e9, "global_load_bytes": 2 * read}
forward |= {"gpu_busy_cycles": 9.0, "gpu_elapsed_cycles": 10.0, "range_time_seconds": 0.5}
rows = cupti_rows(case, dict(
    device="NVIDIA H200", torch="2.11", cupti="13.0", chip="GH100", passes=1,
    phase_seconds=[{"forward": 0.5}, {"forward": 0.5}], peak_memory_bytes=3e9,
    counted=[{"forward": forward}, {"step": forward}],
))
report(Outcome(case, tuple(rows)))
"""

SUITE = """
import pytest
from pathlib import Path
pytestmark = pytest.mark.gpu

def test_more_than_standard(dpbench_case, counters):
    measured = counters(dpbench_case)
    assert measured.ratio_to(counters(dpbench_case.baseline), "global_load_bytes") >= 1
    assert measured.value("step_time_seconds") == 0.5
    assert not Path("broken").exists()

def test_by_ncu(dpbench_case, ncu):
    assert ncu(dpbench_case).value("dram_bytes", "backward") > 0
"""


@pytest.fixture
def suite(project: RunSuite, pytester: pytest.Pytester) -> RunSuite:
    """Tests of either fixture; a plain process fails, CUPTI's prints what it would have counted."""
    program(pytester.path / "step", COUNTING)
    pytester.makepyfile(test_suite=SUITE)

    def run(*options: str, **how: Any) -> pytest.RunResult:
        return project(*options, replayed=False, **how)

    return run


def started() -> list[str]:
    """Each process that ran `COUNTING`."""
    return sorted(Path("started.txt").read_text().splitlines())


def instruments(name: str) -> set[str]:
    document = parsed(Path(name).read_bytes())
    return {row["instrument"] for row in document["rows"]}


@pytest.mark.repeats
@pytest.mark.parametrize("workers", ["-n0", "-n1"])
def test_each_case_is_one_process_and_tests_of_ncu_wait(suite: RunSuite, workers: str) -> None:
    result = suite(workers, "--cupti", "--dpbench-json=run.json")
    result.assert_outcomes(passed=2, skipped=2)
    result.stdout.fnmatch_lines(["*cell, 2 cases, NVIDIA H200*", "*busy by phase*"])
    result.stdout.fnmatch_lines(["dpbench: 2 tests measure with --ncu"])
    assert started() == ["dpsgd cupti", "standard cupti"]
    assert instruments("run.json") == {"cupti"}


@pytest.mark.slow
def test_beside_ncu_times_come_from_the_process_that_counts(suite: RunSuite) -> None:
    result = suite("--cupti", "--ncu", "--ncu-path=./ncu", "--dpbench-json=run.json")
    result.assert_outcomes(passed=4)
    assert started() == ["dpsgd cupti", "standard cupti"]
    assert instruments("run.json") == {"cupti", "ncu"}
    document = parsed(Path("run.json").read_bytes())
    sources = {rate["instrument"] for rate in document["throughputs"]}
    assert sources == {"ncu bytes / cupti seconds", "cupti bytes / cupti seconds"}


@pytest.mark.slow
def test_with_both_values_are_those_of_ncu(suite: RunSuite, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_suite="""
        def test_one(dpbench_case, counters, ncu):
            report = counters(dpbench_case)
            assert {"ncu", "cupti"} == set(report.frame.instrument)
            assert report.dram_bytes == ncu(dpbench_case).dram_bytes < 1e9
            assert report.phases.dram_bytes.sum() == report.dram_bytes
            assert (report.value("gpu_busy_share"), report.value("peak_memory_bytes")) == (0.9, 3e9)
        """
    )
    result = suite("--cupti", "--ncu", "--ncu-path=./ncu")
    result.assert_outcomes(passed=2)


def test_without_an_option_each_fixture_says_what_to_give(suite: RunSuite) -> None:
    result = suite("-rs")
    result.assert_outcomes(skipped=4)
    result.stdout.fnmatch_lines(
        [
            "dpbench: 2 tests measure with --ncu",
            "dpbench: 2 tests measure with --cupti or --ncu",
            "SKIPPED*: needs --cupti or --ncu",
        ]
    )


def test_what_it_counts_is_saved_judged_and_gone_on_with(
    suite: RunSuite, pytester: pytest.Pytester
) -> None:
    Path("broken").touch()
    first = suite("--cupti", "-x", "--dpbench-save=first")
    first.assert_outcomes(failed=1)
    [path] = Storage(pytester.path / ".dpbench").paths()
    assert parsed(path.read_bytes())["session"]["status"] == "interrupted"
    Path("broken").unlink()
    suite("--cupti", "--dpbench-resume").assert_outcomes(passed=2, skipped=2)
    document = parsed(path.read_bytes())
    assert document["session"]["status"] == "complete"
    assert started() == ["dpsgd cupti", "standard cupti"], "what was measured is kept"

    program(pytester.path / "step", COUNTING.replace("10e9", "11e9"))
    limits = ["--dpbench-compare", "--dpbench-compare-fail=dram_bytes:5%"]
    worse = suite("--cupti", *limits)
    worse.assert_outcomes(passed=1, failed=1, skipped=2)
    worse.stdout.fnmatch_lines(["dpsgd*dram_bytes*+9.09%*5%*"])


def test_a_session_that_measured_nothing_fails(suite: RunSuite) -> None:
    result = suite("--cupti", "-k", "by_ncu")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stdout.fnmatch_lines(
        ["*--cupti is set, but nothing was measured; select*the counters fixture*"]
    )
