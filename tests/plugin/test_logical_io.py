"""The ``logical_io`` fixture, as any project that installs dpbench can use it.

`tests/logical/test_regression.py` uses it without ``--ncu`` and without xdist.
"""

from __future__ import annotations

import json

import pytest

from tests.plugin.conftest import CONFTEST, RunSuite

RECORDS_COUNTS = """
import os
from dpbench.instruments.logical.instrument import Logical

count = Logical.count

def recorded(self, case):
    with open(os.environ["COUNTED"], "a") as stream:
        stream.write(f"{case.id} ")
    return count(self, case)

Logical.count = recorded
"""

SUITE = """
import pytest
from dpbench import Case

CELL = {"batch_size": 4, "seq_len": 64, "model_size": "tiny"}

@pytest.mark.parametrize("time", range(3))
def test_counted(logical_io, time):
    standard, dpsgd = logical_io("StandardTrainer", **CELL), logical_io(Case("dpsgd", **CELL))
    assert dpsgd.ratio_to(standard) == dpsgd.logical_bytes / standard.logical_bytes > 1
    assert dpsgd.logical_bytes == dpsgd.phases.logical_bytes.sum()
    assert dpsgd.logical_bytes == dpsgd.operators.logical_bytes.sum()
    assert dpsgd.operators.calls["noise", "aten.normal"] > 0

def test_measured(logical_io, ncu):
    measured, counted = ncu("dpsgd", **CELL), logical_io("dpsgd", **CELL)
    assert set(measured.frame.instrument) == {"ncu"}
    assert set(counted.frame.instrument) == {"logical"}

def test_what_cannot_be_counted(logical_io):
    logical_io("fails=suite_trainers:Fails", **CELL)
"""

FAILS = """
from dpbench import TrainerBase

class Fails(TrainerBase):
    def train_step(self, batch):
        raise RuntimeError("on purpose")
"""


def test_each_case_is_counted_once_and_stays_apart_from_what_is_measured(
    project: RunSuite, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COUNTED", str(pytester.path / "counted"))
    pytester.makeconftest(CONFTEST + RECORDS_COUNTS)
    pytester.makepyfile(test_suite=SUITE, suite_trainers=FAILS)
    result = project("-n2", "-Werror", "--dpbench-json=run.json", "--dpbench-markdown=run.md")
    result.assert_outcomes(passed=4, failed=1)
    result.stdout.fnmatch_lines(
        ["*CaseFailed: fails-bs4-seq64-tiny-fp32: *RuntimeError: on purpose*"]
    )
    counted_here = (pytester.path / "counted").read_text().split()  # a process of its own: fails
    assert sorted(counted_here) == ["dpsgd-bs4-seq64-tiny-fp32", "standard-bs4-seq64-tiny-fp32"]
    document = json.loads((pytester.path / "run.json").read_text())
    assert sorted((case["trainer"], *case["instruments"]) for case in document["cases"]) == [
        ("dpsgd", "logical"),
        ("dpsgd", "ncu"),
        ("fails", "logical"),
        ("standard", "logical"),
    ]
    for tables in (result.stdout.str(), (pytester.path / "run.md").read_text(encoding="utf-8")):
        for device in ("logical (no hardware)", "NVIDIA H200"):
            assert tables.count(f"tiny fp32, batch 4, sequence 64, {device}: GB per step") == 1


def test_an_ncu_session_that_only_counted_is_not_green(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(
        test_suite="""
        def test_counts(logical_io):
            logical_io("standard", batch_size=4, seq_len=64, model_size="tiny")
        """
    )
    result = project("-n0")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stdout.fnmatch_lines(["ERROR: dpbench: --ncu was given and nothing was measured*"])
