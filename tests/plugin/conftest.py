"""A project of a user's own, with a GPU that is replayed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPLAY = Path(__file__).parents[1] / "replay_ncu.py"

CONFTEST = """
import os
import dpbench.instruments.ncu, dpbench.instruments.timing
import dpbench.plugin.manager, dpbench.plugin.workers
from dpbench.gpu import Gpu, select

def replayed_gpus():
    count = int(os.environ.get("REPLAYED_GPUS", 1))
    gpus = [Gpu(f"GPU-{i}", "NVIDIA H200", 141 * 10**9, "580.159.03") for i in range(count)]
    return select(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))

for module in (
    dpbench.instruments.ncu,
    dpbench.instruments.timing,
    dpbench.plugin.manager,
    dpbench.plugin.workers,
):
    module.visible_gpus = replayed_gpus
"""

SUITE = """
import pytest
pytestmark = pytest.mark.gpu

def test_more_than_standard(dpbench_case, ncu):
    measured = ncu(dpbench_case)
    assert measured.ratio_to(ncu(dpbench_case.baseline), "l2_total_bytes") >= 1

def test_dram(dpbench_case, ncu):
    assert ncu(dpbench_case).dram_bytes > 0
"""

RunSuite = Callable[..., pytest.RunResult]


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> RunSuite:
    """Run pytest in a user's project; ``replayed`` cases are tiny, standard and dpsgd."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    ncu = pytester.path / "ncu"
    ncu.write_text(
        f"#!{sys.executable}\n{REPLAY.read_text()}".replace("__file__", repr(str(REPLAY)))
    )
    ncu.chmod(0o755)
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_suite=SUITE)
    pytester.makefile(
        ".toml",
        cell="trainer = ['standard', 'dpsgd']\nbatch_size = 4\nseq_len = 64\nmodel_size = 'tiny'",
    )

    def run(*arguments: str, replayed: bool = True) -> pytest.RunResult:
        measured = ["--ncu", "--ncu-path", str(ncu), "--dpbench-no-timing"] if replayed else []
        grid = [] if any("--dpbench-grid" in a for a in arguments) else ["--dpbench-grid=cell.toml"]
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", *grid, *measured, *arguments)

    return run
