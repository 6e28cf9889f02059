"""A limit on what ranks send and draw fails the session in which a project's trainer changed."""

from __future__ import annotations

import pytest

from tests.plugin.conftest import RunSuite

TRAINER = """
import torch
from torch import distributed

from dpbench import StandardTrainer, phase


class Mine(StandardTrainer):
    def train_step(self, batch):
        with phase("forward"):
            loss = self.mean_loss(self.model, batch)
        with phase("backward"):
            loss.backward()
            self.after_backward()
        with phase("noise"):
            for parameter in self.model.parameters():
                parameter.grad.to_local().add_(self.noise(parameter.grad))
        with phase("optimizer"):
            self.plain_optimizer.step()
            self.plain_optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def after_backward(self):
        pass

    def noise(self, gradient):
        return torch.randn_like(gradient.to_local())
"""

REDUCES_TWICE = """
    def after_backward(self):
        for parameter in self.model.parameters():
            distributed.all_reduce(parameter.grad.to_local())
"""

DRAWS_FOR_ALL_SHARDS = """
    def noise(self, gradient):
        rows, *_ = gradient.to_local().shape
        return torch.randn(gradient.shape)[:rows]
"""

SUITE = """
def test_over_ranks(logical_io):
    cell = dict(batch_size=8, seq_len=8, model_size="1001x16x1x2", parallel="fsdp2", gpus=4)
    assert logical_io("mine:Mine", **cell).value("collective_bytes") > 0
"""

LIMITS = {
    "collective_bytes": "--dpbench-compare-fail=collective_bytes:1%",
    "logical_bytes": "--dpbench-compare-fail=logical_bytes@noise:1%",
}

FAULTS = [
    (REDUCES_TWICE, "collective_bytes", "backward: c10d.allreduce_"),
    (DRAWS_FOR_ALL_SHARDS, "logical_bytes", "noise: aten.randn"),
]


@pytest.mark.usefixtures("counted_here")
def test_a_trainer_that_does_too_much_over_ranks_fails_its_test(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    pytester.makeconftest("")  # nothing is replayed
    pytester.makepyfile(test_suite=SUITE, mine=TRAINER)
    project("-n0", "--dpbench-save=before", replayed=False).assert_outcomes(passed=1)
    for fault, metric, operator in FAULTS:
        pytester.makepyfile(mine=TRAINER + fault)
        changed = project("-n0", *LIMITS.values(), replayed=False)
        changed.assert_outcomes(failed=1)
        changed.stdout.fnmatch_lines([f"{metric} *1%", f"*{operator} +*"])
        [other] = LIMITS.keys() - {metric}
        changed.stdout.no_fnmatch_line(f"*{other}*exceeded*")
