"""What Opacus's default of ``zero_grad`` costs, as a trainer named by import target.

It does the same arithmetic as ``dpsgd``, and moves other bytes:

    dpbench run --batch-size 8 --seq-len 256 --trainer dpsgd \
        --trainer dpsgd_zeroing=bench.opacus_changes:ZeroingDPSGDTrainer
"""

from __future__ import annotations

from typing import Any

from torch import nn

from dpbench.training.dpsgd import DPSGDTrainer


class ZeroingDPSGDTrainer(DPSGDTrainer):
    """Flat clipping with ``zero_grad()`` as Opacus's examples call it: gradients become zeros."""

    def __init__(self, model: nn.Module, *, batch_size: int, **options: Any) -> None:
        super().__init__(model, batch_size=batch_size, **options)
        zero_grad = self.optimizer.zero_grad
        self.optimizer.zero_grad = lambda set_to_none: zero_grad()
