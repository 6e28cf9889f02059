"""A change that copies per-sample gradients once more turns a suite red, without a GPU."""

from __future__ import annotations

import json

import pytest

from dpbench.training.dpsgd import DPSGDTrainer
from tests.plugin import conftest as sessions

imports = sessions.imports  # a fixture: what a session imported stays

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

SUITE = """
import pytest
from dpbench import Case
from tests.logical.bounds import Bounds
from tests.logical.layers import count_by_layers

@pytest.mark.parametrize("trainer", ["standard", "dpsgd"])
def test_bytes(logical_io, trainer):
    case = Case(trainer, batch_size=8, seq_len=256)
    baseline = count_by_layers(case.baseline, logical_io)
    Bounds.read().check(count_by_layers(case, logical_io), baseline)
"""


def test_the_committed_bound_names_the_phase_and_the_operator(
    pytester: pytest.Pytester, imports: sessions.Imports, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DPSGDTrainer, "__init__", DPSGDTrainer.__init__)  # and back, after it
    pytester.makeconftest(CLONES_BEFORE_IT_CLIPS)
    pytester.makepyfile(test_suite=SUITE)
    plain = ["-p", "no:xdist", "--dpbench-json=run.json"]
    result = sessions.in_this_process(pytester, [*sessions.WITHOUT, *plain], imports)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*dpsgd-bs8-seq256-1b-fp32: 5.925 times the logical bytes of standard training; "
            "4.901 is committed, give or take 1%. What changed most:",
            "*dpsgd clip: aten.clone +85.9 GB",
        ]
    )
    document = json.loads((pytester.path / "run.json").read_text())
    assert {row["instrument"] for row in document["rows"]} == {"logical"}
