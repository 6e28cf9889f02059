"""Workloads in tests: by the options of pytest, and by import target in the fixtures."""

from __future__ import annotations

import pytest

from tests.plugin.conftest import RunSuite

WORKLOAD = """
import torch
from torch import nn
from dpbench import DPSGDTrainer, Workload

class Squares(Workload):
    def __init__(self, *, width: int = 3):
        self.width = width

    def model(self):
        return nn.Linear(self.width, 1)

    def batches(self, batch_size):
        return [torch.randn(batch_size, self.width)]

    def losses(self, model, batch):
        return model(batch)[:, 0] ** 2

class MyTrainer(DPSGDTrainer):
    pass
"""


@pytest.mark.usefixtures("counted_here")
def test_fixture_takes_import_targets(project: RunSuite, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        mine=WORKLOAD,
        test_suite="""
        def test_ratio(logical_io):
            private = logical_io("mine:MyTrainer", batch_size=4, workload="mine:Squares:width=5")
            plain = logical_io("standard", batch_size=4, workload="Squares", set={"width": 5})
            assert private.case.id == "MyTrainer-bs4-Squares,width=5-fp32"
            assert private.ratio_to(plain) > 1
        """,
    )
    project().assert_outcomes(passed=1)


def test_options_choose_workload_and_parameters(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(
        mine=WORKLOAD,
        test_suite="""
        def test_counted(dpbench_case, logical_io):
            assert logical_io(dpbench_case).logical_bytes > 0
        """,
    )
    options = ["--dpbench-workload=mine:Squares", "--dpbench-batch-size=4"]
    options += ["--dpbench-trainer=dpsgd"]
    widths = ["--dpbench-set=width=4", "--dpbench-set=width=8"]
    result = project(*options, *widths, "--collect-only", "-q")
    ids = [f"*test_counted?dpsgd-bs4-Squares,width={width}-fp32?*" for width in (4, 8)]
    result.stdout.fnmatch_lines(ids)
    wrong = project("--dpbench-workload=mine:Squares", "--dpbench-seq-len=4")
    wrong.stderr.fnmatch_lines(
        ["*dpbench: seq_len belongs to the transformer; parameters of Squares*"]
    )


@pytest.mark.slow
@pytest.mark.usefixtures("counted_here")
def test_a_limit_of_a_ratio_measures_the_baseline_that_was_named(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(
        test_suite="""
        import pytest

        @pytest.mark.dpbench(compare_fail=["logical_ratio:1%"])
        def test_ghost(logical_io):
            logical_io("dpsgd_ghost", batch_size=2, seq_len=8, model_size="50x16x1x2")

        def test_reference(logical_io):
            logical_io("dpsgd", batch_size=2, seq_len=8, model_size="50x16x1x2")
        """,
    )
    named = ("--dpbench-baseline=dpsgd", "--dpbench-save=one")
    first = project(*named, "--dpbench-compare-first-run-ok")
    first.assert_outcomes(passed=2)
    again = project(*named, "--dpbench-compare=1", "-k", "ghost")
    again.assert_outcomes(passed=1, deselected=1)
    again.stdout.fnmatch_lines(["*÷ dpsgd*"])
