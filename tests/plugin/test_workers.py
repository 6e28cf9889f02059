"""Several GPUs: a worker has one, there are as many workers as are useful, cases are dealt out."""

from __future__ import annotations

import pytest

from dpbench.case import GRIDS, Case
from dpbench.gpu import Gpu
from dpbench.plugin import workers
from dpbench.plugin.workers import case_of, expected_cost, useful_workers, visible_names
from tests.plugin.conftest import RunSuite

SUITE = """
import os, pathlib, pytest
from dpbench.gpu import visible_gpus

def test_measures(dpbench_case, ncu):
    ncu(dpbench_case)
    place = pathlib.Path("workers") / os.environ["PYTEST_XDIST_WORKER"]
    place.mkdir(parents=True, exist_ok=True)
    (place / os.environ["CUDA_VISIBLE_DEVICES"]).touch()

def test_again(dpbench_case, ncu):
    ncu(dpbench_case)
    if os.environ.get("CRASH") and not pathlib.Path("crashed").exists():
        pathlib.Path("crashed").touch()
        os._exit(1)
"""


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    found = [Gpu(f"GPU-{i}", "NVIDIA H200", None, "580") for i in range(count)]
    monkeypatch.setattr(workers, "visible_gpus", lambda: found)


def test_workers_have_a_gpu_each_from_the_callers_own_list(
    project: RunSuite, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPLAYED_GPUS", "4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    pytester.makepyfile(test_suite=SUITE)
    result = project("-n2", "-v")
    result.assert_outcomes(passed=4)
    used = {place.parent.name: place.name for place in pytester.path.glob("workers/*/*")}
    assert used == {"gw0": "3", "gw1": "1"}
    result.stdout.fnmatch_lines(["dpbench: cell, 2 cases, 2 x NVIDIA H200*"])


def test_auto_means_two_workers_a_gpu_and_a_replaced_worker_keeps_its_gpu(
    project: RunSuite, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRASH", "1")
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    pytester.makepyfile(test_suite=SUITE)
    result = project("-nauto")
    result.stdout.fnmatch_lines(["*2 workers*", "*replacing crashed worker*"])
    assert {place.name for place in pytester.path.glob("workers/*/*")} == {"GPU-0"}


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


def test_long_cases_come_first() -> None:
    order = sorted(GRIDS["grid1"].cases(), key=expected_cost, reverse=True)
    assert order[0] == Case("dpsgd_ghost", 16, 1024)
    assert order[-1] == Case("standard", 8, 256)


def test_a_test_belongs_to_the_case_that_it_is_parametrised_with() -> None:
    ids = [case.id for case in GRIDS["grid1"].cases()]
    assert case_of(f"tests/test_x.py::test_x[{ids[1]}]", ids) == ids[1]
    assert case_of(f"tests/test_x.py::test_x[a-{ids[0]}-b]", ids) == ids[0]
    assert case_of(f"tests/test_x.py::test_x[my_{ids[1]}]", ids) is None
    assert case_of("tests/test_x.py::test_x", ids) is None
