"""Computes the per-sample gradients of a script's step.

The recorded calls of the script's modules are repeated for one example after another. The backward
pass of each repeated call starts from a recorded gradient: the gradient of the loss with respect to
the example's part of the outputs. So the loss function need not be known. It is assumed that the
loss is a mean or a sum over examples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpbench.verify.influence import tensors_in
from dpbench.verify.reference import Examples

TOLERANCE, TOLERANCE_16_BIT = 1e-3, 0.05
"""Largest allowed relative error of an output or a gradient, with 32 bits and with 16 bits."""

MOST_BYTES = 4e9
"""Largest size in bytes of all per-sample gradients of one backward pass."""


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
    if len(sizes) != 1:
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

    def part(tensor: Tensor) -> Tensor:
        has_rows = tensor.ndim > dimension and tensor.shape[dimension] == size
        return tensor.narrow(dimension, i, 1) if has_rows else tensor

    args, options = pytree.tree_map_only(Tensor, part, call.arguments)
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
                keep(undo, vars(layer), {id(layer._parameters)})
        yield


def _restore(tensor: Tensor, before: Tensor) -> None:
    if not torch.equal(tensor, before):  # otherwise, keep the version that autograd counts
        tensor.copy_(before)


def keep(undo: ExitStack, value: Any, kept: set[int]) -> None:
    """Restore values in place on exit: tensors with their attributes, generators, lists, dicts."""
    if id(value) in kept:
        return
    kept.add(id(value))
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
        keep(undo, each, kept)
