"""DP-SGD with flat clipping in one backward pass.

The backward computes gradients with respect to layers' outputs, but not with respect to parameters.
For most layers, per-example norms and the sum of clipped gradients are computed later, from output
gradients and saved activations. This method is "book-keeping" of Bu et al., "Differentially Private
Optimization on Large Foundation Models" (2022), https://arxiv.org/abs/2210.00038.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dpbench.core.errors import ConfigurationError
from dpbench.training.base import DRAWN_BY, Batch, mean_of
from dpbench.training.clipped_sums import ClippedSumTrainer
from dpbench.training.ghost_norms import GhostNorms
from dpbench.training.gradient_sums import Buffer, Factors, scaled
from dpbench.training.kept_gradients import KeptGradients
from dpbench.training.norm_ways import GRADIENT, KEPT, PRODUCTS
from dpbench.training.parallel import sharded
from dpbench.training.per_layer import KeptOfLayer, PairRule, Rule, rule_of
from dpbench.training.phases import phase
from dpbench.training.refusals import BY_EXAMPLE


class BookKeepingTrainer(ClippedSumTrainer):
    """Trains with one backward pass. The phase ``clip`` computes norms, factors and weighted sums.

    Every optimizer works if its ``step`` needs no closure. A layer may be called several times. For
    a linear layer or an embedding, the backward keeps either activations and output gradients, or
    per-sample gradients. For other layers, the backward keeps per-sample gradients. Activation
    checkpointing does not change which tensors the backward keeps.

    The constructor has the arguments of `TrainerBase`.

    Attributes:
        ways: how the last step computed the norms of each trained layer, by the layer's name; see
            `dpbench.training.norm_ways`.

    Raises:
        ConfigurationError: the trainer cannot clip a layer or parameter of the model.
    """

    scaled = staticmethod(scaled)
    known_ways: Collection[str] = (PRODUCTS, GRADIENT, KEPT)
    has_kernel = False
    """Whether one kernel computes norms from products of tokens × tokens on a GPU. The function
    `dpbench.training.norm_ways.costs` needs this to choose a way."""

    def __init__(self, model: nn.Module, *, batch_size: int, **options: Any) -> None:
        super().__init__(model, batch_size=batch_size, **options)
        check_untied(model)
        self._listening = False
        self._uses_are_checked = False  # the first step checks how the model uses parameters
        self.seen: dict[nn.Module, KeptOfLayer] = {}
        self.rules: dict[nn.Module, Rule[Any]] = {}
        self.ways: dict[str, str] = {}
        for name, layer in list(model.named_modules()):
            if any(p.requires_grad for p in layer.parameters(recurse=False)):
                rule = self.rules[layer] = self.rule_of(layer, name)
                layer.register_forward_hook(partial(self._keep, rule), with_kwargs=True)

    def distribute(self, model: nn.Module) -> nn.Module:
        if self.parallel != "fsdp2":
            return super().distribute(model)
        self.labels = {**self.labels, DRAWN_BY: "each rank, for its share"}
        return sharded(model, self.workload)

    def rule_of(self, layer: nn.Module, name: str) -> Rule[Any]:
        """Return the rule that clips the layer's own parameters."""
        return rule_of(layer, name)

    def train_step(self, batch: Batch) -> Tensor:
        self.begin_step()
        losses = []
        for last, part in self.parts(batch):
            with self.without_parameter_gradients():
                with phase("forward"):
                    loss = self.mean_loss(self.model, part)
                with phase("backward"):
                    # The losses are summed, so that output gradients are not divided by B.
                    (loss * self.examples).backward()
            losses.append(loss.detach())
            del loss  # the loss's graph keeps layers' inputs in memory
            with phase("clip"):
                self.clip(last)
        self.update()
        return mean_of(losses, self.sizes)

    def mean_loss(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        """Return the mean loss. The first call also checks how the model uses its parameters.

        The check raises if the model uses a trained parameter outside the call of the parameter's
        layer.
        """
        if self._uses_are_checked:
            return super().mean_loss(model, batch)
        with gradients_only_outside_layers(self.model, self.rules) as names:
            loss = super().mean_loss(model, batch)
        check_unused_outside_layers(names, loss)
        self._uses_are_checked = True
        return loss

    @contextmanager
    def without_parameter_gradients(self) -> Iterator[None]:
        """In this context, keep tensors for clipping, and compute no parameter gradients."""
        self.seen = {}
        self._listening = True
        for parameter in self.trained:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            self._listening = False
            for parameter in self.trained:
                parameter.requires_grad_()

    def _keep(
        self, rule: Rule[Any], layer: nn.Module, given: Any, options: Any, returned: Any
    ) -> Tensor | None:
        """Keep a layer's input and, when the backward reaches the layer, the output gradient."""
        # Activation checkpointing runs the layer first without autograd, and again during backward.
        if not (self._listening and torch.is_grad_enabled()):
            return None
        rule.check_call(given, options, returned, self.examples)
        is_first = not returned.requires_grad  # no trained layer comes before this layer
        if is_first:
            returned.requires_grad_()
        held = [given[0].detach()]
        version, shape = held[0]._version, returned.shape
        seen = self.seen.setdefault(layer, [])

        def keep_gradient(gradient: Tensor) -> None:
            activations = held.pop()  # otherwise, they would stay in memory until backward ends
            # Autograd checks only tensors that it has saved, and may not have saved the input.
            if activations._version != version:
                raise rule.refusal("its input was changed in place after the call")
            self._keep_call(rule, seen, activations, gradient.detach().reshape(shape))

        if is_first:
            returned.register_hook(keep_gradient)
            return ChangeableInPlace.apply(returned)  # type: ignore[no-untyped-call, no-any-return]
        heard, passed_on = heard_when_changed(returned)
        heard.register_hook(keep_gradient)
        return passed_on

    def _keep_call(self, rule: Rule[Any], seen: KeptOfLayer, x: Tensor, g: Tensor) -> None:
        """Keep a call's tensors. At the layer's first call, choose how to compute norms."""
        if not seen:
            alone = self.part_size == self.micro_batches == 1
            kernel = self.has_kernel
            self.ways[rule.name] = rule.way(x, g, self.known_ways, kernel=kernel, alone=alone)
        rule.keep(seen, x, g, self.ways[rule.name])

    def clip(self, last: bool) -> None:
        """Add clipped gradients to the sums. After the last micro-batch, begin reductions."""
        for buffer in self.clipped(last):
            self.reduce(buffer)

    @torch.no_grad()
    def clipped(self, last: bool) -> Iterator[Buffer]:
        """Add clipped gradients to the sums, and yield each buffer that is complete.

        Buffers are complete only after the last micro-batch. If there is only one rank, no buffer
        is yielded. All ranks yield the buffers in the same order, even if a layer was not called on
        some rank.
        """
        early = last and self.parallel != "none"
        seen, self.seen = {layer: calls for layer, calls in self.seen.items() if calls}, {}
        made: dict[Tensor, Tensor] = {}
        for layer, rule in self.rules.items():
            if layer in seen and self.ways[rule.name] == KEPT:
                made |= seen.pop(layer)[0]
        kept = KeptGradients(made)
        norms = kept.squared_norms() + self.squared_norms(seen)
        factors = Factors(self.factors_for(norms), self.scaled)
        kept.add_small(factors.exact, self.sums)
        for layer, rule in self.rules.items():
            kept.add_large(rule.trained, factors.exact, self.sums)
            if layer in seen and isinstance(rule, PairRule):
                rule.weighted_sums(seen.pop(layer), factors, self.sums)
            if early:
                yield from self.sums.finish(rule.trained)

    def squared_norms(self, seen: dict[nn.Module, KeptOfLayer]) -> list[Tensor]:
        """Return squared norms of the per-sample gradients that are not in memory, each ``[B]``.

        Args:
            seen: pairs of activations and output gradients, by layer.
        """
        norms = GhostNorms()
        for layer, rule in self.rules.items():
            if layer in seen and isinstance(rule, PairRule):
                pair = rule.joined(seen[layer])
                norms.add(*pair, way=self.ways[rule.name], bias=rule.trains_bias)
        return norms.squared_norms()


def heard_when_changed(returned: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the tensor whose hook also runs if a layer's output is then changed in place.

    If a view is changed in place, autograd gives the view a new history, without its hooks. So the
    hook must be on the tensor that the view shows. A linear layer with a bias returns such a view
    if its input has more than two dimensions. Of a view that shows a part, or in another order, the
    layer's caller must get a copy.

    Returns:
        The tensor for the hook, and the copy, or None if there is no copy.
    """
    whole = returned._base
    if whole is None:
        return returned, None
    in_order = whole.is_contiguous() and returned.is_contiguous()
    if in_order and whole.requires_grad and whole.numel() == returned.numel():
        return whole, None
    return returned, returned.clone()


class ChangeableInPlace(torch.autograd.Function):
    """Returns a tensor that shares a leaf tensor's memory, but may be changed in place."""

    @staticmethod
    def forward(_: Any, leaf: Tensor) -> Tensor:
        return leaf.new_empty(0).set_(leaf)  # type: ignore[call-overload, no-any-return]

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


@contextmanager
def gradients_only_outside_layers(
    model: nn.Module, rules: Mapping[nn.Module, Rule[Any]]
) -> Iterator[dict[Any, str]]:
    """Let trained parameters require gradients only outside the calls of their layers.

    Yields:
        A dictionary from parameters to their names. During the forward, the parameters that FSDP2
        gathers are added to it.
    """
    trained = [parameter for rule in rules.values() for parameter in rule.trained]
    names: dict[Any, str] = {parameter: name for name, parameter in model.named_parameters()}

    def switch(on: bool, layer: nn.Module, *_: object) -> None:
        for name in rules[layer].names:
            getattr(layer, name).requires_grad_(on)

    def add_gathered(*_: object) -> None:
        names.update((parameter, name) for name, parameter in model.named_parameters())

    blocks = [layer for layer in model.modules() if isinstance(layer, FSDPModule)]
    hooks = [layer.register_forward_pre_hook(add_gathered) for layer in blocks]
    hooks += [layer.register_forward_pre_hook(partial(switch, False)) for layer in rules]
    hooks += [layer.register_forward_hook(partial(switch, True)) for layer in rules]
    for parameter in trained:
        parameter.requires_grad_()
    try:
        yield names
    finally:
        for parameter in trained:
            parameter.requires_grad_(False)
        for hook in hooks:
            hook.remove()


def check_unused_outside_layers(names: Mapping[Any, str], loss: Tensor) -> None:
    """Raise if the loss uses a parameter outside the calls of the parameter's layer."""
    waiting: list[Any] = [loss.grad_fn]
    known: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node in known:
            continue
        known.add(node)
        if (name := names.get(getattr(node, "variable", None))) is not None:
            raise ConfigurationError(
                f"the model uses parameter {name} without a call of its layer, so the gradients "
                f"of single examples are unknown: call the layer, freeze the parameter with "
                f"requires_grad_(False), or {BY_EXAMPLE}"
            )
        waiting += (following for following, _ in node.next_functions)


def check_untied(model: nn.Module) -> None:
    """Raise if two layers share a trained parameter, whose gradient is a sum over both layers."""
    owners = Counter(
        parameter
        for layer in model.modules()
        for parameter in layer.parameters(recurse=False)
        if parameter.requires_grad
    )
    for shared in (parameter for parameter, times in owners.items() if times > 1):
        names = [name for name, p in model.named_parameters(remove_duplicate=False) if p is shared]
        raise ConfigurationError(
            f"{' and '.join(names)} are one parameter of several layers, and this trainer can only "
            f"compute norms for each layer: untie or freeze them, or {BY_EXAMPLE}"
        )
