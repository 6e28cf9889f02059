"""Rules that clip gradients, each for the parameters of one layer.

A rule computes the norm of each example's gradient, and the sum of clipped gradients, from the
layer's activations and output gradients. For a linear layer, the norm can be computed without the
per-sample gradient (Goodfellow, "Efficient Per-Example Gradient Computations", 2015,
https://arxiv.org/abs/1510.01799; Li et al., "Large Language Models Can Be Strong Differentially
Private Learners", 2021, https://arxiv.org/abs/2110.05679). If an example has the activations x and
the output gradients g, with one row per token, the squared norm is the sum of the elementwise
product of ``x xᵀ`` and ``g gᵀ``.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import torch
from opacus.grad_sample import GradSampleModule
from opacus.grad_sample.functorch import ft_compute_per_sample_gradient, prepare_layer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dpbench.training import convolutions
from dpbench.training.clipped_sums import Factors, Sums
from dpbench.training.kernels import aligned, has_tf32, layer_norm_samples, weighted_sum
from dpbench.training.norms import KEPT, GhostNorms, Shape, cheapest
from dpbench.training.parallel import kind_of
from dpbench.training.refusals import CannotClip

Gradients = Mapping[Tensor, Tensor]
"""Per-sample gradients ``[B, …]``, by parameter."""
Saved = list[Any]
"""Tensors that a rule keeps from the backward until clipping. The list has either a pair of
activations and output gradients for each call of the layer, or one `Gradients`, which is the sum
over all calls."""

L = TypeVar("L", bound=nn.Module)


class Rule(ABC, Generic[L]):
    """Base class of rules. Unless a subclass overrides `way`, per-sample gradients are kept.

    During the backward, `save` stores the tensors of each call of the layer. Afterwards, the norms
    and sums for all calls together are computed.

    Attributes:
        rows: how many rows of the input's first dimension belong to each example.
        trained: the layer's own trained parameters, by the names of their attributes. Under FSDP2,
            these are shards, so the rule must be made after the model was sharded.
    """

    def __init__(self, layer: L, name: str) -> None:
        self.layer, self.name = layer, name
        self.rows = 1
        bias = getattr(layer, "bias", None)
        self.trains_bias = isinstance(bias, Tensor) and bias.requires_grad
        own = layer.named_parameters(recurse=False)
        self.trained = {name: parameter for name, parameter in own if parameter.requires_grad}

    @property
    def which(self) -> str:
        """The layer, in words."""
        one = "the whole model" if any(self.layer.children()) else "the model, which is one layer"
        return f"{f'layer {self.name}' if self.name else one} ({kind_of(self.layer).__name__})"

    def refusal(self, why: str) -> CannotClip:
        """Return an error that gives the reason ``why`` this layer cannot be clipped."""
        return CannotClip(
            f"{self.which} cannot be clipped in one backward pass: {why}; change it or freeze "
            f"{'it' if self.name else ' and '.join(self.trained)} with requires_grad_(False)"
        )

    def check_call(self, given: Any, options: Any, returned: Any, examples: int) -> None:
        """Raise if a call of the layer has arguments or results that the rule does not support."""
        if len(given) != 1 or options or not isinstance(given[0], Tensor):
            raise self.refusal("it must be called with one tensor, by position")
        if not isinstance(returned, Tensor):
            raise self.refusal(f"it must return a tensor, not a {type(returned).__name__}")
        for what, tensor in (("input", given[0]), ("output", returned)):
            if tensor.dim() == 0 or len(tensor) != examples * self.rows:
                raise self.refusal(
                    f"its {what} has the shape {list(tensor.shape)}, but the first dimension must "
                    f"have the size {examples * self.rows}, for {examples} examples (expand what "
                    f"examples share)"
                )

    takes_rows: ClassVar[bool] = False
    """Whether several rows of the input's first dimension may belong to each example."""

    def way(self, x: Tensor, g: Tensor, ways: Collection[str], **options: bool) -> str:
        """Choose how to compute norms, among ``ways`` of `dpbench.training.norms`."""
        return KEPT

    def save(self, seen: Saved, x: Tensor, g: Tensor, way: str) -> None:
        """Store a call's activations and output gradients, or add its per-sample gradients."""
        if way != KEPT:
            seen.append((x, g))
            return
        made = self.samples(x, g)
        if seen:  # not in place, because a sampler may return a view of the output gradient
            made = {parameter: seen[0][parameter] + each for parameter, each in made.items()}
        seen[:] = [made]

    @abstractmethod
    def samples(self, x: Tensor, g: Tensor) -> dict[Tensor, Tensor]:
        """Return the per-sample gradients ``[B, …]`` from one call, by trained parameter."""


class PairRule(Rule[L]):
    """A rule that can clip without per-sample gradients, from activations and output gradients."""

    @abstractmethod
    def add_norms(self, norms: GhostNorms, seen: Saved, way: str) -> None:
        """Add the layer to ``norms``, where ``way`` is ``products`` or ``gradient``."""

    def align(self, seen: Saved) -> None:
        """Replace output gradients by `aligned` ones, if the rule can use these."""

    @abstractmethod
    def weighted_sums(self, seen: Saved, factors: Factors, sums: Sums) -> None:
        """Add the sum of all examples' clipped gradients to ``sums``."""


class TokenRule(PairRule[L]):
    """A `PairRule` of a layer that treats each token alone."""

    takes_rows = True

    @abstractmethod
    def joined(self, seen: Saved) -> tuple[Tensor, Tensor]:
        """Concatenate the kept tensors of all calls along the dimension of the tokens.

        Returns:
            The inputs, ``[B, T, K]`` or ``[B, T]``, and the output gradients, ``[B, T, N]``.
        """

    def add_norms(self, norms: GhostNorms, seen: Saved, way: str) -> None:
        norms.add(*self.joined(seen), way=way, bias=self.trains_bias)


class LinearRule(TokenRule[Any]):
    """Rule of linear layers, including Hugging Face's ``Conv1D``, whose weight is transposed."""

    def way(self, x: Tensor, g: Tensor, ways: Collection[str], **options: bool) -> str:
        if "weight" not in self.trained:
            return KEPT  # the layer trains only its bias
        tokens = math.prod(g.shape[1:-1])
        shape = Shape(len(g), tokens, x.shape[-1], g.shape[-1], g.itemsize, tf32=has_tf32())
        return cheapest(shape, ways, **options)

    def align(self, seen: Saved) -> None:
        for n, (x, g) in enumerate(seen):
            seen[n] = x, aligned(g)

    def samples(self, x: Tensor, g: Tensor) -> dict[Tensor, Tensor]:
        x, g = as_computed(three_dimensional(x), g), three_dimensional(g)
        a, b = (g, x) if isinstance(self.layer, nn.Linear) else (x, g)
        made = {"weight": lambda: torch.bmm(a.mT, b), "bias": lambda: g.sum(1)}
        return {parameter: made[name]() for name, parameter in self.trained.items()}

    def weighted_sums(self, seen: Saved, factors: Factors, sums: Sums) -> None:
        x, g = self.joined(seen)
        is_linear = isinstance(self.layer, nn.Linear)
        height = self.layer.weight.shape[0 if is_linear else 1]
        if self.layer.weight.requires_grad:
            # The narrower of the two matrices is multiplied by the factors.
            wide = x.shape[2] > g.shape[2]
            a, b = (x, factors.times(g)) if wide else (factors.times(x), g)
            b = b[..., :height]  # without what `align` has added
            if is_linear:
                a, b = b, a
            sums.add_product(self.layer.weight, a.flatten(0, 1).t(), b.flatten(0, 1))
        if self.trains_bias:
            g = g[..., :height]
            samples = g.sum(1, dtype=torch.promote_types(g.dtype, torch.float32))
            sums.add_written(self.layer.bias, partial(weighted_sum, samples, factors.exact))

    def joined(self, seen: Saved) -> tuple[Tensor, Tensor]:
        pairs = [(three_dimensional(x), three_dimensional(g)) for x, g in seen]
        x, g = (
            pairs[0]
            if len(pairs) == 1
            else (torch.cat(each, 1) for each in zip(*pairs, strict=True))
        )
        return as_computed(x, g), g


class EmbeddingRule(TokenRule[nn.Embedding]):
    """Rule of embeddings. Rows that an example does not look up have the gradient 0."""

    def __init__(self, layer: nn.Embedding, name: str) -> None:
        super().__init__(layer, name)
        if layer.max_norm is not None or layer.scale_grad_by_freq:
            raise self.refusal(
                "with max_norm or scale_grad_by_freq, an example's gradient depends on other "
                "examples"
            )

    def way(self, x: Tensor, g: Tensor, ways: Collection[str], **options: bool) -> str:
        rows, height = self.layer.num_embeddings, g.shape[-1]
        shape = Shape(len(g), math.prod(g.shape[1:-1]), rows, height, g.itemsize, rows=True)
        return cheapest(shape, ways, **options)

    def samples(self, x: Tensor, g: Tensor) -> dict[Tensor, Tensor]:
        ids, g = self.joined([(x, g)])
        rows, examples = self.layer.num_embeddings, len(ids)
        ids = ids + rows * torch.arange(examples, device=ids.device)[:, None]
        wide = torch.promote_types(g.dtype, torch.float32)
        made = g.new_zeros(examples * rows, g.shape[2], dtype=wide)
        made.index_add_(0, ids.flatten(), g.flatten(0, 1).to(wide))
        return {self.trained["weight"]: made.view(examples, rows, -1)}

    def weighted_sums(self, seen: Saved, factors: Factors, sums: Sums) -> None:
        ids, g = self.joined(seen)
        weighted = factors.times(g).flatten(0, 1)
        sums.add_rows(self.layer.weight, ids.flatten(), weighted)

    def joined(self, seen: Saved) -> tuple[Tensor, Tensor]:
        # The row with the padding index gets no gradient.
        ids = torch.cat([ids.reshape(len(ids), -1) for ids, _ in seen], 1).long()
        g = torch.cat([three_dimensional(g) for _, g in seen], 1)
        if self.layer.padding_idx is not None:
            g = g * (ids != self.layer.padding_idx)[:, :, None]
        return ids, g


class ScaledEmbeddingRule(EmbeddingRule):
    """Rule of embeddings of Transformers that multiply the rows by ``embed_scale``."""

    def joined(self, seen: Saved) -> tuple[Tensor, Tensor]:
        ids, g = super().joined(seen)
        scale: Any = self.layer.embed_scale
        return ids, g * (scale.to(g.dtype) if isinstance(scale, Tensor) else scale)


class ConvolutionRule(PairRule[Any]):
    """Rule of convolutions, see `dpbench.training.convolutions`.

    If a convolution has groups, its per-sample gradients are always kept.
    """

    def way(self, x: Tensor, g: Tensor, ways: Collection[str], **options: bool) -> str:
        if "weight" not in self.trained or self.layer.groups > 1:
            return KEPT
        return convolutions.cheapest_way(self.layer, x, g, ways, alone=options["alone"])

    def samples(self, x: Tensor, g: Tensor) -> dict[Tensor, Tensor]:
        made = {
            "weight": lambda: convolutions.samples_of_weight(self.layer, as_computed(x, g), g),
            "bias": lambda: g.flatten(2).sum(2),
        }
        return {parameter: made[name]() for name, parameter in self.trained.items()}

    def add_norms(self, norms: GhostNorms, seen: Saved, way: str) -> None:
        calls = [(as_computed(x, g), g) for x, g in seen]
        norms.add_sums(*convolutions.sums_of_products(self.layer, calls, self.trains_bias))

    def weighted_sums(self, seen: Saved, factors: Factors, sums: Sums) -> None:
        for x, g in seen:
            weighted = factors.times(g.flatten(2)).view(g.shape)
            made = convolutions.clipped_gradient(
                self.layer, as_computed(x, g), weighted, self.trains_bias
            )
            for name, gradient in zip(("weight", "bias"), made, strict=False):
                sums.add(self.trained[name], gradient)


class SampledRule(Rule[nn.Module]):
    """Rule of all other layers. It needs per-sample gradients.

    The gradients are computed by Opacus's function for this kind of layer, or else by functorch, or
    else for one example after another.
    """

    def __init__(self, layer: nn.Module, name: str) -> None:
        super().__init__(layer, name)
        kind = kind_of(layer)
        if kind is nn.EmbeddingBag:
            raise self.refusal("it takes more than one tensor")
        self._sampler = GradSampleModule.GRAD_SAMPLERS.get(kind)
        self._one_by_one = False
        if kind is nn.LayerNorm and layer.bias is None:
            self._sampler = None  # Opacus 1.6 expects a bias of layer norms
        if self._sampler is None:
            if any(True for _ in layer.children()):
                own = next(iter(self.trained))
                raise self.refusal(f"it has its own parameter {own}, but also contains layers")
            if isinstance(layer, FSDPModule):
                raise self.refusal("FSDP2 shards it as a block, which functorch cannot copy")
            bare = without_data(layer)
            try:
                prepare_layer(bare)
            except NotImplementedError as error:
                raise self.refusal(str(error)) from error
            layer.ft_compute_sample_grad = bare.ft_compute_sample_grad

    def samples(self, x: Tensor, g: Tensor) -> dict[Tensor, Tensor]:
        # Under FSDP2, the backward uses gathered parameters, but `trained` has sharded parameters.
        own: dict[Tensor, Tensor] = {getattr(self.layer, n): p for n, p in self.trained.items()}
        for parameter in own:
            parameter.requires_grad_()  # samplers need this, but a running backward ignores it
        made = {own[p]: each for p, each in self.gradients(x, g).items()}
        for parameter in own:
            parameter.requires_grad_(False)
        return made

    def gradients(self, x: Tensor, g: Tensor) -> Gradients:
        """Return the per-sample gradients ``[B, …]`` from one call, by parameter of the layer."""
        sampler: Any = self._sampler or ft_compute_per_sample_gradient
        if not self._sampler and any(isinstance(p, DTensor) for p in self.layer.parameters()):
            raise self.refusal(
                "its output is its block's output, so FSDP2 gathers its parameters too late"
            )
        if self._one_by_one:
            return self._of_each_example(x, g)
        try:  # Opacus 1.6 reads images that are not contiguous in the wrong order
            made = sampler(self.layer, [as_computed(x, g).contiguous()], g)
        except RuntimeError as error:
            if not any(known in str(error) for known in ("functorch", "vmap")):
                raise
            self._one_by_one = True
            return self._of_each_example(x, g)
        return {parameter: each for parameter, each in made.items() if parameter.requires_grad}

    def _of_each_example(self, x: Tensor, g: Tensor) -> Gradients:
        """Compute the gradients of one example after another."""
        own = [getattr(self.layer, name) for name in self.trained]
        with torch.enable_grad():
            each = [
                torch.autograd.grad(self.layer.forward(one), own, of_output)
                for one, of_output in zip(as_computed(x, g).split(1), g.split(1), strict=True)
            ]
        return {p: torch.stack(made) for p, made in zip(own, zip(*each, strict=True), strict=True)}


class LayerNormRule(SampledRule):
    """Computes the per-sample gradients of a layer norm by one operator, `layer_norm_samples`."""

    layer: nn.LayerNorm
    takes_rows = True

    def __init__(self, layer: nn.Module, name: str) -> None:
        Rule.__init__(self, layer, name)  # the rule needs no sampler of Opacus

    def gradients(self, x: Tensor, g: Tensor) -> Gradients:
        samples = layer_norm_samples(three_dimensional(x), three_dimensional(g), self.layer.eps)
        made = zip((self.layer.weight, self.layer.bias), samples, strict=True)
        return {p: each for p, each in made if p is not None and p.requires_grad}


class GroupNormRule(SampledRule):
    """Computes the per-sample gradients of a group norm by PyTorch's operator for a whole batch.

    This operator sums over positions and examples. It gets a batch of one example, which has all
    examples' channels.
    """

    layer: nn.GroupNorm

    def __init__(self, layer: nn.Module, name: str) -> None:
        Rule.__init__(self, layer, name)  # the rule needs no sampler of Opacus

    def gradients(self, x: Tensor, g: Tensor) -> Gradients:
        examples, channels = x.shape[:2]
        pair = as_computed(x, g), g  # the operator reads memory as if it were contiguous
        x, g = (each.contiguous().view(1, examples * channels, -1) for each in pair)
        groups = examples * self.layer.num_groups
        variance, mean = torch.var_mean(x.view(1, groups, -1), 2, correction=0)
        wide = torch.promote_types(x.dtype, torch.float32)
        factor = (variance.to(wide) + self.layer.eps).rsqrt().to(x.dtype)
        _, *samples = torch.ops.aten.native_group_norm_backward(
            g, x, mean, factor, x.new_ones(x.shape[1]), *x.shape, groups, [False, True, True]
        )
        made = zip((self.layer.weight, self.layer.bias), samples, strict=True)
        own = ((p, each) for p, each in made if p is not None and p.requires_grad)
        return {p: each.view(examples, channels) for p, each in own}


RULES: Mapping[str, type[Rule[Any]]] = {
    "torch.nn.modules.linear.Linear": LinearRule,
    "torch.nn.modules.conv.Conv1d": ConvolutionRule,
    "torch.nn.modules.conv.Conv2d": ConvolutionRule,
    "torch.nn.modules.conv.Conv3d": ConvolutionRule,
    "torch.nn.modules.normalization.GroupNorm": GroupNormRule,
    "transformers.pytorch_utils.Conv1D": LinearRule,
    "torch.nn.modules.sparse.Embedding": EmbeddingRule,
}
"""The rule of each class of layers, by the name of the class. The keys are names, because a library
that defines a class may not be installed. The rule of all other classes is `SampledRule`, but see
`rule_of`."""


def rule_of(layer: nn.Module, name: str, *, kernels: bool) -> Rule[Any]:
    """Make the rule for a layer that has its own parameters.

    Args:
        layer: the layer.
        name: the layer's name in the model.
        kernels: whether `LayerNormRule` is the rule of usual layer norms.
    """
    kind = kind_of(layer)
    if kernels and isinstance(layer, nn.LayerNorm) and has_usual_norm(layer):
        return LayerNormRule(layer, name)
    if kind.__name__.endswith("ScaledWordEmbedding") and hasattr(layer, "embed_scale"):
        return ScaledEmbeddingRule(layer, name)  # type: ignore[arg-type]
    return RULES.get(f"{kind.__module__}.{kind.__qualname__}", SampledRule)(layer, name)


def without_data(layer: nn.Module) -> nn.Module:
    """Copy a layer, which must not have this trainer's hooks yet, with parameters without data.

    Opacus copies the layer again, and moves the copy to ``meta``, which fails for fake tensors.
    """
    return copy.deepcopy(
        layer,
        {
            id(p): nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"))
            for p in layer.parameters()
            if p.is_floating_point()
        },
    )


def has_usual_norm(layer: nn.LayerNorm) -> bool:
    """Return True for PyTorch's own layer norm over the last dimension, not for a subclass."""
    return kind_of(layer) is nn.LayerNorm and len(layer.normalized_shape) == 1


def can_be_tied(rule: Rule[Any]) -> bool:
    """Return True if the layer's weight is ``[V, D]`` in the sense of `GhostNorms.add_tied`."""
    return isinstance(rule, EmbeddingRule) or (
        isinstance(rule, LinearRule) and isinstance(rule.layer, nn.Linear)
    )


def as_computed(x: Tensor, g: Tensor) -> Tensor:
    """Cast x to the dtype of g, which autocast used in the layer. Return integers unchanged."""
    return x.to(g.dtype) if x.is_floating_point() else x


def three_dimensional(tensor: Tensor) -> Tensor:
    """View ``[B, …, N]`` as ``[B, T, N]``."""
    return tensor.unsqueeze(1) if tensor.dim() == 2 else tensor.flatten(1, -2)
