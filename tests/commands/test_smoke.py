"""`dpbench smoke` compares the gradients of private trainers with those of a loop over examples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dpbench import TRAINERS, Batch
from dpbench.commands.cli import main
from tests.named import target
from tests.training.test_fused_layers import Residual
from tests.training.test_refusals import Sequences


class ResidualInPlace(Sequences):
    def layer(self) -> nn.Module:
        return Residual(nn.Linear(16, 16))


class Drawn(Sequences):
    """Losses that are others each time."""

    def losses(self, model: Callable[..., Tensor], batch: Batch) -> Tensor:
        return super().losses(model, batch) * torch.rand(len(batch))


class LeavesOut(TRAINERS["micro_batch"]):  # type: ignore[misc]
    """Trains the last layer without its gradient."""

    def add_clipped(self) -> None:
        self.trained[-1].grad = None
        super().add_clipped()


@pytest.mark.parametrize(
    ("trainer", "workload", "said"),
    [
        ("fused", ResidualInPlace, "fused: [TEST OK] FusedTrainer passed local test.\n"),
        ("dpsgd", ResidualInPlace, "write y = y + x instead of y += x"),
        (target(LeavesOut), Sequences, "clipped gradient of 1.inner.bias is off by 1 of its norm"),
        ("fused", Drawn, "not compared with a loop's: the losses of a batch change each time"),
    ],
)
def test_a_trainer_that_loses_a_gradient_fails(
    trainer: str, workload: type, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["smoke", f"--trainer={trainer}", f"--workload={target(workload)}"])
    shown = capsys.readouterr().out
    assert said in shown
    assert code == ("[TEST OK]" not in shown)
