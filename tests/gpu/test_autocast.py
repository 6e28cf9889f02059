"""What logical counting says of autocast is what CUDA does, operator by operator."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import asdict

import pandas as pd
import pytest
import torch

from dpbench import Case
from dpbench.child.build import build
from dpbench.instruments.logical.counter import RealTensorCounter
from dpbench.instruments.logical.logical import Logical
from dpbench.results.kernels import OperatorCount
from dpbench.training.phases import observed_step

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("alone_on_the_gpu")]

COMPARED = (
    *("aten._to_copy", "aten.mm", "aten.addmm", "aten.native_layer_norm", "aten._log_softmax"),
    *("aten.nll_loss_forward", "aten.gelu"),
)
"""Beside attention, whose kernels have other names, and what optimizers draw together."""


@pytest.mark.parametrize(
    ("trainer", "precision", "kept"),
    [
        ("standard", "bf16-amp", "off"),
        ("standard", "bf16-amp", "on"),
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
    with RealTensorCounter() as counter, observed_step(counter):
        trained.train_step(second)

    def said(operators: Sequence[OperatorCount]) -> dict[Hashable, tuple[int, ...]]:
        table = pd.DataFrame(map(asdict, operators))
        table = table[table.operator.isin(COMPARED)].groupby(["phase", "operator"])
        sums = table[["calls", "read_bytes", "write_bytes"]].sum()
        return {where: tuple(row) for where, row in sums.T.items()}

    found = said(counter.operators)
    if trainer == "dpsgd_ghost":  # two embeddings' row numbers, made on the host: 8 B each
        size, copies = 2 * 8 * case.batch_size, ("backward", "aten._to_copy")
        calls, read, written = found[copies]
        found[copies] = calls - 2, read - size, written - size
    assert said(Logical().count(case).operators) == found
