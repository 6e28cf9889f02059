"""Computes the correct gradient of a private step, with a loop over examples and no hooks.

For a trainer, the loop computes the losses of a workload. For a script, the recorded calls of the
script's modules are repeated for one example after another. The backward pass of each repeated call
starts from a recorded gradient: the gradient of the loss with respect to the example's part of the
outputs. So the loss function need not be known. It is assumed that the loss is a mean or a sum over
examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpbench.core.errors import ConfigurationError
from dpbench.training.fused import OwnHook
from dpbench.verify.influence import tensors_in
from dpbench.workloads.base import Batch, examples_in, part_sizes, parts_of

Gradients = Mapping[str, Tensor]
"""Gradients, keyed by the names of trained parameters."""

CLIPS = ("flat", "per layer")
"""Values of a trainer's label ``clips``. ``flat`` clips an example's whole gradient to the clipping
threshold C. ``per layer`` clips the gradient of each of n parameters to C/√n."""

Threshold = float | list[float]
"""The clipping threshold C, or a threshold for each parameter. The norm of the list is C."""

NEGLIGIBLE = 1e-6
"""A gradient whose norm is below this share of the largest norm counts as rounding error. One case
is the gradient of the bias of attention keys, which is 0 without rounding."""


TOLERANCE, TOLERANCE_16_BIT = 1e-3, 0.05
"""Largest allowed relative error of a script's output or gradient, with 32 and with 16 bits."""

MOST_BYTES = 4e9
"""Largest size in bytes of all per-sample gradients of one backward pass."""


@dataclass(frozen=True)
class Examples:
    """Per-sample gradients of a batch of B examples, by parameter, each ``[B, …]`` float32.

    Means are sums divided by ``expected`` if it is set, otherwise by the number of examples.
    """

    gradients: Gradients
    expected: int | None = None

    def chosen(self, which: slice | Tensor, expected: int | None = None) -> Examples:
        """Return the gradients of the examples that ``which`` selects, with a new ``expected``."""
        chosen = {name: gradient[which] for name, gradient in self.gradients.items()}
        return Examples(chosen, expected)

    @classmethod
    def joined(cls, batches: Sequence[Examples]) -> Examples:
        """Join the gradients of several batches into one batch."""
        names = batches[0].gradients
        return cls({name: torch.cat([each.gradients[name] for each in batches]) for name in names})

    @classmethod
    def computed(
        cls, model: nn.Module, batch: Batch, losses: Callable[[nn.Module, Batch], Tensor]
    ) -> Examples:
        """Compute the gradients with one backward pass per example.

        ``losses`` returns one loss for each example of a batch.
        """
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        each = []
        for example in parts_of(batch, [1] * examples_in(batch)):
            model.zero_grad(set_to_none=True)
            losses(model, example).sum().backward()  # reentrant checkpointing needs backward()
            found = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained.values()]
            each.append([gradient.float() for gradient in found])
        model.zero_grad(set_to_none=True)
        stacked = map(torch.stack, zip(*each, strict=True))
        return cls(dict(zip(trained, stacked, strict=True)))

    @cached_property
    def norms(self) -> Tensor:
        """The norm of each per-sample gradient, ``[examples, parameters]`` float64."""
        each = [g.double().reshape(len(g), math.prod(g.shape[1:])) for g in self.gradients.values()]
        return torch.stack([torch.linalg.vector_norm(g, dim=1) for g in each], dim=1)

    @cached_property
    def sizes(self) -> dict[str, float]:
        """The norm of each parameter's mean gradient, without clipping."""
        unclipped = self.mean(torch.ones_like(self.norms))
        return {name: float(gradient.norm()) for name, gradient in unclipped.items()}

    @cached_property
    def float32_error(self) -> float:
        """The largest relative error if PyTorch computes norms of per-sample gradients in float32.

        Float32 sums of millions of squares have relative errors of about 1e-5 or more.
        """
        rounded = torch.stack(
            [g.reshape(len(g), -1).norm(2, dim=1) for g in self.gradients.values()], dim=1
        )
        return float((rounded - self.norms).abs().div(self.norms).nan_to_num(posinf=0.0).max())

    def factors(self, clips: str, threshold: Threshold, added: float = 1e-6) -> Tensor:
        """Return the clipping factors, ``[examples, parameters]``.

        ``added`` is added to the norms. Opacus adds 1e-6.
        """
        norms, limit = self.norms, self.norms.new_tensor(threshold)
        if clips == "flat":
            norms, limit = norms.norm(dim=1, keepdim=True), limit.norm()
        elif not limit.ndim:
            limit = limit / len(self.gradients) ** 0.5
        factors: Tensor = (limit / (norms + added)).clamp(max=1.0)
        return factors.expand_as(self.norms)

    def mean_factors(self, threshold: Threshold, parts: int) -> Tensor:
        """Return the factors of a known mistake: clipping the mean gradient of each micro-batch."""
        sizes = part_sizes(len(self.norms), parts)
        means = [
            torch.stack([p.mean(0).flatten() for p in g.double().split(sizes)])
            for g in self.gradients.values()
        ]
        norms = torch.cat(means, dim=1).norm(dim=1)
        of_parts: Tensor = (norms.new_tensor(threshold).norm() / norms).clamp(max=1.0)
        each = of_parts.repeat_interleave(torch.tensor(sizes, device=norms.device))
        return each[:, None].expand_as(self.norms)

    def mean(self, factors: Tensor) -> Gradients:
        """Return the mean over examples of factor × gradient."""
        return {name: self.mean_of(name, factors) for name in self.gradients}

    def mean_of(self, name: str, factors: Tensor) -> Tensor:
        """Return `mean` for one parameter."""
        of_examples = factors[:, [*self.gradients].index(name)] / (self.expected or len(factors))
        gradients = self.gradients[name]
        mean: Tensor = torch.tensordot(of_examples.to(gradients.dtype), gradients, 1)
        return mean.double()

    def candidate_means(self, clips: str, threshold: Threshold, parts: int) -> dict[str, Tensor]:
        """Return clipping factors, keyed by a description of the resulting mean.

        The correct factors come first, then the factors of common mistakes.
        """
        [other] = {*CLIPS} - {clips}
        return {
            f"the mean of gradients clipped {clips}": self.factors(clips, threshold),
            "the mean of gradients that are not clipped": torch.ones_like(self.norms),
            f"the mean of gradients clipped {other}": self.factors(other, threshold),
            "the batch's gradient, clipped as one": self.mean_factors(threshold, 1),
            "the mean of micro-batches' gradients, clipped": self.mean_factors(threshold, parts),
        }

    def diagnose(self, name: str, seen: Tensor, known: Mapping[str, Tensor], near: float) -> str:
        """Describe a wrong gradient as a multiple of a known mean.

        Return "" if the gradient is a multiple of no mean in ``known``, or equals the first mean,
        which is the correct mean.

        Args:
            name: the parameter.
            seen: the wrong gradient.
            known: the factors of known means, by description.
            near: the largest relative difference at which a gradient counts as a multiple of a
                mean.
        """
        if not seen.isfinite().all():
            return "not finite"
        if not seen.any():
            return "does not move"
        found = []
        for order, (words, factors) in enumerate(known.items()):
            gradient = self.mean_of(name, factors)
            times = float((seen * gradient).sum() / gradient.square().sum())
            if (seen - times * gradient).norm() <= near * seen.norm():
                scaled = abs(times - 1) > near
                found.append((scaled, order, f"{times:.4g} times {words}" if scaled else words))
        first = min(found, default=(True, 0, ""))
        return "" if first[:2] == (False, 0) else first[2]


def thresholds(batches: Sequence[Examples], clips: str) -> tuple[float, float, float]:
    """Return clipping thresholds that about half, all and none of the norms exceed.

    Negligible norms (see `NEGLIGIBLE`) are ignored.
    """
    norms = torch.cat([examples.norms for examples in batches])
    share = norms.shape[1] ** 0.5
    if clips == "flat":
        norms, share = norms.norm(dim=1), 1.0
    largest = float(norms.max())
    if not 0 < largest < math.inf:
        raise ConfigurationError(
            f"no gradient can be verified: the largest norm of an example's gradient is {largest}"
        )
    norms = norms[norms > NEGLIGIBLE * largest]
    return float(norms.median()) * share, float(norms.min()) / 2 * share, 10 * largest * share


def distances(seen: Gradients, wanted: Gradients, sizes: Mapping[str, float]) -> dict[str, float]:
    """Return the relative error of each parameter's gradient. An error of NaN becomes infinite.

    Errors are divided by the norm of the wanted gradient. But if no loss depends on a parameter,
    the error is divided by 1 % of the largest norm in ``sizes``.
    """
    largest = max(sizes.values())
    found = {}
    for name, gradient in wanted.items():
        if not largest:  # an empty batch: nothing may move
            found[name] = math.inf if seen[name].any() else 0.0
            continue
        depends = sizes[name] >= NEGLIGIBLE * largest
        size = float(gradient.norm()) if depends else 0.01 * largest
        far = float((seen[name] - gradient).norm()) / size
        found[name] = math.inf if math.isnan(far) else far
    return found


# --- a script's step -----------------------------------------------------------------------------


class NotChecked(Exception):
    """A step's gradient cannot be compared. The message says why."""


@dataclass(eq=False)
class Call:
    """A call of a module by the training loop, not by another module.

    Attributes:
        module: the called module.
        arguments: copies of the arguments and keyword arguments.
        outputs: the floating-point outputs that require gradients.
        autocast: whether autocast was on, and the dtype of autocast.
        backward: number of the first backward pass that reached the outputs; 0 if none did.
        gradients: gradients of the loss with respect to the outputs, by index of the output.
        sources: what the inputs depend on, see `Influences`.
        misread: a description of inputs in which an example is not one row, if any.
    """

    module: nn.Module
    arguments: Any
    outputs: list[Tensor]
    autocast: tuple[bool, torch.dtype]
    backward: int = 0
    gradients: dict[int, Tensor] = field(default_factory=dict)
    sources: int = 0
    misread: str = ""

    @property
    def dimension(self) -> int:
        """The dimension of examples in the arguments and outputs, as the per-sample hooks say."""
        return int(not all(getattr(o, "batch_first", True) for o in hook_owners(self.module)))

    @property
    def is_16_bit(self) -> bool:
        """True if autocast was on, or an output has fewer than 32 bits."""
        return self.autocast[0] or any(each.dtype.itemsize < 4 for each in self.outputs)


def examples_of_pass(
    calls: Sequence[Call], trained: Mapping[str, nn.Parameter], *, mean: bool
) -> Examples:
    """Compute the per-sample gradients of the calls that one backward pass reached.

    Args:
        calls: the calls, with their gradients.
        trained: the parameters by name.
        mean: whether the loss is a mean over examples, not a sum.

    Raises:
        NotChecked: a call cannot be repeated, outputs do not have one row for each example, or the
            gradients take too much memory.
    """
    outputs = [(c.outputs[n], c.dimension) for c in calls for n in c.gradients]
    sizes = {each.shape[dimension] for each, dimension in outputs if each.ndim > dimension}
    size = max(sizes, default=0)
    if calls and len(sizes) != 1:
        raise NotChecked("the outputs of modules do not all have one row for each example")
    if (needed := size * sum(p.numel() for p in trained.values()) * 4) > MOST_BYTES:
        raise NotChecked(
            f"gradients of {size} examples take {needed / 1e9:.0f} GB: use a smaller batch"
        )
    if not size:
        return Examples({name: p.new_zeros(0, *p.shape) for name, p in trained.items()})
    rows = []
    with _undisturbed([call.module for call in calls]):
        for i in range(size):
            outs, starts = list[Tensor](), list[Tensor]()
            for call in calls:
                made = _repeat_for_example(call, i, size)
                scale, rows_of = size if mean else 1, list[Tensor]()
                for n in made:
                    rows_of.append(call.gradients[n].narrow(call.dimension, i, 1) * scale)
                starts += _not_through_others([*made.values()], rows_of)
                outs += made.values()
            parameters = [*trained.values()]
            options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
            rows.append(torch.autograd.grad(outs, parameters, starts, **options))
    stacked = [torch.stack([g.float() for g in each]) for each in zip(*rows, strict=True)]
    return Examples(dict(zip(trained, stacked, strict=True)))


def _repeat_for_example(call: Call, i: int, size: int) -> dict[int, Tensor]:
    """Repeat a call for example ``i``, and return the outputs that have gradients, by index.

    Raise `NotChecked` if an output differs from the example's output in the batch.
    """
    dimension = call.dimension

    def of_example(tensor: Tensor) -> Tensor:
        has_rows = tensor.ndim > dimension and tensor.shape[dimension] == size
        return tensor.narrow(dimension, i, 1) if has_rows else tensor

    args, options = pytree.tree_map_only(Tensor, of_example, call.arguments)
    enabled, dtype = call.autocast
    # Call the wrapped module, because Opacus's wrapper may itself compute per-sample gradients.
    module = getattr(call.module, "_module", call.module)
    try:
        with torch.autocast(call.outputs[0].device.type, dtype, enabled=enabled):
            out = trained_outputs(module(*args, **options))
    except Exception as error:  # the script's own code can raise any error
        first_line = str(error).partition("\n")[0]
        raise NotChecked(f"a call cannot be repeated for one example: {first_line}") from error
    near = TOLERANCE_16_BIT if call.is_16_bit else TOLERANCE
    made = {n: out[n] for n in call.gradients if call.outputs[n].ndim > dimension and n < len(out)}
    for number, each in made.items():
        before = call.outputs[number].narrow(dimension, i, 1).detach()
        if each.shape != before.shape or (each - before).norm() > near * before.norm():
            raise NotChecked(
                "a module's output for one example differs from that in the batch: its layers mix "
                "examples, or are random"
            )
    return made


def trained_outputs(out: Any) -> list[Tensor]:
    """Return the different tensors in a module's output that require gradients."""
    return [*{id(each): each for each in tensors_in(out) if each.requires_grad}.values()]


def _not_through_others(outs: Sequence[Tensor], gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    """Subtract from the gradient of each output what reaches it through the other outputs.

    For example, logits are made of hidden states that the module also returns.
    """
    if len(outs) < 2:
        return gradients

    def of_outs(out: Tensor, gradient: Tensor) -> Sequence[Tensor | None]:
        return torch.autograd.grad(out, outs, gradient, retain_graph=True, allow_unused=True)

    made_of = [sum(g is not None for g in of_outs(out, torch.ones_like(out))) for out in outs]
    rest = [*gradients]
    for j in sorted(range(len(outs)), key=lambda j: -made_of[j]):
        for i, through in enumerate(of_outs(outs[j], rest[j])):
            if i != j and through is not None:
                rest[i] = rest[i] - through
    return rest


def hook_owners(module: nn.Module) -> list[Any]:
    """Return the objects whose hooks compute per-sample gradients of a module's layers."""
    hooks = [hook for layer in module.modules() for hook in layer._forward_hooks.values()]
    owners = {id(owner): owner for hook in hooks if (owner := getattr(hook, "__self__", None))}
    return [owner for owner in owners.values() if hasattr(owner, "hooks_enabled")]


@contextmanager
def _undisturbed(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Disable per-sample hooks. At the end, restore hooks, attributes and random states."""
    devices = {p.device for m in modules for p in m.parameters() if p.device.type == "cuda"}
    with ExitStack() as undo, torch.random.fork_rng(devices), torch.enable_grad():
        for module in modules:
            for owner in hook_owners(module):
                undo.callback(setattr, owner, "hooks_enabled", owner.hooks_enabled)
                owner.hooks_enabled = False
            for layer in module.modules():
                restore_later(undo, vars(layer), {id(layer._parameters)})
                for hooks in (layer._forward_hooks, layer._forward_pre_hooks):
                    for key in [key for key, hook in hooks.items() if isinstance(hook, OwnHook)]:
                        del hooks[key]
        yield


def _restore(tensor: Tensor, before: Tensor) -> None:
    if not torch.equal(tensor, before):  # otherwise, keep the version that autograd counts
        tensor.copy_(before)


def restore_later(undo: ExitStack, value: Any, seen: set[int]) -> None:
    """Restore values in place on exit: tensors with their attributes, generators, lists, dicts."""
    if id(value) in seen:
        return
    seen.add(id(value))
    inside: Any = ()
    if isinstance(value, Tensor):
        inside = [value.__dict__, value.grad if value.is_leaf else None]
        undo.callback(_restore, value.detach(), value.detach().clone())
        if value.is_leaf:
            undo.callback(setattr, value, "grad", value.grad)
    elif isinstance(value, torch.Generator):
        undo.callback(value.set_state, value.get_state())
    elif isinstance(value, list):
        undo.callback(value.__setitem__, slice(None), inside := [*value])
    elif isinstance(value, dict):
        undo.callback(value.update, copy := dict(value))
        undo.callback(value.clear)  # callbacks are called in reverse order
        inside = copy.values()
    for each in inside:
        restore_later(undo, each, seen)
