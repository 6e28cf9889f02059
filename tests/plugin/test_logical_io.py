"""The ``logical_io`` fixture, as any project that installs dpbench can use it."""

from __future__ import annotations

import pytest

from dpbench import Case, DPGhostClippingTrainer
from dpbench.instruments.logical.logical import Logical
from dpbench.results.outcome import Outcome
from dpbench.results.schema import parsed
from dpbench.training.base import Batch
from tests.plugin.conftest import RunSuite

SUITE = """
import pytest
from dpbench import Case

CELL = {"batch_size": 4, "seq_len": 64, "model_size": "tiny"}

@pytest.mark.parametrize("time", range(3))
def test_counted(logical_io, time):
    standard, dpsgd = logical_io("standard", **CELL), logical_io(Case("dpsgd", **CELL))
    assert dpsgd.ratio_to(standard) == dpsgd.logical_bytes / standard.logical_bytes > 1
    assert dpsgd.logical_bytes == dpsgd.phases.logical_bytes.sum()
    assert dpsgd.logical_bytes == dpsgd.operators.logical_bytes.sum()
    assert dpsgd.operators.calls["noise", "aten.normal"] > 0

def test_measured(logical_io, ncu):
    measured, counted = ncu("dpsgd", **CELL), logical_io("dpsgd", **CELL)
    assert set(measured.frame.instrument) == {"ncu"}
    assert set(counted.frame.instrument) == {"logical"}

def test_what_cannot_be_counted(logical_io):
    logical_io("dpsgd_ghost", **CELL)
"""


def test_each_case_is_counted_once_and_stays_apart_from_what_is_measured(
    project: RunSuite, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = []
    count = Logical.count

    def recorded(self: Logical, case: Case) -> Outcome:
        counted.append(case.trainer)
        return count(self, case)

    def fails(self: object, batch: Batch) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(Logical, "count", recorded)
    monkeypatch.setattr(DPGhostClippingTrainer, "train_step", fails)
    pytester.makepyfile(test_suite=SUITE)
    strict = ["-Werror", "-Wignore::pytest.PytestAssertRewriteWarning"]  # dpbench is imported here
    result = project("-n0", *strict, "--dpbench-json=run.json", "--dpbench-markdown=run.md")
    result.assert_outcomes(passed=4, failed=1)
    result.stdout.fnmatch_lines(
        ["*CaseFailed: dpsgd_ghost-bs4-seq64-tiny-fp32: *RuntimeError: on purpose*"]
    )
    assert counted == ["standard", "dpsgd", "dpsgd_ghost"]
    document = parsed((pytester.path / "run.json").read_bytes())
    assert sorted((case["trainer"], *case["instruments"]) for case in document["cases"]) == [
        ("dpsgd", "logical"),
        ("dpsgd", "ncu"),
        ("dpsgd_ghost", "logical"),
        ("standard", "logical"),
    ]
    for tables in (result.stdout.str(), (pytester.path / "run.md").read_text(encoding="utf-8")):
        for device in ("logical (no hardware)", "NVIDIA H200"):
            assert tables.count(f"tiny fp32, batch 4, sequence 64, {device}: MB per step") == 1


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
    result.stdout.fnmatch_lines(["ERROR: dpbench: --ncu is set, but nothing was measured*"])
