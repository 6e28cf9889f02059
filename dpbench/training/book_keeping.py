"""DP-SGD with flat clipping in one backward pass, without per-sample gradients.

Backward computes gradients of layers' outputs only, not of parameters. Norms are computed from
these gradients and the saved activations, and then the sum of clipped gradients. This is
"book-keeping" of Bu et al., "Differentially Private Optimization on Large Foundation Models"
(2022), https://arxiv.org/abs/2210.00038.
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


class BookKeepingTrainer(ClippedSumTrainer):
    """One backward pass; then norms, clipping factors and weighted sums, all in ``clip``.

    Any optimizer works, and a layer may be called several times. For linear and embedding layers,
    backward keeps activations and output gradients until clipping, or else the per-sample gradients
    made from them. For other layers it always keeps per-sample gradients. Activation checkpointing
    does not change this.

    Attributes:
        ways: how the last step computed the norms of each trained layer, by layer name; see
            `dpbench.training.norm_ways`.

    Arguments as `TrainerBase`.

    Raises:
        ConfigurationError: names a layer or parameter that this trainer cannot clip.
    """

    scaled = staticmethod(scaled)
    known_ways: Collection[str] = (PRODUCTS, GRADIENT, KEPT)
    has_kernel = False
    """Whether one kernel computes norms from products T × T; ``kernel`` of `norm_ways.costs`."""

    def __init__(self, model: nn.Module, *, batch_size: int, **options: Any) -> None:
        super().__init__(model, batch_size=batch_size, **options)
        check_untied(model)
        self._listening = False
        self._uses_are_checked = False  # before the first step
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
        """The rule by which a layer with parameters of its own is clipped."""
        return rule_of(layer, name)

    def train_step(self, batch: Batch) -> Tensor:
        self.begin_step()
        losses = []
        for last, part in self.parts(batch):
            with self.without_parameter_gradients():
                with phase("forward"):
                    loss = self.mean_loss(self.model, part)
                with phase("backward"):
                    (loss * self.examples).backward()  # of the sum: per-sample gradients
            losses.append(loss.detach())
            del loss  # its graph keeps layers' inputs alive
            with phase("clip"):
                self.clip(last)
        self.update()
        return mean_of(losses, self.sizes)

    def mean_loss(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        """The mean loss. The first call also refuses parameters used outside their layer's call."""
        if self._uses_are_checked:
            return super().mean_loss(model, batch)
        with outside_of_their_layers(self.model, self.rules) as names:
            loss = super().mean_loss(model, batch)
        check_heard(names, loss)
        self._uses_are_checked = True
        return loss

    @contextmanager
    def without_parameter_gradients(self) -> Iterator[None]:
        """A context with hooks on layers, in which autograd makes no parameter gradients."""
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
        """Keep a layer's input and, when backward reaches the layer, its output gradient."""
        # Activation checkpointing runs the layer first without autograd, and again in backward.
        if not (self._listening and torch.is_grad_enabled()):
            return None
        rule.check_call(given, options, returned, self.examples)
        is_first = not returned.requires_grad  # no trained layer precedes it
        if is_first:
            returned.requires_grad_()
        held = [given[0].detach()]
        version = held[0]._version
        seen = self.seen.setdefault(layer, [])

        def keep_gradient(gradient: Tensor) -> None:
            activations = held.pop()  # the graph references this function until backward ends
            if activations._version != version:  # autograd may not have saved it, so does not check
                raise rule.refusal("what it was given was changed in place afterwards")
            self._put_aside(rule, seen, activations, gradient.detach())

        returned.register_hook(keep_gradient)
        return ChangeableInPlace.apply(returned) if is_first else None  # type: ignore[no-untyped-call]

    def _put_aside(self, rule: Rule[Any], seen: KeptOfLayer, x: Tensor, g: Tensor) -> None:
        """Keep what clipping needs from a call; the layer's first call decides the way."""
        if not seen:
            alone = self.part_size == self.micro_batches == 1
            kernel = self.has_kernel
            self.ways[rule.name] = rule.way(x, g, self.known_ways, kernel=kernel, alone=alone)
        rule.keep(seen, x, g, self.ways[rule.name])

    def clip(self, last: bool) -> None:
        """Add the clipped gradients to the sums; after the last micro-batch, reduce the sums."""
        for buffer in self.clipped(last):
            self.reduce(buffer)

    @torch.no_grad()
    def clipped(self, last: bool) -> Iterator[Buffer]:
        """Clip; with several ranks, yield each buffer that is complete after the last micro-batch.

        All ranks yield buffers in the order of the model's layers, even if a rank has not called
        a layer.
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
        kept.put_small(factors.exact, self.sums)
        for layer, rule in self.rules.items():
            kept.put(rule.trained, factors.exact, self.sums)
            if layer in seen and isinstance(rule, PairRule):
                rule.weighted_sums(seen.pop(layer), factors, self.sums)
            if early:
                yield from self.sums.finish(rule.trained)

    def squared_norms(self, seen: dict[nn.Module, KeptOfLayer]) -> list[Tensor]:
        """Squared norms of the gradients that are not kept, each ``[B]``, float32 or wider.

        Args:
            seen: pairs of activations and output gradients, by layer.
        """
        norms = GhostNorms()
        for layer, rule in self.rules.items():
            if layer in seen and isinstance(rule, PairRule):
                pair = rule.joined(seen[layer])
                norms.add(*pair, way=self.ways[rule.name], bias=rule.trains_bias)
        return norms.squared_norms()


class ChangeableInPlace(torch.autograd.Function):
    """Returns a leaf tensor as a non-leaf in the same memory, which may be changed in place."""

    @staticmethod
    def forward(_: Any, leaf: Tensor) -> Tensor:
        return leaf.new_empty(0).set_(leaf)  # type: ignore[call-overload, no-any-return]

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


@contextmanager
def outside_of_their_layers(
    model: nn.Module, rules: Mapping[nn.Module, Rule[Any]]
) -> Iterator[dict[Any, str]]:
    """A context in which trained parameters require gradients only outside their layers' calls.

    Yields:
        The names of parameters. FSDP2's gathered parameters are added when they are gathered.
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


def check_heard(names: Mapping[Any, str], loss: Tensor) -> None:
    """Refuse a parameter that the loss uses outside its layer's calls."""
    waiting: list[Any] = [loss.grad_fn]
    known: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node in known:
            continue
        known.add(node)
        if (name := names.get(getattr(node, "variable", None))) is not None:
            raise ConfigurationError(
                f"the model uses parameter {name} without a call of its layer, where each "
                f"example's gradient is not seen: call the layer, freeze it with "
                f"requires_grad_(False), or use the trainer micro_batch"
            )
        waiting += (following for following, _ in node.next_functions)


def check_untied(model: nn.Module) -> None:
    """Refuse a trained parameter shared by two layers: its gradient is a sum over both."""
    owners = Counter(
        parameter
        for layer in model.modules()
        for parameter in layer.parameters(recurse=False)
        if parameter.requires_grad
    )
    for shared in (parameter for parameter, times in owners.items() if times > 1):
        names = [name for name, p in model.named_parameters(remove_duplicate=False) if p is shared]
        raise ConfigurationError(
            f"{' and '.join(names)} are one parameter of several layers, whose norms this trainer "
            f"takes apart: untie or freeze them, or use the trainer dpsgd"
        )
