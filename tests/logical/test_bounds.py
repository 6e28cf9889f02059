"""Logical bytes of DP training in the largest cell, against the committed run."""

from __future__ import annotations

import pytest

from dpbench.core.registry import TRAINERS
from dpbench.results.rows import STEP
from dpbench.results.run import Run
from dpbench.training.dpsgd import DPSGDTrainer
from tests.logical import bounds
from tests.logical.layers import TWO_DEPTHS
from tests.plugin import conftest as sessions

imports = sessions.imports  # a fixture: what a session imported stays

CHOSEN = "layers2 and 16x1024 and not micro_batch"
"""Trainers to count in the largest cell. A trainer has the same operators in all cells, and some
trainers have those of others. The command in `bounds` compares all of them."""

CLONES_BEFORE_IT_CLIPS = """
from dpbench.training.dpsgd import DPSGDTrainer
from dpbench.training.phases import in_phase

build = DPSGDTrainer.__init__

def build_changed(self, *args, **options):
    build(self, *args, **options)
    clip = self.optimizer.clip_and_accumulate

    def clone_and_clip():
        for parameter in self.model.parameters():
            parameter.grad_sample = parameter.grad_sample.clone()
        clip()

    self.optimizer.clip_and_accumulate = in_phase("clip", clone_and_clip)

DPSGDTrainer.__init__ = build_changed
"""


def compared(pytester: pytest.Pytester, imports: sessions.Imports, chosen: str) -> pytest.RunResult:
    """Run the suite's tests that ``-k`` selects, against the committed run."""
    pytester.makepyfile(test_suite="from tests.logical.bounds import test_logical_bytes")
    limits = [f"--dpbench-compare-fail={limit}" for limit in bounds.LIMITS]
    gate = ["-p", "no:xdist", "-k", chosen, f"--dpbench-compare={bounds.FILE}", *limits]
    ignored = ["-W", "ignore:Full backward hook is firing:UserWarning"]
    return sessions.in_this_process(pytester, [*sessions.WITHOUT, *ignored, *gate], imports)


def test_training_moves_what_is_committed(
    pytester: pytest.Pytester, imports: sessions.Imports
) -> None:
    result = compared(pytester, imports, CHOSEN)
    assert result.ret == pytest.ExitCode.OK
    trainers = len(TRAINERS)  # with PLAIN, and without micro_batch
    result.assert_outcomes(passed=trainers, deselected=2 * len(bounds.CASES) - trainers)
    result.stdout.fnmatch_lines(["dpbench: compared with bounds", "dpbench: not compared, *"])


def test_the_committed_run_has_every_case_of_the_grids_and_its_operators() -> None:
    run = Run.load(bounds.FILE)
    assert run.status == "complete"
    cases = {bounds.shallow(case, layers) for case in bounds.CASES for layers in TWO_DEPTHS}
    assert {outcome.case for outcome in run.outcomes if outcome.operators} == cases
    step = run.frame[run.frame.phase == STEP]
    assert (step[step.metric == "logical_read_bytes"].value > 0).sum() == len(cases)


def test_fused_needs_hardly_more_memory_than_a_standard_step() -> None:
    frame = Run.load(bounds.FILE).frame
    peaks = frame[(frame.phase == STEP) & (frame.metric == "peak_memory_bytes")]
    cells = ["batch_size", "seq_len", "model_size"]
    by_trainer = peaks.pivot(index=cells, columns="trainer", values="value").dropna()
    assert len(by_trainer) == 4
    for trainer in (bounds.PLAIN, "fused"):
        assert (by_trainer[trainer] < by_trainer["dpsgd_ghost"]).all()
        assert (by_trainer[trainer] < 1.1 * by_trainer["standard"]).all()


@pytest.mark.slow
def test_a_change_that_copies_per_sample_gradients_fails_and_is_named(
    pytester: pytest.Pytester, imports: sessions.Imports, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DPSGDTrainer, "__init__", DPSGDTrainer.__init__)  # and back, after it
    pytester.makeconftest(CLONES_BEFORE_IT_CLIPS)
    result = compared(pytester, imports, "layers2 and 8x256 and (standard or dpsgd) and not dpsgd_")
    result.assert_outcomes(passed=1, failed=1, deselected=2 * len(bounds.CASES) - 2)
    result.stdout.fnmatch_lines(
        [
            "dpbench: 2 regressions against bounds; see the section 'dpbench comparison'",
            "dpsgd-bs8-seq256-*x2x*, against bounds",
            "logical_bytes*step*GB*GB*+*%*±0.3%",
            "logical_ratio*step*+*%*±0.3%",
            "  dpsgd clip: aten.clone +* GB (conftest.py:* clone_and_clip)",
        ]
    )
