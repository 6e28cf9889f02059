"""What logical counting says of autocast is what CUDA does, operator by operator."""

from __future__ import annotations

import pytest
import torch

from dpbench import Case
from dpbench.instruments.logical.counter import RunningCounter
from dpbench.instruments.logical.instrument import Logical
from dpbench.process.build import build
from dpbench.training.phases import observed_step

pytestmark = pytest.mark.gpu

COMPARED = (
    *("aten._to_copy", "aten.mm", "aten.addmm", "aten.native_layer_norm", "aten._log_softmax"),
    *("aten.nll_loss_forward", "aten.gelu", "aten._amp_foreach_non_finite_check_and_unscale_"),
)
"""Beside attention, whose kernels have other names, and what optimizers draw together."""


@pytest.mark.parametrize(
    ("trainer", "precision", "kept"),
    [
        ("standard", "bf16-amp", "off"),
        ("standard", "bf16-amp", "on"),
        ("standard", "fp16-amp", "off"),
        ("dpsgd", "bf16-amp", "off"),
        ("dpsgd_ghost", "bf16-amp", "off"),
        ("dpsgd_fgc", "bf16-amp", "off"),
    ],
)
def test_casts_and_products_are_those_that_cuda_runs(
    trainer: str, precision: str, kept: str
) -> None:
    case = Case(trainer, 4, 64, "512x64x2x2", precision=precision, activation_checkpointing=kept)
    trained, (first, second) = build(case, torch.device("cuda"), 2)
    trained.train_step(first)
    with RunningCounter() as counter, observed_step(counter):
        trained.train_step(second)
    ran = {key: count for key, count in counter.counts.items() if key[1] in COMPARED}
    counted = {
        (operator.phase, operator.operator): operator
        for operator in Logical().count(case).operators
        if operator.operator in COMPARED
    }

    if trainer == "dpsgd_ghost":  # two embeddings' row numbers, made on the host: 8 B each
        copies = ran["backward", "aten._to_copy"]
        copies.calls, copies.read_bytes, copies.write_bytes = (
            copies.calls - 2,
            copies.read_bytes - 2 * 8 * case.batch_size,
            copies.write_bytes - 2 * 8 * case.batch_size,
        )

    def said(counts: dict) -> dict:  # type: ignore[type-arg]
        return {key: (c.calls, c.read_bytes, c.write_bytes) for key, c in counts.items()}

    assert said(counted) == said(ran)
