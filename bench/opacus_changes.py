"""What small changes to Opacus 1.6.0 would save, as trainers named by import target.

Each does the same arithmetic as the trainer that it derives from, and moves other bytes:

    dpbench run --batch-size 8 --seq-len 256 --trainer dpsgd \
        --trainer kept=bench.opacus_changes:KeptDPSGDTrainer
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from opacus.grad_sample import grad_sample_module as hooks
from opacus.grad_sample import grad_sample_module_fast_gradient_clipping as fast
from torch import Tensor, nn

from dpbench.training.base import Batch
from dpbench.training.dpsgd import DPSGDTrainer
from dpbench.training.fast_gradient_clipping import (
    DPFastGradientClippingTrainer,
    DPGhostClippingTrainer,
)

STORE = "create_or_accumulate_grad_sample"
copy_into_zeros = getattr(hooks, STORE)


def keep(*, param: nn.Parameter, grad_sample: Tensor, max_batch_len: int) -> None:
    """Keep a per-sample gradient as it is, where Opacus copies it into a tensor of zeros.

    Only a batch shorter than ``max_batch_len``, or a second use of the parameter, needs that.
    """
    if len(grad_sample) < max_batch_len or hasattr(param, "_current_grad_sample"):
        copy_into_zeros(param=param, grad_sample=grad_sample, max_batch_len=max_batch_len)
    elif param.requires_grad:
        param._current_grad_sample = grad_sample  # type: ignore[attr-defined]


@contextmanager
def kept_gradients() -> Iterator[None]:
    """Inside, Opacus's hooks keep per-sample gradients."""
    with patch.object(hooks, STORE, keep), patch.object(fast, STORE, keep):
        yield


class KeptDPSGDTrainer(DPSGDTrainer):
    """Flat clipping that keeps each per-sample gradient instead of copying it."""

    def train_step(self, batch: Batch) -> Tensor:
        with kept_gradients():
            return super().train_step(batch)


class ZeroingDPSGDTrainer(DPSGDTrainer):
    """Flat clipping with ``zero_grad()`` as Opacus's examples call it: gradients become zeros."""

    def __init__(self, model: nn.Module, *, batch_size: int, **options: Any) -> None:
        super().__init__(model, batch_size=batch_size, **options)
        zero_grad = self.optimizer.zero_grad
        self.optimizer.zero_grad = lambda set_to_none: zero_grad()


class NoneGhostClippingTrainer(DPGhostClippingTrainer):
    """Ghost clipping that drops gradients between its passes instead of zeroing them."""

    def __init__(self, model: nn.Module, *, batch_size: int, **options: Any) -> None:
        super().__init__(model, batch_size=batch_size, **options)
        self.optimizer.zero_grad = partial(self.optimizer.zero_grad, set_to_none=True)


class KeptFastGradientClippingTrainer(DPFastGradientClippingTrainer):
    """Fast gradient clipping that keeps each per-sample gradient."""

    def train_step(self, batch: Batch) -> Tensor:
        with kept_gradients():
            return super().train_step(batch)


class KeptNoneFastGradientClippingTrainer(KeptFastGradientClippingTrainer):
    """Fast gradient clipping with both changes."""

    def __init__(self, model: nn.Module, *, batch_size: int, **options: Any) -> None:
        super().__init__(model, batch_size=batch_size, **options)
        self.optimizer.zero_grad = partial(self.optimizer.zero_grad, set_to_none=True)
