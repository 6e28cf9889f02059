"""Opacus's ghost clipping, without needless memory traffic.

A first backward pass computes the norms, and a second one the gradient of the weighted loss, as in
`dpbench.training.fast_gradient_clipping`. `docs/upstream` has most of the differences from Opacus
1.6.0 as diffs.
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


class GhostLeanTrainer(ClippedMeanTrainer):
    """`DPGhostClippingTrainer` with these changes.

    - The loss is a sum; Opacus takes the mean and rescales each layer's output gradient.
    - Norms are upper bounds, see `dpbench.training.norm_bounds`; Opacus's may be too small.
    - The pass for the norms computes no parameter gradients, so FSDP2 reduces none in it. Under
      activation checkpointing autograd computes them anyway, and they are dropped. Opacus sets
      them to zero and accumulates into them.
    - Linear, embedding and convolution layers aside, a layer's per-sample gradients are computed
      once and kept, because its parameters are mostly small. The update uses their weighted sum,
      so norm and update round alike.
    - The clipped sums are not copied. Noise is drawn as in `dpbench.training.lean.LeanTrainer`.
      Under FSDP2 each rank draws the noise of its shard; with Opacus, that of all shards.
    - Under FSDP2 embeddings are not gathered in backward, which does not read them. The layers of
      a block are gathered and reduced together, if the workload names its blocks.

    - Norms of a linear layer, an embedding or a convolution are computed from products T × T or
      from per-sample gradients, whichever is cheaper. A 3-D or grouped convolution always takes
      per-sample gradients. Opacus takes products for linear layers, per-sample gradients for
      convolutions, and the looked-up rows for embeddings.

    Attributes:
        ways: how the last step computed the norms of each trained layer, by layer name; see
            `dpbench.training.norm_ways`.

    Args:
        norms: ``cheaper``, as above; or ``products``: linear layers and embeddings always take
            products, and convolutions per-sample gradients.
        options: as `TrainerBase`.

    Raises:
        ConfigurationError: names a layer or parameter that this trainer cannot clip.
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
            layer.register_forward_hook(partial(self._hear, rule), with_kwargs=True)

    def distribute(self, model: nn.Module) -> nn.Module:
        check_layers(model)
        check_untied(model)
        # Make the rules now, before FSDP2 replaces the layers' classes.
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
        except ConfigurationError:  # the workload does not name its blocks
            model = sharded_as_opacus_does(model)
        for layer in model.modules():
            if isinstance(layer, nn.Embedding) and isinstance(layer, FSDPModule):
                layer.set_unshard_in_backward(False)
        for rule in self.rules.values():
            rule.find_parameters()  # the unsharded ones would stay in memory
        return model

    def train_step(self, batch: Batch) -> Tensor:
        self.begin_step()
        means = []
        for _, part in self.parts(batch):
            found = self._found = FirstPass(self.known_ways, self.ways)
            with phase("forward"):
                losses = self.example_losses(self.model, part)
                means.append(losses.detach().mean())
            with phase("backward"):  # contains clipping: its second pass weights the losses
                self.backward(losses, found)
                del losses  # frees the graph, which has hooks
                self.take_gradients(found)
        self.update()
        return mean_of(means, self.sizes)

    def _hear(
        self, rule: Rule[Any], layer: nn.Module, given: Any, options: Any, returned: Any
    ) -> None:
        """In the first pass, measure a layer's output gradient when backward reaches it."""
        found = self._found
        if found is None:
            return
        if not torch.is_grad_enabled():  # checkpointing will run it again, with another graph
            found.runs_again |= layer.training
            return
        rule.check_call(given, options, returned, self.examples)
        if not given[0].requires_grad:  # no trained layer precedes it
            found.firsts.append(get_gradient_edge(returned))
        held = [given[0].detach()]
        version = held[0]._version

        def measure(gradient: Tensor) -> None:
            if self._found is None:
                return
            activations = held.pop()  # the graph keeps this function until the second pass ends
            if activations._version != version:  # autograd may not have saved it, so does not check
                raise rule.refusal("what it was given was changed in place afterwards")
            found.measure(rule, activations, gradient.detach())

        returned.register_hook(measure)

    def backward(self, losses: Tensor, found: FirstPass) -> None:
        """Run both passes; they leave the mean of the clipped gradients on the parameters."""
        if found.firsts and not found.runs_again:
            # Ask for gradients of the first layers' outputs only: backward then visits every layer
            # and makes no parameter gradients. FSDP2 would add such gradients to the second pass's.
            torch.autograd.grad(losses.sum(), found.firsts, retain_graph=True, allow_unused=True)
        else:
            losses.sum().backward(retain_graph=True)
            self.plain_optimizer.zero_grad(set_to_none=True)
        self._found = None
        # FSDP2 divides by the number of ranks itself.
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
        """Add the gradients that both passes left; zeros if the loss does not use a parameter."""
        for layer, rule in self.rules.items():
            grown = any(p.grad is not None for p in layer.parameters(recurse=False))
            if grown and rule not in found.measured:
                raise rule.refusal("the model uses its parameters without calling it")
        for parameter in self.trained:
            gradient, parameter.grad = parameter.grad, None
            self.add(parameter, torch.zeros_like(parameter) if gradient is None else gradient)


class FirstPass:
    """What the pass for the norms finds in a micro-batch.

    Args:
        known: the ways to compute norms from which to choose.
        ways: receives the way of each layer, by name.

    Attributes:
        firsts: outputs of the layers that no trained layer precedes; backward may end there.
        runs_again: whether activation checkpointing runs layers again in backward.
        measured: the rules of the layers that backward has reached.
        samples: the per-sample gradients ``[B, …]``, by parameter, that are kept for the update.
    """

    def __init__(self, known: Collection[str], ways: dict[str, str]) -> None:
        self._norms, self._known, self._ways = GhostNorms(), known, ways
        self.firsts: list[Any] = []
        self.runs_again = False
        self.measured: set[Rule[Any]] = set()
        self.samples: dict[Tensor, Tensor] = {}

    def measure(self, rule: Rule[Any], x: Tensor, g: Tensor) -> None:
        """Compute the norms of a layer's per-sample gradients, or keep these gradients."""
        layer = rule.layer
        by_norms = isinstance(rule, LinearRule | EmbeddingRule) or is_convolution(layer)
        if by_norms and rule in self.measured:
            raise rule.refusal("it is called twice, and norms of both calls are not known together")
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
        on_cpu = g.itemsize == 2 and not g.is_cuda  # its second pass sums in 16 bits
        summed_in = g.dtype if on_cpu else None
        self._norms.add(rows, g, way=self._ways[rule.name], summed_in=summed_in)

    def squared_norms(self) -> list[Tensor]:
        """The squared norms of parts of each example's gradient, each ``[B]``."""
        for parameter, samples in self.samples.items():
            self._norms.add_samples(samples, parameter.dtype)
        return self._norms.squared_norms()

    def weighted_sum(self, parameter: Tensor, weights: Tensor, gradient: Tensor) -> Tensor:
        """The clipped gradient of a parameter, which replaces that of the second pass."""
        samples = self.samples.pop(parameter, None)
        if samples is None:  # a later call: checkpointing calls this hook for each block
            return torch.zeros_like(gradient)
        wide = torch.promote_types(samples.dtype, weights.dtype)  # round once, at the end
        by_example = samples.reshape(len(samples), -1).t().to(wide)
        return torch.mv(by_example, weights.to(wide)).view_as(gradient).to(gradient.dtype)


def way_of(rule: Rule[Any], x: Tensor, g: Tensor, known: Collection[str]) -> str:
    """The cheapest way to a layer's norms; a convolution counts as linear on its patches."""
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
    """Whether a layer is a convolution with zero padding, whose patches can be computed."""
    kinds = nn.Conv1d | nn.Conv2d | nn.Conv3d
    return isinstance(layer, kinds) and layer.padding_mode == "zeros"


def rounded_terms(layer: Any, x: Tensor, g: Tensor) -> Tensor:
    """How far a convolution's gradient in the second pass may be from that in the first, ``[B]``.

    Roundings in sums over n positions are assumed to be independent, so a sum is off by ``n^½``
    units: Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", SIAM J. Sci.
    Comput. 41(5), 2019. Twice that is used. TF32 rounds input and gradient to 11 bits each, in one
    pass or alike in both: of one position it is 2⁻¹⁰ in all.
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
    """The input patches that a convolution multiplies by its weight, ``[B, D, T positions]``."""
    flat = isinstance(layer, nn.Conv1d)  # treat it as an image of one row
    unfolded: Tensor = unfold2d(
        x.unsqueeze(2) if flat else x,
        kernel_size=(1, *layer.kernel_size)[-2:],
        padding=layer.padding if isinstance(layer.padding, str) else (0, *layer.padding)[-2:],
        stride=(1, *layer.stride)[-2:],
        dilation=(1, *layer.dilation)[-2:],
    )
    return unfolded
