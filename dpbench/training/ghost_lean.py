"""Opacus's ghost clipping without the bytes that it moves needlessly.

Each change leaves the arithmetic of a step as it is, is small enough to go upstream (Opacus 1.6.0,
https://github.com/meta-pytorch/opacus), and can be had alone: ``ghost_lean:changes=taken``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping_fsdp import (
    GradSampleModuleFastGradientClippingFSDP,
)
from opacus.optimizers import DPOptimizer
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dpbench.errors import ConfigurationError
from dpbench.training.base import Batch
from dpbench.training.fast_gradient_clipping import DPGhostClippingTrainer
from dpbench.training.lean import NoiseAtOnce, changed_optimizer, chosen, derived, kept_of
from dpbench.training.parallel import sharded
from dpbench.training.per_layer import as_computed, squared_bias_norms, three_dimensional

CHANGES = ("summed", "bias", "unused", "none", "taken", "noise", "reduce", "gather", "blocks")

Norms = dict[Tensor, Tensor]
"""Of parameters the norm of each example's gradient, ``[B]``."""
NormSampler = Callable[[Any, list[Tensor], Tensor], Norms]
"""Takes a layer, what it was given, and the gradient of what it returned."""


def norms_by_products(x: Tensor, g: Tensor) -> Tensor:
    """Of each example's gradient of a linear layer's weight, from products T × T, as Opacus does.

    Args:
        x: activations ``[B, T, K]``.
        g: gradients of what it returned, ``[B, T, N]``.
    """
    squares = torch.einsum("nij,nij->n", torch.bmm(x, x.mT), torch.bmm(g, g.mT))
    return squares.clamp(min=0).sqrt()  # rounded, they may be below zero


def linear_norms(
    layer: Any,
    activations: list[Tensor],
    backprops: Tensor,
    weight_norms: Callable[[Tensor, Tensor], Tensor] = norms_by_products,
) -> Norms:
    """Of a linear layer; the bias's from its gradient, for which Opacus makes T × T products."""
    x, g = three_dimensional(activations[0]), three_dimensional(backprops)
    norms = {}
    if layer.weight.requires_grad:
        norms[layer.weight] = weight_norms(as_computed(x, g), g)
    if layer.bias is not None and layer.bias.requires_grad:
        norms[layer.bias] = squared_bias_norms(g).sqrt()
    return norms


class LeanGhostModule(GradSampleModuleFastGradientClipping):  # type: ignore[misc]
    """Opacus's, with other norms of linear layers."""

    NORM_SAMPLERS: ClassVar[Mapping[type, NormSampler]] = {
        **GradSampleModuleFastGradientClipping.NORM_SAMPLERS,
        nn.Linear: linear_norms,
    }


def as_sharded(
    module_class: type[GradSampleModuleFastGradientClipping],
) -> type[GradSampleModuleFastGradientClippingFSDP]:
    """Opacus's module for FSDP2 with the norms of another."""
    samplers = {"NORM_SAMPLERS": module_class.NORM_SAMPLERS}
    return type("Sharded", (GradSampleModuleFastGradientClippingFSDP,), samplers)


class GhostLeanTrainer(DPGhostClippingTrainer):
    """`DPGhostClippingTrainer` with these changes.

    - ``summed``: the loss is a sum; Opacus multiplies what each layer gets back from its mean.
    - ``bias``: norms of biases come from their gradients; Opacus makes T × T products.
    - ``unused``: the pass for the norms computes no gradient of a parameter, so that under FSDP2
      none is reduced in it. Under activation checkpointing autograd cannot leave them out.
    - ``none``: gradients of that pass are dropped; Opacus makes them zeros, and adds to these.
    - ``taken``: the optimizer takes the clipped sums; Opacus copies them.
    - ``noise``: as in `dpbench.training.lean.LeanTrainer`. Under FSDP2 each rank draws it for its
      shard; of Opacus's, each for all shards.
    - ``reduce``: as there.
    - ``gather``: under FSDP2 embeddings are not gathered in backward, which does not read them.
    - ``blocks``: under FSDP2 the layers of a block are gathered and reduced together, if the
      workload says which blocks there are; Opacus's one after the other.

    Args:
        changes: the names of some, joined by ``+``; all by default.
        options: as `TrainerBase`.
    """

    def __init__(
        self, model: nn.Module, *, batch_size: int, changes: str = "all", **options: Any
    ) -> None:
        self.changes = chosen(changes, CHANGES)
        self._firsts: list[Tensor] = []
        self._runs_again = False
        super().__init__(model, batch_size=batch_size, **options)

    def shard(self, model: nn.Module) -> nn.Module:
        shard = super().shard
        try:
            by_block = "blocks" in self.changes
            model = sharded(model, self.workload, [nn.Embedding]) if by_block else shard(model)
        except ConfigurationError:  # the workload does not say which blocks there are
            model = shard(model)
        for layer in model.modules() if "gather" in self.changes else ():
            if isinstance(layer, nn.Embedding) and isinstance(layer, FSDPModule):
                layer.set_unshard_in_backward(False)
        return model

    def wrapped(self) -> nn.Module:
        if "bias" in self.changes:
            lean = self.lean_module()
            self.module_class = as_sharded(lean) if self.parallel == "fsdp2" else lean
        self.loss_reduction = "sum" if "summed" in self.changes else "mean"
        module = super().wrapped()
        if "unused" in self.changes:
            for layer in self.model.modules():
                if any(p.requires_grad for p in layer.parameters(recurse=False)):
                    layer.register_forward_hook(self._find_firsts)
        return module

    def lean_module(self) -> type[GradSampleModuleFastGradientClipping]:
        """The class of the module that makes norms in other ways than Opacus's."""
        return LeanGhostModule

    def private_optimizer(self) -> DPOptimizer:
        if "noise" in self.changes:
            self.optimizer_class = derived(NoiseAtOnce, self.optimizer_class)
        optimizer = changed_optimizer(self, super().private_optimizer(), self.changes)
        if "taken" in self.changes:
            optimizer.accumulate = partial(take_gradients, optimizer)
        return optimizer

    def private_loss(self, batch: Batch) -> DPTensorFastGradientClipping:
        self._firsts, self._runs_again = [], False
        return super().private_loss(batch)

    def _find_firsts(self, layer: nn.Module, given: tuple[Any, ...], returned: Any) -> None:
        """Keep what a layer returned that has no other trained layer before it."""
        if not torch.is_grad_enabled():  # checkpointing runs it again, with a graph of its own
            self._runs_again |= layer.training
        elif not any(isinstance(each, Tensor) and each.requires_grad for each in given):
            self._firsts += [each for each in [returned] if isinstance(each, Tensor)]

    def backward(self, loss: DPTensorFastGradientClipping) -> None:
        """Both passes of ``DPTensorFastGradientClipping.backward``."""
        losses = loss.loss_per_sample
        module: Any = self.grad_sample_module
        reduced = losses.sum() if "summed" in self.changes else losses.mean()
        firsts, self._firsts = self._firsts, []
        if firsts and not self._runs_again:
            # Backward goes through every layer to the first ones, and computes nothing else: what
            # FSDP2 does not reduce it keeps, and adds to the gradients of the second pass.
            torch.autograd.grad(reduced, firsts, retain_graph=True, allow_unused=True)
        else:
            reduced.backward(retain_graph=True)
            self.optimizer.zero_grad(set_to_none="none" in self.changes)
        try:
            weights = module.get_clipping_coef()
        except AttributeError:  # a parameter without norm; whether the loss depends on it, see now
            module.disable_hooks()
            losses.sum().backward()
            raise
        if "noise" in self.changes:
            # The sum is a mean: see NoiseAtOnce. FSDP2 takes that over ranks.
            sharded = self.parallel == "fsdp2"
            weights = weights / (self.batch_size if sharded else self.joint_batch_size)
        module.disable_hooks()
        (weights * losses).sum().backward()
        module.enable_hooks()


def take_gradients(optimizer: DPOptimizer) -> None:
    """Make gradients the sums of a batch, or add them to those of earlier micro-batches."""
    for parameter in optimizer.params:
        kept = kept_of(optimizer, parameter)
        if kept["summed_grad"] is None:
            kept["summed_grad"] = parameter.grad
        else:
            kept["summed_grad"] += parameter.grad
