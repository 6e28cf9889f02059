"""Opacus's flat clipping without the bytes that it moves needlessly.

Each change leaves the arithmetic of a step as it is, is small enough to go upstream (Opacus 1.6.0,
https://github.com/meta-pytorch/opacus), and can be had alone: ``lean:changes=kept``.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from opacus import GradSampleModule
from opacus.grad_sample import grad_sample_module as hooks
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn

from dpbench.errors import unknown
from dpbench.training.base import Batch
from dpbench.training.dpsgd import OpacusTrainer
from dpbench.training.per_layer import one_buffer

CHANGES = ("kept", "summed", "unused", "noise")


def chosen(changes: str, known: Collection[str]) -> frozenset[str]:
    """The names in a text such as ``kept+noise``; ``all`` of them, or none in an empty text."""
    names = known if changes == "all" else changes.split("+")
    for name in names:
        if name not in known:
            raise unknown("change", name, known)
    return frozenset(names)


class LeanTrainer(OpacusTrainer):
    """`DPSGDTrainer` with hooks and flat clipping, and these changes to it.

    - ``kept``: a per-sample gradient stays as the hook made it; Opacus copies it into zeros.
    - ``summed``: the loss is a sum; Opacus multiplies what each layer gets back from its mean.
    - ``unused``: no ordinary gradient is computed; Opacus's are replaced before they are read.
    - ``noise``: of all parameters it is drawn at once and added in place, to a sum that the
      clipping factors make a mean; per-sample gradients are freed as they are summed.

    Args:
        changes: the names of some, joined by ``+``; all by default.
        options: as `TrainerBase`.
    """

    def __init__(
        self, model: nn.Module, *, batch_size: int, changes: str = "all", **options: Any
    ) -> None:
        self.changes = chosen(changes, CHANGES)
        super().__init__(model, batch_size=batch_size, **options)

    def wrapped(self) -> nn.Module:
        reduction = "sum" if "summed" in self.changes else "mean"
        module: nn.Module = GradSampleModule(self.model, loss_reduction=reduction)
        if "unused" in self.changes:
            leave_out_ordinary_gradients(module)
        return module

    def private_optimizer(self) -> DPOptimizer:
        self.optimizer_class = LeanOptimizer if "noise" in self.changes else DPOptimizer
        return super().private_optimizer()

    def train_step(self, batch: Batch) -> Tensor:
        store = keep if "kept" in self.changes else copy_into_zeros
        with patch.object(hooks, STORE, store):
            return super().train_step(batch)

    def backward(self, loss: Any) -> None:
        examples = self.batch_size // self.micro_batches
        (loss * examples if "summed" in self.changes else loss).backward()


STORE = "create_or_accumulate_grad_sample"
copy_into_zeros = getattr(hooks, STORE)


def keep(*, param: Any, grad_sample: Tensor, max_batch_len: int) -> None:
    """Keep a per-sample gradient as it is, where Opacus copies it into a tensor of zeros.

    Only a batch shorter than ``max_batch_len`` needs that. What is kept may be the gradient of what
    the layer returned, so nothing is added to it in place.
    """
    if not param.requires_grad:
        return
    before = getattr(param, "_current_grad_sample", None)
    if len(grad_sample) == max_batch_len:
        param._current_grad_sample = grad_sample if before is None else before + grad_sample
        return
    if before is not None:
        param._current_grad_sample = before.clone()
    copy_into_zeros(param=param, grad_sample=grad_sample, max_batch_len=max_batch_len)


def leave_out_ordinary_gradients(module: Any) -> None:
    """Let autograd take the parameters of layers for constants: hooks make their gradients."""
    for layer in module.iterate_submodules(module._module):
        if type(layer) in module.GRAD_SAMPLERS:  # functorch's parameters are not the layer's
            own = [p for p in layer.parameters(recurse=False) if p.requires_grad]
            layer.register_forward_pre_hook(partial(_become_constants, own))
            layer.register_forward_hook(partial(_become_parameters, own), prepend=True)


def _become_constants(own: list[nn.Parameter], *_: object) -> None:
    for parameter in own:
        parameter.requires_grad_(False)


def _become_parameters(
    own: list[nn.Parameter], _layer: nn.Module, _given: object, returned: Any
) -> None:
    for parameter in own:
        parameter.requires_grad_()
    if torch.is_grad_enabled() and isinstance(returned, Tensor) and not returned.requires_grad:
        returned.requires_grad_()  # else backward would end before this layer's hook


class NoiseAtOnce(DPOptimizer):  # type: ignore[misc]
    """An optimizer whose clipped sums are means already: of `examples` that a step has."""

    def add_noise(self) -> None:
        """Draw noise for all parameters of a kind, and add it to their gradients in place."""
        deviation = self.noise_multiplier * self.max_grad_norm / self.expected_batch_size
        kinds: dict[object, list[Tensor]] = {}
        for parameter in self.params:
            parameter.grad = parameter.summed_grad
            kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter.grad)
        for gradients in kinds.values() if deviation else ():
            flat, noise = one_buffer(gradients)
            flat.normal_(std=deviation, generator=self.generator)
            torch._foreach_add_(gradients, [noise[gradient] for gradient in gradients])

    def scale_grad(self) -> None:
        """Nothing is left to divide."""


class LeanOptimizer(NoiseAtOnce):
    """Clips as `DPOptimizer` does, each per-sample gradient freed as soon as it is summed."""

    def clip_and_accumulate(self) -> None:
        norms = [g.flatten(1).norm(2, dim=1) for g in self.grad_samples]
        total = torch.stack(norms, dim=1).norm(2, dim=1)
        factors = (self.max_grad_norm / (total + 1e-6)).clamp(max=1.0) / self.expected_batch_size
        for parameter in self.params:
            samples = self._get_flat_grad_sample(parameter).to(parameter.dtype)
            parameter.grad_sample = None
            clipped = torch.einsum("i,i...", factors.to(parameter.dtype), samples)
            if parameter.summed_grad is None:
                parameter.summed_grad = clipped
            else:
                parameter.summed_grad += clipped
