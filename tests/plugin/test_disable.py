"""``--dpbench-disable``: steps are taken once, numbers are not there, nothing is judged."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dpbench import DPGhostClippingTrainer
from dpbench.training.base import Batch
from tests.plugin.conftest import RunSuite

SUITE = """
import pytest
CELL = {"batch_size": 4, "seq_len": 64, "model_size": "tiny"}

def test_takes_a_step(ncu):
    report = ncu("standard", **CELL)
    report.extra_info["epsilon"] = 8
    assert report.case.trainer == "standard"

def test_asks_for_a_number(logical_io):
    assert logical_io("standard", **CELL).logical_bytes > 0
    raise LookupError("not reached")

def test_asks_for_a_ratio(counters):
    assert counters("standard", **CELL).ratio_to(counters("standard", **CELL)) == 2

@pytest.mark.dpbench(compare_fail=["global_load_bytes:5%"])
def test_has_a_limit(ncu):
    ncu("standard", **CELL)

def test_cannot_train(ncu):
    ncu("dpsgd_ghost", **CELL)
"""


def test_steps_run_and_a_test_ends_where_it_asks_for_a_number(
    project: RunSuite, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: object, batch: Batch) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(DPGhostClippingTrainer, "train_step", fails)
    pytester.makepyfile(test_suite=SUITE)
    result = project("-rs", "--dpbench-disable", "--dpbench-save=none", "--dpbench-json=run.json")
    result.assert_outcomes(passed=1, skipped=3, failed=1)
    result.stdout.fnmatch_lines(
        [
            "dpbench: nothing is measured with --dpbench-disable",
            "*CaseFailed: dpsgd_ghost-bs4-seq64-tiny-fp32: *RuntimeError: on purpose*",
            "SKIPPED*nothing is measured with --dpbench-disable",
            "SKIPPED*nothing is measured with --dpbench-disable, so its limits were not checked",
        ],
        consecutive=False,
    )
    assert not list(pytester.path.rglob("*.json"))
    assert not (pytester.path / "ncu_reports").exists()


def test_a_gate_cannot_be_disabled(refused: Callable[..., str]) -> None:
    line = refused("--dpbench-disable", "--dpbench-compare-fail=global_load_bytes:5%")
    assert "measures nothing, so --dpbench-compare-fail cannot be checked" in line
