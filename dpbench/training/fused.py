"""DP-SGD with flat clipping that moves few more bytes than a step without privacy.

The only backward computes gradients with respect to layers' outputs, but not with respect to
parameters. For most layers, per-example norms and the sum of clipped gradients are computed later,
from output gradients and saved activations. This method is "book-keeping" of Bu et al.,
"Differentially Private Optimization on Large Foundation Models" (2022),
https://arxiv.org/abs/2210.00038.

Passes over memory are merged. If norms are cheapest from products of tokens × tokens, a GPU uses
one kernel for all large layers of equal shape, and does not store these products. With SGD, Adam
and AdamW, the update itself draws the noise. On a GPU, forward, backward and clip run as CUDA
graphs where possible, and do not wait for Python.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from dpbench.core.errors import ConfigurationError
from dpbench.training.base import DRAWN_BY, Batch, mean_of
from dpbench.training.clipped_sums import (
    Buffer,
    ClippedSumTrainer,
    Factors,
    KeptGradients,
    Reduction,
)
from dpbench.training.correlated_noise import check_step
from dpbench.training.graphs import StepGraphs, recorded_step, signature
from dpbench.training.kernels import multiplied, multiplied_by_kernel, without_dropped
from dpbench.training.noise_stream import NoiseStream
from dpbench.training.noisy_updates import (
    MergedUpdate,
    ShardedUpdate,
    noisy_mean,
    why_not,
)
from dpbench.training.norms import GRADIENT, KEPT, PRODUCTS, GhostNorms
from dpbench.training.parallel import sharded
from dpbench.training.per_layer import PairRule, Rule, Saved, TokenRule, can_be_tied
from dpbench.training.phases import phase
from dpbench.training.plan import TOLERANCES, Plan, Probe, expand
from dpbench.training.refusals import (
    BY_EXAMPLE,
    CannotClip,
    ModelSnapshot,
    check_used_in_layers,
    used_outside,
)
from dpbench.training.units import UnitRule, cost_of
from dpbench.workloads.base import examples_in

GIVEN_UP = (
    "backward ran twice for one forward, or for a forward that was given up because the model ran "
    "again or a step was taken: run model and backward once for each step, and run the model under "
    "torch.no_grad() where it is not trained"
)
"""Says that a backward reached a layer whose tensors are no longer kept."""


class FusedTrainer(ClippedSumTrainer):
    """Trains with one backward pass. The phase ``clip`` computes norms, factors and weighted sums.

    A layer may be called several times. For a linear layer or an embedding, the backward keeps
    either activations and output gradients, or per-sample gradients. For other layers, the backward
    keeps per-sample gradients. Activation checkpointing does not change which tensors the backward
    keeps.

    With SGD, Adam and AdamW, the parameters and moving averages become views of flat buffers. The
    update draws and adds the noise, so there is no phase ``noise``. A separate pass adds the noise
    before the optimizer's own step for other optimizers, and for options that `why_not` of
    `dpbench.training.noisy_updates` names. Every optimizer works if its ``step`` needs no closure.

    Under DDP, all ranks draw the same noise from the same key. So no noise is sent, and every
    rank knows the noise. Under FSDP2, each rank draws the noise for its shards, which stay outside
    flat buffers.

    Graphs are captured in the first step whose batch is not empty. If dpbench counts the operators
    of this step or of an earlier step, no graphs are captured. A later step runs eagerly if its
    examples have different shapes or dtypes, if its operators are counted, if a layer's training
    mode or another plain attribute has changed, or if Python would read other numbers from the GPU
    than in the captured step. If the model cannot be captured, or would run other operators in a
    graph, a warning says why, and all steps run eagerly. Under FSDP2, the graphs contain FSDP2's
    collectives, see `dpbench.training.parallel.leave_group`. Micro-batches under FSDP2 always run
    eagerly.

    Attributes:
        ways: how the last step computed the norms of each trained layer, by the layer's name; see
            `dpbench.training.norms`.

    Args:
        model: the workload's model.
        batch_size: number of examples in each batch.
        graphs: whether steps run as CUDA graphs on a GPU, where possible.
        kernels: whether to use dpbench's kernels, and to merge noise and update. If False, the step
            consists of PyTorch's operators, noise has a phase of its own before the optimizer's
            step, and with several ranks each rank draws the noise of its share.
        options: further arguments of `TrainerBase`.

    Raises:
        ConfigurationError: the trainer cannot clip a layer or parameter of the model.
    """

    known_ways: Collection[str] = (PRODUCTS, GRADIENT, KEPT)

    def __init__(
        self,
        model: nn.Module,
        *,
        batch_size: int,
        graphs: bool = True,
        kernels: bool = True,
        **options: Any,
    ) -> None:
        self.in_graphs, self.kernels = graphs, kernels
        self.draws_in_update = kernels
        super().__init__(model, batch_size=batch_size, **options)
        self._listening = False
        self._uses_are_checked = self._alone = False
        self.seen: dict[nn.Module, Saved] = {}
        self._given: set[int] = set()
        """Memory that a step must not change: the parameters' and buffers', which layers may pass
        on, and that of inputs that the backward did not need, such as the batch itself."""
        self.rules: dict[nn.Module, Rule[Any]] = {}
        """The rule of each layer, from the first step on."""
        self.tied: dict[Tensor, list[Rule[Any]]] = {}
        self.ways: dict[str, str] = {}
        self._update: MergedUpdate | None = None
        if kernels:
            self._merge_update()
        self.snapshot = ModelSnapshot(self.model, in_place=graphs or kernels)
        self._graphs: StepGraphs | None = None
        self._is_first = graphs
        self.layers = [*self.model.modules()]
        self.last_block: Any = None  # the last FSDP2 block that forward ran
        for layer in self.layers[1:]:
            if isinstance(layer, FSDPModule):
                layer.register_forward_hook(OwnHook(self._note_block))

    def distribute(self, model: nn.Module) -> nn.Module:
        if self.parallel != "fsdp2":
            return super().distribute(model)
        if self.sampling == "poisson":
            raise self.refusal(
                "with sampling=poisson, a rank without examples would not gather the shards that "
                "other ranks need; use parallel=ddp"
            )
        self.labels = {**self.labels, DRAWN_BY: "each rank, for its share"}
        return sharded(model, self.workload)

    # --- rules -----------------------------------------------------------------------------------

    def is_prepared(self, batch: Batch) -> bool:
        """Return True if each layer has a rule, and a batch tells nothing new about mixing."""
        return bool(self.rules) and not (self._alone and examples_in(batch) > 1)

    def prepare(self, batch: Batch) -> None:
        """Choose a rule for each layer, see `dpbench.training.plan`.

        A batch of one example does not show whether examples mix. So a later batch is checked too.
        """
        if self.rules:
            self.check_losses(batch)
            return
        self._alone = examples_in(batch) == 1
        fake = any(isinstance(each, FakeTensor) for each in pytree.tree_leaves(batch))
        with _disable_current_modes():  # so that nothing is counted
            plan = self._new_plan()
            plan.fit(self._probe(batch), fake=fake)
        self.rules, self._uses_are_checked = plan.rules, plan.knows_uses
        for layer in plan.expanded:
            layer.register_forward_pre_hook(OwnHook(partial(expand, self._expanded_to)))
        for layer, rule in self.rules.items():
            layer.register_forward_hook(OwnHook(partial(self._save, rule)), with_kwargs=True)
            for parameter in rule.trained.values():
                self.tied.setdefault(parameter, []).append(rule)
        self.tied = {p: rules for p, rules in self.tied.items() if len(rules) > 1}
        if units := [rule for rule in self.rules.values() if isinstance(rule, UnitRule)]:
            warnings.warn(cost_of(units), stacklevel=4)

    def check_losses(self, batch: Batch) -> None:
        """Check losses again: a function that is new, or a batch with more than one example."""
        self._new_plan().check_losses(self._probe(batch), self.rules)
        self._uses_are_checked, self._alone = False, self._alone and examples_in(batch) == 1

    def _new_plan(self) -> Plan:
        return Plan(
            self.model,
            kernels=self.kernels,
            one_example=self._one_example,
            any_size=self.sampling == "poisson",
        )

    def _probe(self, batch: Batch) -> Probe:
        width = 2 if self.autocast else min(each.itemsize for each in self.trained)
        return Probe(self.model, self._probed, batch, TOLERANCES[width])

    def _expanded_to(self) -> int:
        """Return for how many examples a shared input is expanded; 0 outside of training."""
        return self.examples if self._listening and torch.is_grad_enabled() else 0

    def _probed(self, batch: Batch) -> Tensor:
        # Wrappers of the trainer's own method expect the batches of its steps.
        return FusedTrainer.example_losses(self, self.model, batch)

    @contextmanager
    def _one_example(self) -> Iterator[None]:
        """In this context, the model runs with one example."""
        examples, self.examples = self.examples, 1
        try:
            with self.autocast_context():
                yield
        finally:
            self.examples = examples

    def _note_block(self, block: nn.Module, *_: object) -> None:
        self.last_block = block

    # --- noise and update ------------------------------------------------------------------------

    def _merge_update(self) -> None:
        """Let the update draw the noise if possible, and prepare the stream of random numbers."""
        self._warned: set[str] = set()
        why = why_not(self.plain_optimizer)
        if not why:
            self.labels = {**self.labels, "noise": "in the update"}
            kind = ShardedUpdate if self.parallel == "fsdp2" else MergedUpdate
            self._update = kind(self.sharing)
        if self.parallel == "ddp":
            self.labels = {**self.labels, DRAWN_BY: "every rank, all from one key"}
        device, bands = self.trained[0].device, len(self.noise_weights)
        self.stream = NoiseStream(len(self.sharing), device, self.seed, self.parallel)
        # Row i contains the weights for step i. The last row is also used in all later steps. Steps
        # before the first step get the weight 0.
        weights = torch.tensor(self.noise_weights, dtype=torch.float32, device=device)
        weights /= self.noise_weights[0]
        self._steps, self._weights = 0, weights.expand(bands, bands).tril()

    def separate_noise(self) -> None:
        """From now on, add noise before the optimizer's own step, which then gets gradients."""
        self._update = None

    @torch.no_grad()
    def noisy_step(self, reductions: Sequence[Reduction]) -> None:
        """Add noise and update the parameters, in one merged pass if possible."""
        if not self.kernels:
            super().noisy_step(reductions)
            return
        deviation = self.noise_multiplier * self.max_grad_norm * self.noise_weights[0]
        streams, weights = self.stream.next_step(), None
        if len(self.noise_weights) > 1:
            check_step(self._steps, self.noise_steps)
            weights = self._weights[min(self._steps, len(self._weights) - 1)]
        self._steps += 1
        updates: list[Callable[..., None]] | str = ""
        if self._update:
            with phase("optimizer"):
                updates = self._update.updates(
                    self.plain_optimizer, deviation, self.joint_batch_size
                )
        if isinstance(updates, str):
            if updates and updates not in self._warned:
                self._warned.add(updates)
                warnings.warn(
                    f"fused adds the noise in a pass before the update, because {updates}",
                    stacklevel=4,
                )
            with phase("noise"):
                for each in reductions:
                    noisy_mean(
                        each.wait(),
                        streams[each.number],
                        deviation,
                        1 / self.joint_batch_size,
                        weights,
                    )
            self.step_optimizer(reductions)
        else:
            with phase("optimizer"):
                for each in reductions:
                    updates[each.number](each.wait(), streams[each.number], weights=weights)

    # --- step ------------------------------------------------------------------------------------

    def train_step(self, batch: Batch) -> Tensor:
        try:
            return self.take_step(batch)
        except CannotClip as error:
            error.args = (f"{error}, or {BY_EXAMPLE}",)
            raise

    def take_step(self, batch: Batch) -> Tensor:
        """Take a step, like `train_step`. No refusal proposes another trainer."""
        self.begin_step()
        # Operators inside a graph cannot be counted. Under FSDP2, only the last micro-batch reduces
        # gradients, but every replay of a graph would run the collectives that the graph contains.
        graphs = self.in_graphs and self.trained[0].is_cuda and _get_current_dispatch_mode() is None
        graphs = graphs and not (self.parallel == "fsdp2" and self.micro_batches > 1)
        self._is_first &= graphs
        if examples_in(batch) and not self.is_prepared(batch):
            self.prepare(batch)
        parts = [part for _, part in self.parts(batch)] if graphs else []
        if parts and self._is_first:
            self._is_first = False
            self._graphs = recorded_step(self, parts[0])
        recorded = self._graphs if parts else None
        if recorded and signature(self, parts[0]) != recorded.signature:
            recorded = None
        self.replays = recorded is not None
        if recorded is None:
            return self._eager_step(batch)
        loss = recorded.replay(parts)
        if loss is None:
            self.replays = False
            self.begin_step()  # discards the sums of the replay
            if recorded.seldom_fit:
                recorded.discard()
                self._graphs = None
            return self._eager_step(batch)
        reductions, self._reductions = self._reductions, []
        self.noisy_step(reductions)
        return loss

    def _eager_step(self, batch: Batch) -> Tensor:
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
                self.reduce_all(self.clipped(last))
        self.update()
        return mean_of(losses, self.sizes)

    def mean_loss(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        """Return the mean loss. The first call raises if a parameter is used outside its layer."""
        if self._uses_are_checked:
            return super().mean_loss(model, batch)
        losses: list[Tensor] = []

        def loss() -> Tensor:
            losses.append(super(FusedTrainer, self).mean_loss(model, batch))
            return losses[0]

        own = {layer: [*rule.trained] for layer, rule in self.rules.items()}
        check_used_in_layers(used_outside(self.model, own, loss))
        self._uses_are_checked = True
        return losses[0]

    @contextmanager
    def without_parameter_gradients(self) -> Iterator[None]:
        """In this context, keep tensors for clipping, and compute no parameter gradients."""
        kept = (*self.model.parameters(), *self.model.buffers())
        self.seen, self._given = {}, {memory_of(each) for each in kept}
        self._listening = True
        for parameter in self.trained:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            self._listening = False
            for parameter in self.trained:
                parameter.requires_grad_()

    def _save(
        self, rule: Rule[Any], layer: nn.Module, given: Any, options: Any, returned: Any
    ) -> Any:
        """Keep a layer's input and, when the backward reaches the layer, the output gradient."""
        # Activation checkpointing runs the layer first without autograd, and again during backward.
        if not (self._listening and torch.is_grad_enabled()):
            return None
        if isinstance(rule, UnitRule):
            return self._save_unit(rule, given, options, returned)
        rule.check_call(given, options, returned, self.examples)
        whole = given[0] if given[0]._base is None else given[0]._base
        if whole.grad_fn is None:
            self._given.add(memory_of(given[0]))
        held, shape = [Unchanged(rule, given[0])], returned.shape
        seen = self.seen.setdefault(layer, [])

        def save_gradient(gradient: Tensor) -> None:
            if not held or self.seen.get(layer) is not seen:
                raise ConfigurationError(GIVEN_UP)
            activations = held.pop()()  # otherwise, it would stay in memory until backward ends
            gradient = gradient.detach().reshape(shape)
            if rule.rows > 1:
                by_example = (self.examples, rule.rows)
                activations = activations.unflatten(0, by_example)
                gradient = gradient.unflatten(0, by_example)
            self._save_call(rule, seen, activations, gradient)

        return heard(returned, save_gradient)

    def _save_unit(self, rule: UnitRule, given: Any, options: Any, returned: Any) -> Any:
        """Keep a unit's inputs and, when the backward reaches the unit, the output gradients."""
        leaves, structure = rule.inputs(given, options)
        rule.note_autocast()
        held = [Unchanged(rule, x) if isinstance(x, Tensor) else x for x in leaves]
        outputs, of_outputs = pytree.tree_flatten(returned)
        shapes = [each.shape if isinstance(each, Tensor) else torch.Size() for each in outputs]
        seen, gradients = self.seen.setdefault(rule.layer, []), dict[int, Tensor]()

        def save_gradient(number: int, gradient: Tensor) -> None:
            if number in gradients or self.seen.get(rule.layer) is not seen:
                raise ConfigurationError(GIVEN_UP)
            if not gradients:
                kept = [x() if isinstance(x, Unchanged) else x for x in held]
                seen.append((kept, structure, gradients))
            gradients[number] = gradient.detach().reshape(shapes[number])

        floating = [
            n for n, x in enumerate(outputs) if isinstance(x, Tensor) and x.is_floating_point()
        ]
        for number in floating:
            # If one output is computed from another, a copy has the gradient of later layers only.
            each = outputs[number].clone() if len(floating) > 1 else outputs[number]
            passed_on = heard(each, partial(save_gradient, number))
            outputs[number] = each if passed_on is None else passed_on
        return pytree.tree_unflatten(outputs, of_outputs)

    def _save_call(self, rule: Rule[Any], seen: Saved, x: Tensor, g: Tensor) -> None:
        """Keep a call's tensors. At the layer's first call, choose how to compute norms."""
        if not seen:
            alone = self.examples == self.part_size == self.micro_batches == 1
            options = {"kernel": self.kernels, "alone": alone}
            self.ways[rule.name] = rule.way(x, g, self.known_ways, **options)
            if self._tied(rule):
                self.ways[rule.name] = PRODUCTS if self._has_tied_pairs(rule) else KEPT
        rule.save(seen, x, g, self.ways[rule.name])

    def _has_tied_pairs(self, rule: Rule[Any]) -> bool:
        """Return True if `GhostNorms.add_tied` knows all layers that share the rule's weight."""
        alike = self.tied.get(rule.trained["weight"], []) if "weight" in rule.trained else []
        only_weights = all(p is each.trained["weight"] for each in alike for p in self._tied(each))
        return bool(alike) and only_weights and all(map(can_be_tied, alike))

    def _tied(self, rule: Rule[Any]) -> list[Tensor]:
        """Return the parameters that the rule's layer shares with other layers."""
        return [parameter for parameter in rule.trained.values() if parameter in self.tied]

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
            if isinstance(rule, UnitRule):
                samples = rule.samples_of_calls(seen.pop(layer, []), self.examples)
            elif layer in seen and self.ways[rule.name] == KEPT:
                samples = seen.pop(layer)[0]
            else:
                continue
            for parameter, each in samples.items():
                made[parameter] = made[parameter] + each if parameter in made else each
        for layer, calls in seen.items():
            if self.kernels and isinstance(rule := self.rules[layer], PairRule):
                rule.align(calls)
        kept = KeptGradients(made)
        norms = kept.squared_norms() + self.squared_norms(seen)
        times = multiplied_by_kernel if self.kernels else multiplied
        factors = Factors(self.factors_for(norms), times)
        for calls in seen.values():
            calls[:] = [tuple(self._cleared(t, factors) for t in call) for call in calls]
        kept.add_small(factors.exact, self.sums)
        for layer, rule in self.rules.items():
            kept.add_large(rule.trained.values(), factors.exact, self.sums)
            if layer in seen and isinstance(rule, PairRule):
                rule.weighted_sums(seen.pop(layer), factors, self.sums)
            if early:
                waiting = {p for p, rules in self.tied.items() if rules[-1] is not rule}
                yield from self.sums.finish(p for p in rule.trained.values() if p not in waiting)

    def _cleared(self, tensor: Tensor, factors: Factors) -> Tensor:
        """Return a layer's input or output gradient without the numbers of dropped examples.

        A tensor that the step itself has made is changed in place, because its backward is over.
        """
        is_own = memory_of(tensor) not in self._given
        return without_dropped(tensor, factors.exact, in_place=is_own)

    def squared_norms(self, seen: dict[nn.Module, Saved]) -> list[Tensor]:
        """Return squared norms of the per-sample gradients that are not in memory, each ``[B]``.

        Args:
            seen: pairs of activations and output gradients, by layer.
        """
        norms = GhostNorms(together=self.kernels)
        together: dict[Tensor, list[tuple[Tensor, Tensor]]] = {}
        for layer, rule in self.rules.items():
            if layer not in seen or not isinstance(rule, PairRule):
                continue
            weight = rule.trained["weight"]
            if weight in self.tied and isinstance(rule, TokenRule):
                x, g = rule.joined(seen[layer])
                together.setdefault(weight, []).append((x, g))
                if rule.trains_bias:
                    norms.add_bias(g)
            else:
                rule.add_norms(norms, seen[layer], self.ways[rule.name])
        for pairs in together.values():
            norms.add_tied(pairs)
        return norms.squared_norms()


def memory_of(tensor: Any) -> int:
    """Return a number that identifies the memory of a tensor, or of a parameter's shard."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return int(local.untyped_storage()._cdata)


class OwnHook:
    """A hook of a module. A copy of the module, also one from a file, has a hook that does nothing.

    Args:
        function: the hook; None for a hook that does nothing.
    """

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments) if self._function else None

    @property
    def acts(self) -> bool:
        """Whether the hook does anything."""
        return self._function is not None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class Unchanged:
    """An input that must not be changed in place until its gradient is needed."""

    def __init__(self, rule: Rule[Any], tensor: Tensor) -> None:
        self._rule, self._tensor = rule, tensor.detach()
        self._version = self._tensor._version

    def __call__(self) -> Tensor:
        """Return the detached tensor.

        Raises:
            ConfigurationError: the tensor was changed. Autograd checks only tensors that it has
                saved, and may not have saved this one.
        """
        if self._tensor._version != self._version:
            raise self._rule.refusal("its input was changed in place after the call")
        return self._tensor


def heard(returned: Tensor, save_gradient: Callable[[Tensor], None]) -> Tensor | None:
    """Call ``save_gradient`` with the gradient of a layer's output.

    Returns:
        The tensor that the layer must return instead, or None.
    """
    if not returned.requires_grad:  # no trained layer comes before this layer
        returned.requires_grad_()
        returned.register_hook(save_gradient)
        return ChangeableInPlace.apply(returned)  # type: ignore[no-untyped-call, no-any-return]
    whole, passed_on = heard_when_changed(returned)
    whole.register_hook(save_gradient)
    return passed_on


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
