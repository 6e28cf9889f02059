"""A rule for parameters that no other rule can clip: it runs their module again, by example.

The module's inputs and its output gradients are kept. To clip, the module runs forward and backward
once more for each example, for all examples at once by ``torch.func.vmap`` if the module permits
it. So these parameters cost about as much as their module's forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils import _pytree as pytree

from dpbench.training.per_layer import Rule
from dpbench.training.refusals import CannotClip, first_of

SHARED = 0
"""Rows for each example in a tensor that all examples share."""

VMAP_ERRORS = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError)
"""Classes of errors with which a module's code may refuse ``vmap``."""


class UnitRule(Rule[nn.Module]):
    """Computes per-sample gradients of some parameters of a module.

    Args:
        unit: the module. Its other parameters are constants here.
        name: the module's name in the model.
        parameters: the parameters, by their names in the module.
        rows: for each tensor among the module's arguments, in the order of ``pytree``, how many
            rows of the first dimension belong to each example; `SHARED` if examples share it.
        one_example: makes a context in which the model runs with a single example.
    """

    def __init__(
        self,
        unit: nn.Module,
        name: str,
        parameters: Mapping[str, nn.Parameter],
        rows: Sequence[int],
        one_example: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self.layer, self.name, self.input_rows = unit, name, rows
        self.trained, self.trains_bias = dict(parameters), False
        self._one_example = one_example
        self._autocast: AbstractContextManager[object] = nullcontext()
        self.by_vmap = True
        """Whether all examples run at once."""

    def refusal(self, why: str) -> CannotClip:
        own = f"its parameter {first_of([*self.trained])} can be clipped in no smaller module, and "
        return super().refusal(why if self.name else own + why)

    def inputs(self, given: Any, options: Any) -> tuple[list[Any], Any]:
        """Return the detached arguments of a call, as the leaves and structure of a tree."""
        leaves, structure = pytree.tree_flatten((given, options))
        tensors = sum(isinstance(leaf, Tensor) for leaf in leaves)
        if tensors != len(self.input_rows):
            first = len(self.input_rows)
            raise self.refusal(f"it was called with {first} tensors, and now with {tensors}")
        return [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure

    def note_autocast(self) -> None:
        """Let the module run again with the autocast that is on now, perhaps by the losses."""
        kind = next(iter(self.trained.values())).device.type
        dtype, on = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        self._autocast = torch.autocast(kind, dtype=dtype, enabled=on)

    def samples_of_calls(self, calls: Sequence[Call], examples: int) -> dict[Tensor, Tensor]:
        """Return the sums of the per-sample gradients ``[B, …]`` over calls, by parameter.

        Raises:
            ConfigurationError: the module draws random numbers, which would not be those of the
                forward pass.
        """
        total: dict[Tensor, Tensor] = {}
        captures = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        before = [] if captures else random_states(self.layer)
        with self._one_example(), self._autocast, torch.enable_grad():
            for call in calls:
                for parameter, each in self._samples_of(call, examples).items():
                    total[parameter] = total[parameter] + each if parameter in total else each
        if before and not all(map(torch.equal, before, random_states(self.layer))):
            raise self.refusal(
                "it draws random numbers, and would draw others when it runs again (set its "
                "dropout to 0)"
            )
        return total

    def _samples_of(self, call: Call, examples: int) -> dict[Tensor, Tensor]:
        leaves, structure, gradients = call
        tensors = [number for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        rows = dict(zip(tensors, self.input_rows, strict=True))
        own = [n for n in tensors if rows[n]]
        by_example = [leaves[n].unflatten(0, (examples, rows[n])) for n in own]
        outputs = [
            gradient.unflatten(0, (examples, len(gradient) // examples))
            for gradient in gradients.values()
        ]

        def weighted(values: dict[str, Tensor], inputs: list[Tensor], outer: list[Tensor]) -> Any:
            filled = [*leaves]
            for number, tensor in zip(own, inputs, strict=True):
                filled[number] = tensor
            given, options = pytree.tree_unflatten(filled, structure)
            returned = pytree.tree_leaves(functional_call(self.layer, values, given, options))
            chosen = [returned[number] for number in gradients]
            return sum((y * g).sum() for y, g in zip(chosen, outer, strict=True))

        values = {name: p.detach() for name, p in self.trained.items()}
        if self.by_vmap:
            try:
                made = vmap(grad(weighted), (None, 0, 0), randomness="error")(
                    values, by_example, outputs
                )
                return {self.trained[name]: each.detach() for name, each in made.items()}
            except VMAP_ERRORS:
                self.by_vmap = False
        each_example = [
            grad(weighted)(values, [x[n] for x in by_example], [g[n] for g in outputs])
            for n in range(examples)
        ]
        return {
            p: torch.stack([made[name].detach() for made in each_example])
            for name, p in self.trained.items()
        }

    def samples(self, x: Tensor, g: Tensor) -> dict[Tensor, Tensor]:
        raise NotImplementedError  # see `samples_of_calls`


def random_states(module: nn.Module) -> list[Tensor]:
    """Return the states of the random number generators of the CPU and of the module's GPUs."""
    devices = {p.device for p in module.parameters() if p.is_cuda}
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]


def cost_of(units: Sequence[UnitRule]) -> str:
    """Return what a user should know about the cost of these rules."""
    first, *others = units
    names = [*first.trained]
    which = " and ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
    more = first_of([each.name or "the whole model" for each in others])
    return (
        f"to clip {which}, fused runs {first.which} forward and backward once more "
        f"in each step{more and f', and for other parameters {more}'}"
    )


Call = tuple[list[Any], Any, dict[int, Tensor]]
"""Leaves and structure of a call's arguments, and the gradients of its outputs, by the index of the
leaf among the outputs."""
