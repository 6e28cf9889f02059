"""A trainer's smoke test: two steps on a tiny model, on any machine."""

from __future__ import annotations

import math

import torch

from dpbench.case import Case
from dpbench.process.build import build
from dpbench.process.step import pick_device


def smoke_test(case: Case, *, device: str = "cpu") -> None:
    """Train two steps of a case.

    Raises:
        AssertionError: the loss is not finite, or no parameter moved.
    """
    trainer, batches = build(case, pick_device(device), num_batches=2)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    losses = [float(trainer.train_step(batch)) for batch in batches]
    if not all(map(math.isfinite, losses)):
        raise AssertionError(f"the loss is not finite: {losses}")
    if all(map(torch.equal, before, trainer.model.parameters())):
        raise AssertionError("no parameter changed in two steps")
