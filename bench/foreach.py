"""What Opacus 1.6.0 would gain from few launches over many parameters, as trainers by name.

Opacus clips, adds noise and scales one parameter at a time: thousands of launches from Python,
for which the GPU waits at bf16. Each trainer does the arithmetic of the one it derives from:

    dpbench run --batch-size 8 --seq-len 256 --precision bf16 --trainer dpsgd \
        --trainer foreach=bench.foreach:ForeachDPSGDTrainer
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from opacus.grad_sample import grad_sample_module as hooks
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn

from bench.opacus_changes import STORE, NoneGhostClippingTrainer
from dpbench.training.base import Batch
from dpbench.training.dpsgd import DPSGDTrainer, mark_phases
from dpbench.training.fast_gradient_clipping import DPGhostClippingTrainer

ELEMENTS = 2**30
"""The most elements of one buffer: cuBLAS indexes a matrix with 32 bits."""


def split_flat(flat: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """Views of ``flat`` ``[..., P]``, one per parameter, shaped ``[..., *parameter.shape]``."""
    pieces = flat.split([p.numel() for p in parameters], dim=-1)
    return [
        piece.view(*flat.shape[:-1], *p.shape) for piece, p in zip(pieces, parameters, strict=True)
    ]


def add_noise(optimizer: DPOptimizer) -> None:
    """Noise for all gradients in one draw, added by `torch._foreach_add_`."""
    deviation = optimizer.noise_multiplier * optimizer.max_grad_norm
    if deviation == 0:
        return
    gradients = [p.grad for p in optimizer.params]
    noise = torch.randn(
        sum(g.numel() for g in gradients), dtype=gradients[0].dtype, device=gradients[0].device
    )
    torch._foreach_add_(gradients, split_flat(noise, optimizer.params), alpha=deviation)


def scale_grad(optimizer: DPOptimizer) -> None:
    """Sums become means: one call for all gradients."""
    torch._foreach_div_([p.grad for p in optimizer.params], optimizer.expected_batch_size)


def replace(optimizer: DPOptimizer, **methods: Callable[[DPOptimizer], None]) -> None:
    """Let ``optimizer`` do noise, scaling and ``methods`` in few launches, in the same phases."""
    for name, method in {"add_noise": add_noise, "scale_grad": scale_grad, **methods}.items():
        setattr(optimizer, name, partial(method, optimizer))
    mark_phases(optimizer)


def split_parameters(parameters: list[nn.Parameter], columns: int) -> list[list[nn.Parameter]]:
    """Parameters in groups of at most so many elements, but one that has more is a group alone."""
    groups: list[list[nn.Parameter]] = [[]]
    for parameter in parameters:
        if groups[-1] and sum(p.numel() for p in (*groups[-1], parameter)) > columns:
            groups.append([])
        groups[-1].append(parameter)
    return groups


class ForeachDPSGDTrainer(DPSGDTrainer):
    """Flat clipping on a few buffers ``[B, P]`` that hold every per-sample gradient.

    The hooks copy into a buffer, where Opacus copies into zeros; so norms and the clipped sum
    are a few launches over the whole model, whatever the number of its parameters.
    """

    def __init__(self, model: nn.Module, *, batch_size: int, **options: Any) -> None:
        super().__init__(model, batch_size=batch_size, **options)
        self.groups = split_parameters(self.optimizer.params, ELEMENTS // batch_size)
        self.flats = [
            group[0].new_empty(batch_size, sum(p.numel() for p in group)) for group in self.groups
        ]
        self.slots = {
            parameter: slot
            for group, flat in zip(self.groups, self.flats, strict=True)
            for parameter, slot in zip(group, split_flat(flat, group), strict=True)
        }
        replace(self.optimizer, clip_and_accumulate=self.clip_and_accumulate)

    def train_step(self, batch: Batch) -> Tensor:
        with patch.object(hooks, STORE, self.store):
            return super().train_step(batch)

    def store(self, *, param: nn.Parameter, grad_sample: Tensor, max_batch_len: int) -> None:
        """Copy a per-sample gradient into its place, or add that of the parameter's second use."""
        if hasattr(param, "_current_grad_sample"):
            param._current_grad_sample += grad_sample
        elif param.requires_grad:
            param._current_grad_sample = self.slots[param].copy_(grad_sample)  # type: ignore[attr-defined]

    def clip_and_accumulate(self, optimizer: DPOptimizer) -> None:
        """``p.grad`` becomes the sum of clipped gradients, a view of its group's."""
        norms = torch.stack([torch.linalg.vector_norm(flat, dim=1) for flat in self.flats])
        factors = (optimizer.max_grad_norm / (norms.norm(dim=0) + 1e-6)).clamp(max=1.0)
        for group, flat in zip(self.groups, self.flats, strict=True):
            summed = split_flat(torch.mv(flat.t(), factors), group)
            for parameter, gradient in zip(group, summed, strict=True):
                parameter.grad = gradient


class ForeachGhostClippingTrainer(DPGhostClippingTrainer):
    """Ghost clipping whose optimizer takes the second pass's gradients without copying them."""

    def __init__(self, model: nn.Module, *, batch_size: int, **options: Any) -> None:
        super().__init__(model, batch_size=batch_size, **options)
        replace(self.optimizer, accumulate=lambda optimizer: None)


class NoneForeachGhostClippingTrainer(ForeachGhostClippingTrainer, NoneGhostClippingTrainer):
    """The same, and gradients dropped between its passes instead of zeroed."""
