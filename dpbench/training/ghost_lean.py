"""Opacus's ghost clipping, without needless memory traffic.

A first backward pass computes the norms. A second backward pass computes the gradient of the
weighted sum of losses, as in `dpbench.training.fast_gradient_clipping`. The folder
``docs/upstream`` has diffs that change Opacus 1.6.0 in most of the same ways.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from opacus.utils.tensor_utils import unfold2d
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import conv1d, conv2d, conv3d

from dpbench.core.errors import ConfigurationError, unknown
from dpbench.training.base import DRAWN_BY, Batch, mean_of
from dpbench.training.book_keeping import check_untied
from dpbench.training.fast_gradient_clipping import sharded_as_opacus_does
from dpbench.training.ghost_norms import GhostNorms
from dpbench.training.gradient_sums import rounded_down
from dpbench.training.kernels import convolves_in_tf32, has_tf32
from dpbench.training.lean import ClippedMeanTrainer
from dpbench.training.norm_bounds import clipping_factors, total, unit, wide_unit
from dpbench.training.norm_ways import GRADIENT, KEPT, PRODUCTS, Shape, cheapest
from dpbench.training.parallel import sharded
from dpbench.training.per_layer import (
    EmbeddingRule,
    LinearRule,
    Rule,
    SampledRule,
    as_computed,
    rule_of,
    three_dimensional,
)
from dpbench.training.phases import phase
from dpbench.training.refusals import check_layers

WAYS = {"cheaper": (PRODUCTS, GRADIENT), "products": (PRODUCTS,)}
"""For each value of the argument ``norms``, the ways to compute norms that the trainer
considers."""


class GhostLeanTrainer(ClippedMeanTrainer):
    """`DPGhostClippingTrainer` with these changes.

    - The loss is a sum. Opacus uses the mean loss, and rescales each layer's output gradient.
    - Bounds of rounding errors are added to norms, see `dpbench.training.norm_bounds`. Opacus adds
      no bounds, so its norms may be too small.
    - Without activation checkpointing, the first pass computes no parameter gradients, so FSDP2
      reduces no gradients in this pass. With activation checkpointing, the first pass computes
      parameter gradients and discards them. Opacus keeps the parameter gradients of its first pass,
      sets them to zero, and lets the second pass accumulate into these zeros.
    - For layers other than linear layers, embeddings and zero-padded convolutions, per-sample
      gradients are computed once and kept. Their weighted sum is the update, so both the norm and
      the update use the same gradients. Such layers mostly have few parameters.
    - Sums of clipped gradients are not copied. Noise is drawn as in
      `dpbench.training.lean.LeanTrainer`. Under FSDP2, each rank draws noise only for its shards.
      With Opacus, each rank draws noise for all shards.
    - Under FSDP2, embeddings are not gathered in the backward, which does not read them. The layers
      of a block are gathered and reduced together, if the workload names the model's blocks.
    - Norms of linear layers and convolutions are computed from products T × T, with T the number of
      tokens or positions, or from per-sample gradients. Norms of embeddings are computed from
      products T × T or from the gradients of looked-up rows. For each layer, the trainer uses the
      cheaper way. For 3-D and grouped convolutions, norms are always computed from per-sample
      gradients. Opacus uses products for linear layers, per-sample gradients for convolutions, and
      the gradients of looked-up rows for embeddings.

    Attributes:
        ways: how the last step computed the norms of each trained layer, by the layer's name; see
            `dpbench.training.norm_ways`.

    Args:
        model: the workload's model.
        batch_size: number of examples in each batch.
        norms: ``cheaper`` chooses the cheaper way for each layer. ``products`` always uses products
            for linear layers and embeddings, and per-sample gradients for convolutions.
        options: further arguments of `TrainerBase`.

    Raises:
        ConfigurationError: the trainer cannot clip a layer or parameter of the model.
    """

    def __init__(
        self, model: nn.Module, *, batch_size: int, norms: str = "cheaper", **options: Any
    ) -> None:
        if norms not in WAYS:
            raise unknown("way of norms", norms, WAYS)
        super().__init__(model, batch_size=batch_size, **options)
        self.known_ways, self.ways = WAYS[norms], dict[str, str]()
        self._found: FirstPass | None = None  # None outside the first pass
        for layer, rule in self.rules.items():
            layer.register_forward_hook(partial(self._watch_layer, rule), with_kwargs=True)

    def distribute(self, model: nn.Module) -> nn.Module:
        check_layers(model)
        check_untied(model)
        # The rules are made before FSDP2 replaces the layers' classes.
        self.rules: dict[nn.Module, Rule[Any]] = {
            layer: rule_of(layer, name)
            for name, layer in model.named_modules()
            if any(p.requires_grad for p in layer.parameters(recurse=False))
        }
        if self.parallel != "fsdp2":
            return super().distribute(model)
        self.labels = {**self.labels, DRAWN_BY: "each rank, for its share"}
        try:
            model = sharded(model, self.workload, [nn.Embedding])
        except ConfigurationError:  # the workload does not name the model's blocks
            model = sharded_as_opacus_does(model)
        for layer in model.modules():
            if isinstance(layer, nn.Embedding) and isinstance(layer, FSDPModule):
                layer.set_unshard_in_backward(False)
        for rule in self.rules.values():
            rule.find_parameters()  # otherwise, the rule would keep unsharded parameters in memory
        return model

    def train_step(self, batch: Batch) -> Tensor:
        self.begin_step()
        means = []
        for _, part in self.parts(batch):
            found = self._found = FirstPass(self.known_ways, self.ways)
            with phase("forward"):
                losses = self.example_losses(self.model, part)
                means.append(losses.detach().mean())
            with phase("backward"):  # contains clipping, because the second pass weights losses
                self.backward(losses, found)
                del losses  # frees autograd's graph, which has hooks
                self.take_gradients(found)
        self.update()
        return mean_of(means, self.sizes)

    def _watch_layer(
        self, rule: Rule[Any], layer: nn.Module, given: Any, options: Any, returned: Any
    ) -> None:
        """Compute a layer's norms when the backward of the first pass reaches the layer."""
        found = self._found
        if found is None:
            return
        if not torch.is_grad_enabled():  # activation checkpointing will run the layer again
            found.runs_again |= layer.training
            return
        rule.check_call(given, options, returned, self.examples)
        if not given[0].requires_grad:  # no trained layer comes before this layer
            found.firsts.append(get_gradient_edge(returned))
        held = [given[0].detach()]
        version = held[0]._version

        def measure(gradient: Tensor) -> None:
            if self._found is None:
                return
            activations = held.pop()  # otherwise, they would stay in memory until pass 2 ends
            # Autograd checks only tensors that it has saved, and may not have saved the input.
            if activations._version != version:
                raise rule.refusal("its input was changed in place after the call")
            found.measure(rule, activations, gradient.detach())

        returned.register_hook(measure)

    def backward(self, losses: Tensor, found: FirstPass) -> None:
        """Run both passes. The second pass computes this micro-batch's clipped gradients."""
        if found.firsts and not found.runs_again:
            # The backward asks only for the gradients of the first layers' outputs. To get there,
            # it passes through every layer, but computes no parameter gradients. FSDP2 would add
            # the parameter gradients of both passes.
            torch.autograd.grad(losses.sum(), found.firsts, retain_graph=True, allow_unused=True)
        else:
            losses.sum().backward(retain_graph=True)
            self.plain_optimizer.zero_grad(set_to_none=True)
        self._found = None
        # FSDP2 divides gradients by the number of ranks.
        divisor = self.batch_size if self.parallel == "fsdp2" else self.joint_batch_size
        weights = clipping_factors(total(found.squared_norms()), self.max_grad_norm, divisor)
        hooks = [
            parameter.register_hook(partial(found.weighted_sum, parameter, weights))
            for parameter in found.samples
        ]
        (rounded_down(weights, losses.dtype) * losses).sum().backward()
        for hook in hooks:
            hook.remove()

    @torch.no_grad()
    def take_gradients(self, found: FirstPass) -> None:
        """Add the gradients that the second pass has set, and zeros for unused parameters."""
        for layer, rule in self.rules.items():
            grown = any(p.grad is not None for p in layer.parameters(recurse=False))
            if grown and rule not in found.measured:
                raise rule.refusal("the model uses the layer's parameters without calling it")
        for parameter in self.trained:
            gradient, parameter.grad = parameter.grad, None
            self.add(parameter, torch.zeros_like(parameter) if gradient is None else gradient)


class FirstPass:
    """Results of the first pass for a micro-batch.

    Args:
        known: the ways to compute norms from which the trainer may choose.
        ways: dictionary to which the chosen way of each layer is added, by the layer's name.

    Attributes:
        firsts: autograd's edges at the outputs of trained layers before which no other trained
            layer runs. The backward may end at these edges.
        runs_again: whether activation checkpointing runs layers again during the backward.
        measured: the rules of the layers that the backward has reached.
        samples: the per-sample gradients ``[B, …]`` that are kept for the update, by parameter.
    """

    def __init__(self, known: Collection[str], ways: dict[str, str]) -> None:
        self._norms, self._known, self._ways = GhostNorms(), known, ways
        self.firsts: list[Any] = []
        self.runs_again = False
        self.measured: set[Rule[Any]] = set()
        self.samples: dict[Tensor, Tensor] = {}

    def measure(self, rule: Rule[Any], x: Tensor, g: Tensor) -> None:
        """Add a layer's per-sample gradients to the norms, or keep them for later."""
        layer = rule.layer
        by_norms = isinstance(rule, LinearRule | EmbeddingRule) or is_convolution(layer)
        if by_norms and rule in self.measured:
            raise rule.refusal("it is called twice, and its norms need the gradients of both calls")
        self.measured.add(rule)
        way = self._ways[rule.name] = way_of(rule, x, g, self._known) if by_norms else KEPT
        if isinstance(rule, LinearRule):
            self._add_linear(rule, as_computed(three_dimensional(x), g), three_dimensional(g))
        elif isinstance(rule, EmbeddingRule):
            self._add_embedding(rule, x, three_dimensional(g))
        elif by_norms and way == PRODUCTS:
            given = patches(layer, as_computed(x, g)).mT
            self._add_linear(rule, given, g.flatten(2).mT, tf32=convolves_in_tf32(g.device))
        else:
            assert isinstance(rule, SampledRule)
            rounded = rounded_terms(layer, x, g) if by_norms else None
            for parameter, samples in rule.gradients(x, g).items():
                if by_norms:
                    self._norms.add_samples(samples, parameter.dtype, rounded)
                else:
                    before = self.samples.get(parameter)
                    self.samples[parameter] = samples if before is None else before + samples

    def _add_linear(
        self, rule: Rule[Any], x: Tensor, g: Tensor, *, tf32: bool | None = None
    ) -> None:
        trained = rule.layer.weight.requires_grad
        way = self._ways[rule.name]
        self._norms.add(x, g, way=way, weight=trained, bias=rule.trains_bias, tf32=tf32)

    def _add_embedding(self, rule: EmbeddingRule, rows: Tensor, g: Tensor) -> None:
        layer = rule.layer
        rows = rows.reshape(len(g), -1).long()
        if layer.padding_idx is not None:
            g = g * (rows != layer.padding_idx)[:, :, None]
        on_cpu = g.itemsize == 2 and not g.is_cuda  # a CPU's second pass sums in 16 bits
        summed_in = g.dtype if on_cpu else None
        self._norms.add(rows, g, way=self._ways[rule.name], summed_in=summed_in)

    def squared_norms(self) -> list[Tensor]:
        """Return for each part of the gradient the squared norms of all examples, ``[B]``."""
        for parameter, samples in self.samples.items():
            self._norms.add_samples(samples, parameter.dtype)
        return self._norms.squared_norms()

    def weighted_sum(self, parameter: Tensor, weights: Tensor, gradient: Tensor) -> Tensor:
        """Return a parameter's clipped gradient, to replace the gradient of the second pass."""
        samples = self.samples.pop(parameter, None)
        if samples is None:  # a later call: with checkpointing, each block calls this hook again
            return torch.zeros_like(gradient)
        wide = torch.promote_types(samples.dtype, weights.dtype)  # rounds only once, at the end
        by_example = samples.reshape(len(samples), -1).t().to(wide)
        return torch.mv(by_example, weights.to(wide)).view_as(gradient).to(gradient.dtype)


def way_of(rule: Rule[Any], x: Tensor, g: Tensor, known: Collection[str]) -> str:
    """Return the cheapest way to compute a layer's norms.

    A 1-D or 2-D convolution without groups is treated as a linear layer whose inputs are patches.
    Norms of other convolutions are always computed from per-sample gradients.
    """
    layer = rule.layer
    if not is_convolution(layer):
        return rule.way(x, g, known)
    if GRADIENT not in known or isinstance(layer, nn.Conv3d) or layer.groups > 1:
        return GRADIENT
    tokens, height = math.prod(g.shape[2:]), g.shape[1]
    width = layer.weight[0].numel()
    shape = Shape(len(g), tokens, width, height, g.itemsize, tf32=has_tf32())
    return cheapest(shape, known)


def is_convolution(layer: nn.Module) -> bool:
    """Return True if a layer is a convolution that pads with zeros or not at all."""
    kinds = nn.Conv1d | nn.Conv2d | nn.Conv3d
    return isinstance(layer, kinds) and layer.padding_mode == "zeros"


def rounded_terms(layer: Any, x: Tensor, g: Tensor) -> Tensor:
    """Bound how far the gradients in the first and second pass differ for a convolution, ``[B]``.

    Roundings in sums over n positions are assumed to be independent, so the error of a sum is about
    ``n^½`` units of roundoff (Higham and Mary, "A New Approach to Probabilistic Rounding Error
    Analysis", SIAM J. Sci. Comput. 41(5), 2019). Twice this error is added for each of the two
    passes. TF32 may round the input and the output gradient to 11 bits in each pass, so a relative
    error of 2⁻¹⁰ is added in total. In 16 bits, one rounding error in each pass is added.
    """
    wide = torch.promote_types(g.dtype, torch.float32)
    ones = torch.ones(1, 1, *layer.kernel_size, dtype=wide, device=x.device)
    conv: Any = {1: conv1d, 2: conv2d, 3: conv3d}[len(layer.kernel_size)]
    squares = x.to(wide).square().sum(1, keepdim=True)
    patches = conv(squares, ones, None, layer.stride, layer.padding, layer.dilation)
    of_outputs = g.to(wide).square().sum(1, keepdim=True)
    size: Tensor = ((1 + patches) * of_outputs).flatten(1).sum(1).sqrt()
    in_tf32 = g.dtype == torch.float32 and convolves_in_tf32(g.device)
    by_pass = 2.0**-11 if in_tf32 else unit(g.dtype)
    by_pass += 2 * math.sqrt(patches[0].numel()) * wide_unit(g.dtype)
    return 2 * by_pass * size


def patches(layer: nn.Conv1d | nn.Conv2d, x: Tensor) -> Tensor:
    """Return the patches of x that a convolution multiplies by its weight.

    The result has the shape ``[B, patch size, positions]``, where the patch size counts the
    elements of a patch.
    """
    flat = isinstance(layer, nn.Conv1d)  # its input is treated as an image of one row
    unfolded: Tensor = unfold2d(
        x.unsqueeze(2) if flat else x,
        kernel_size=(1, *layer.kernel_size)[-2:],
        padding=layer.padding if isinstance(layer.padding, str) else (0, *layer.padding)[-2:],
        stride=(1, *layer.stride)[-2:],
        dilation=(1, *layer.dilation)[-2:],
    )
    return unfolded
