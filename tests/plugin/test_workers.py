"""Several GPUs: a worker has one, and there are as many workers as are useful."""

from __future__ import annotations

from contextlib import closing

import pytest

from dpbench.core.gpu import Gpu
from dpbench.core.grid import GRIDS
from dpbench.plugin import workers
from dpbench.plugin.workers import CaseScheduling, useful_workers, visible_names
from dpbench.results.schema import parsed
from dpbench.session_store import Request, SessionStore
from tests.plugin.conftest import CONFTEST, RunSuite
from tests.plugin.saved_runs import saved

SUITE = """
import os, pathlib

def test_measures(dpbench_case, ncu):
    ncu(dpbench_case)
    if dpbench_case.batch_size == 3:
        pathlib.Path("crashed").write_text(os.environ["PYTEST_XDIST_WORKER"])
        os._exit(1)
"""

SAYS_ITS_GPU = """
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    pathlib.Path("workers").mkdir(exist_ok=True)
    pathlib.Path("workers", worker).write_text(
        os.environ["CUDA_VISIBLE_DEVICES"] + " of " + os.environ["DPBENCH_GPUS"]
    )
"""


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    found = [Gpu(f"GPU-{i}", "NVIDIA H200", None, "580") for i in range(count)]
    monkeypatch.setattr(workers, "visible_gpus", lambda: found)


@pytest.mark.slow
def test_auto_workers_have_a_gpu_each_and_one_that_dies_takes_nothing_with_it(
    project: RunSuite, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPLAYED_GPUS", "4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)
    pytester.makeconftest(CONFTEST + SAYS_ITS_GPU)
    pytester.makepyfile(test_suite=SUITE)
    sizes = [f"--dpbench-batch-size={size}" for size in (2, 3, 4)]
    files = ["--dpbench-json=run.json", "--dpbench-save=run"]
    result = project("-nauto", "--dpbench-trainer=dpsgd", *sizes, *files)
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*3 workers*", "*replacing crashed worker*"])
    assert "dpbench: cell, 3 cases, 2 x NVIDIA H200" in result.stdout.str()

    used = {path.name: path.read_text() for path in (pytester.path / "workers").iterdir()}
    crashed = (pytester.path / "crashed").read_text()
    own = {name: text.removesuffix(" of 3,1") for name, text in used.items()}
    assert own == {"gw0": "3", "gw1": "1", "gw2": "3", "gw3": own[crashed]}

    document = parsed((pytester.path / "run.json").read_bytes())
    assert {row["batch_size"] for row in document["rows"]} == {2, 3, 4}
    run = saved(pytester.path, 1)
    assert {outcome.case.batch_size for outcome in run.outcomes} == {2, 3, 4}
    assert (run.status, run.regressed) == ("complete", False)


@pytest.mark.parametrize(("count", "expected"), [(0, 0), (1, 2), (4, 8), (12, 16)])
def test_there_are_two_workers_a_gpu_but_no_more_than_cases(
    monkeypatch: pytest.MonkeyPatch, count: int, expected: int
) -> None:
    gpus(monkeypatch, count)
    assert useful_workers(GRIDS["grid1"]) == expected


def test_gpus_are_named_by_uuid_or_as_the_caller_named_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus(monkeypatch, 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_names() == ["GPU-0", "GPU-1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, MIG-7,-1,2")  # CUDA stops at -1
    assert visible_names() == ["5", "MIG-7"]


def test_tests_of_a_case_stay_together(pytester: pytest.Pytester) -> None:
    case, other = GRIDS["grid1"].cases()[:2]
    config = pytester.parseconfigure("--tx=popen", "--dpbench-disable")
    with closing(SessionStore()) as findings:
        tests = {"test_first": case, "test_again": case, "test_other": other, "test_by_name": None}
        findings.ask([Request(test, of) for test, of in tests.items()])
        scheduling = CaseScheduling(config, None, findings)
        scopes = {test: scheduling._split_scope(test) for test in (*tests, "test_plain")}
    assert scopes == {
        "test_first": case.id,
        "test_again": case.id,
        "test_other": other.id,
        "test_by_name": "test_by_name",
        "test_plain": "test_plain",
    }
