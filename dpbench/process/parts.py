"""Whether a trainer that shall train a batch in parts does so, told by what its forward sees.

How many examples a forward sees cannot be read off one tensor: a model may fold examples and
positions, have the batch elsewhere than first, or be mapped over by ``torch.func.vmap``. Its size
can: the workload's own call for a micro-batch says how many elements the layer that is called first
is given, and the first call in each step may not be given more.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpbench.errors import ConfigurationError
from dpbench.training.base import Batch, TrainerBase
from dpbench.workloads.base import Workload, parts_of

UNTOLD = "how many examples a forward sees cannot be told"


class FirstCall(Exception):
    """A layer of a model is called, with so many elements."""

    def __init__(self, layer: nn.Module, elements: int) -> None:
        self.layer, self.elements = layer, elements


def hold_to_parts(
    trainer: TrainerBase, workload: Workload, batches: list[Batch], number: int
) -> None:
    """Let each step refuse to train more examples at once than there are in a micro-batch."""
    losses = f"{type(workload).__name__}.losses"

    def refuse(why: str) -> None:
        raise ConfigurationError(f"{type(trainer).__name__} with micro_batches={number}: {why}")

    parts = (part for batch in batches for part in parts_of(batch, number))
    calls = [first_call(workload, trainer.model, part) for part in parts]
    layer, most = calls[0].layer, max(call.elements for call in calls)
    if first_call(workload, trainer.model, batches[0]).elements <= calls[0].elements:
        refuse(f"{UNTOLD}, because the layer that {losses} calls first does not see the batch")
    seen: list[int] = []

    def see(_: nn.Module, args: Any, kwargs: Any) -> None:
        if not seen:
            seen.append(elements_in((args, kwargs)))
            if seen[0] > most:
                refuse(
                    "the first forward of a step sees more examples than a micro-batch has; train "
                    "each part by itself: for last, part in self.parts(batch)"
                )

    take_step = trainer.train_step

    def train_step(batch: Batch) -> Tensor:
        seen.clear()
        loss = take_step(batch)
        if not seen:
            refuse(f"{UNTOLD}: a step does not call {type(layer).__name__} as {losses} does")
        return loss

    layer.register_forward_pre_hook(see, with_kwargs=True, prepend=True)
    trainer.train_step = train_step  # type: ignore[method-assign]


def first_call(workload: Workload, model: nn.Module, batch: Batch) -> FirstCall:
    """The layer that a workload calls first for a batch; nothing in the model runs."""

    def stop(layer: nn.Module, args: Any, kwargs: Any) -> None:
        raise FirstCall(layer, elements_in((args, kwargs)))

    with ExitStack() as hooks:
        for layer in model.modules():
            hooks.enter_context(
                layer.register_forward_pre_hook(stop, with_kwargs=True, prepend=True)
            )
        try:
            workload.losses(model, batch)
        except FirstCall as call:
            return call.with_traceback(None)  # which holds the batch
    raise ConfigurationError(f"{UNTOLD}: {type(workload).__name__}.losses calls no layer")


def elements_in(values: Any) -> int:
    """The elements of all tensors, with the dimensions that ``torch.func`` maps over."""
    leaves = (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor))
    return sum(_unmapped(leaf).numel() for leaf in leaves)


def _unmapped(tensor: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return tensor
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
