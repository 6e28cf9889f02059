"""Opacus's ghost clipping without the bytes that it moves needlessly.

Each change leaves the arithmetic of a step as it is, is small enough to go upstream (Opacus 1.6.0,
https://github.com/meta-pytorch/opacus), and can be had alone: ``ghost_lean:changes=taken``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.grad_sample import grad_sample_module_fast_gradient_clipping as hooks
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping_fsdp import (
    GradSampleModuleFastGradientClippingFSDP,
)
from opacus.optimizers import DPOptimizer
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import conv1d, conv2d, conv3d

from dpbench.core.errors import ConfigurationError
from dpbench.training.base import Batch
from dpbench.training.fast_gradient_clipping import DPGhostClippingTrainer
from dpbench.training.gradient_sums import rounded_down
from dpbench.training.lean import NoiseAtOnce, changed_optimizer, chosen, derived, kept_of
from dpbench.training.norm_bounds import (
    clipping_factors,
    squared_bias_norms,
    squared_product_norms,
    squared_sample_norms,
    terms_rounding,
    unit,
)
from dpbench.training.parallel import sharded
from dpbench.training.per_layer import as_computed, three_dimensional

CHANGES = ("summed", "bias", "unused", "none", "taken", "noise", "reduce", "gather", "blocks")

Norms = dict[Tensor, Tensor]
"""Of parameters the norm of each example's gradient, ``[B]``."""
SAMPLERS: Mapping[type, Callable[..., Norms]] = GradSampleModuleFastGradientClipping.GRAD_SAMPLERS
"""Opacus's, of per-sample gradients."""
NormSampler = Callable[[Any, list[Tensor], Tensor], Norms]
"""Takes a layer, what it was given, and the gradient of what it returned."""


def linear_norms(
    layer: Any,
    activations: list[Tensor],
    backprops: Tensor,
    squared_norms: Callable[[Tensor, Tensor], Tensor] = squared_product_norms,
) -> Norms:
    """Of a linear layer; the bias's from its gradient, for which Opacus makes T × T products."""
    x, g = three_dimensional(activations[0]), three_dimensional(backprops)
    norms = {}
    if layer.weight.requires_grad:
        norms[layer.weight] = squared_norms(as_computed(x, g), g).sqrt()
    if layer.bias is not None and layer.bias.requires_grad:
        norms[layer.bias] = squared_bias_norms(g).sqrt()
    return norms


def embedding_norms(layer: nn.Embedding, activations: list[Tensor], backprops: Tensor) -> Norms:
    """Of an embedding; Opacus adds up each row's gradients, in their type."""
    ids, g = activations[0].reshape(len(backprops), -1), three_dimensional(backprops)
    norms = squared_product_norms(ids, g).sqrt()
    if not g.is_cuda and g.itemsize == 2:  # in the second pass a CPU sums in this type
        norms += g.shape[1] ** 1.5 * unit(g.dtype) * g.float().square().sum((1, 2)).sqrt()
    return {layer.weight: norms}


def rounded_terms(layer: nn.Module, x: Tensor, g: Tensor) -> Any:
    """What rounding adds to norms ``[B]``, where the second pass adds up terms of its own.

    Not known of others than convolutions and layer norms, nor of what a layer norm rounds itself:
    of numbers that lie far from 0, it normalizes what is left of them.
    """
    wide = torch.promote_types(g.dtype, torch.float32)
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        ones = torch.ones(1, 1, *layer.kernel_size, dtype=wide, device=x.device)
        conv: Any = {1: conv1d, 2: conv2d, 3: conv3d}[len(layer.kernel_size)]
        squares = x.to(wide).square().sum(1, keepdim=True)
        patches = conv(squares, ones, None, layer.stride, layer.padding, layer.dilation)
        of_outputs = g.to(wide).square().sum(1, keepdim=True)
        size = ((1 + patches) * of_outputs).flatten(1).sum(1).sqrt()
        number = patches[0].numel()
    elif isinstance(layer, nn.LayerNorm):  # a normalized number is at most the root of their number
        width = math.prod(layer.normalized_shape)
        size = (1 + width) ** 0.5 * torch.linalg.vector_norm(g.flatten(1), dim=1, dtype=wide)
        number = g[0].numel() // width
    else:
        return 0.0
    return 2 * terms_rounding(g.dtype, number) * size


def sampled_norms(layer: Any, activations: list[Tensor], backprops: Tensor) -> Norms:
    """Of any other layer, from its per-sample gradients."""
    kind = next(each for each in type(layer).__mro__ if each in SAMPLERS)  # FSDP2 derives its own
    samples = SAMPLERS[kind](layer, activations, backprops)
    terms = rounded_terms(layer, activations[0], backprops)
    return {p: squared_sample_norms(each).sqrt() + terms for p, each in samples.items()}


def keeping_terms(sampler: Callable[..., Norms]) -> Callable[..., Norms]:
    """A sampler of per-sample gradients that also keeps their `rounded_terms`, for `keep_norms`."""

    def sampled(layer: nn.Module, activations: list[Tensor], backprops: Tensor) -> Norms:
        samples = sampler(layer, activations, backprops)
        terms = rounded_terms(layer, activations[0], backprops)
        for kept in map(vars, samples):
            kept["rounded_terms"] = kept.get("rounded_terms", 0.0) + terms
        return samples

    return sampled


def keep_norms(*, param: Any, grad_sample: Tensor, max_batch_len: int) -> None:
    """Keep the norms of per-sample gradients; Opacus's are computed in their type."""
    if not param.requires_grad:
        return
    norms = squared_sample_norms(grad_sample).sqrt() + vars(param).pop("rounded_terms", 0.0)
    param._norm_sample = nn.functional.pad(norms, (0, max_batch_len - len(norms)))


class LeanGhostModule(GradSampleModuleFastGradientClipping):  # type: ignore[misc]
    """Opacus's, with norms of linear layers and embeddings that are upper bounds."""

    NORM_SAMPLERS: ClassVar[Mapping[type, NormSampler]] = {
        **GradSampleModuleFastGradientClipping.NORM_SAMPLERS,
        nn.Linear: linear_norms,
        nn.Embedding: embedding_norms,
    }
    GRAD_SAMPLERS: ClassVar[Mapping[type, Callable[..., Norms]]] = {
        kind: keeping_terms(sampler) for kind, sampler in SAMPLERS.items()
    }


def as_sharded(
    module_class: type[GradSampleModuleFastGradientClipping],
) -> type[GradSampleModuleFastGradientClippingFSDP]:
    """Opacus's module for FSDP2 with the norms of another."""
    samplers = dict.fromkeys(SAMPLERS, sampled_norms) | {**module_class.NORM_SAMPLERS}
    return type("Sharded", (GradSampleModuleFastGradientClippingFSDP,), {"NORM_SAMPLERS": samplers})


class GhostLeanTrainer(DPGhostClippingTrainer):
    """`DPGhostClippingTrainer` with these changes.

    - ``summed``: the loss is a sum; Opacus multiplies what each layer gets back from its mean.
    - ``bias``: norms of biases come from their gradients; Opacus makes T × T products. And norms
      are upper bounds, see `dpbench.training.norm_bounds`; Opacus's may be too small.
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
        kept = keep_norms if "bias" in self.changes else hooks.create_norm_sample
        with patch.object(hooks, "create_norm_sample", kept):
            if firsts and not self._runs_again:
                # Backward goes through every layer to the first ones, and computes nothing else:
                # what FSDP2 does not reduce it keeps, and adds to the gradients of the second pass.
                torch.autograd.grad(reduced, firsts, retain_graph=True, allow_unused=True)
            else:
                reduced.backward(retain_graph=True)
                self.optimizer.zero_grad(set_to_none="none" in self.changes)
        divisor = 1
        if "noise" in self.changes:
            # The sum is a mean: see NoiseAtOnce. FSDP2 takes that over ranks.
            divisor = self.batch_size if self.parallel == "fsdp2" else self.joint_batch_size
        try:
            norms = module.get_norm_sample()
        except AttributeError:  # a parameter without norm; whether the loss depends on it, see now
            module.disable_hooks()
            losses.sum().backward()
            raise
        if "bias" in self.changes:
            squares = norms.square()
            squares *= 1 + 4 * len(self.optimizer.params) * unit(squares.dtype)  # of their sum
            weights = clipping_factors(squares, self.max_grad_norm, divisor)
            weights = rounded_down(weights, losses.dtype)
        else:
            weights = module.get_clipping_coef() / divisor
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
