"""Checks that a trainer trains a batch in micro-batches, by the sizes that its forward sees.

How many examples a forward sees cannot be read off one tensor: a model may fold examples and
positions, have the batch elsewhere than first, or be mapped over by ``torch.func.vmap``. Its size
can: the workload's own calls for a micro-batch say how many elements the layer that is called first
is given, and no call that trains may be given more, nor all of a step together fewer than for the
batch.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree as pytree

from dpbench.errors import ConfigurationError
from dpbench.training.base import Batch, TrainerBase
from dpbench.workloads.base import Workload, parts_of

UNTOLD = "how many examples a forward sees cannot be told"


ENOUGH = 0.99
"""Examples of other lengths may be given a little less than in proportion."""


class FirstCall(Exception):
    """Ends a forward at its first layer; has the layer and the elements that it is given."""

    def __init__(self, layer: nn.Module, elements: int) -> None:
        self.layer, self.elements = layer, elements


def hold_to_parts(
    trainer: TrainerBase, workload: Workload, batches: list[Batch], number: int
) -> None:
    """Make each step raise if a forward sees more examples than a micro-batch has."""
    losses = f"{type(workload).__name__}.losses"

    def refuse(why: str) -> None:
        raise ConfigurationError(f"{type(trainer).__name__} with micro_batches={number}: {why}")

    first = partial(first_call, workload, trainer.model)
    calls = [[(part, first(part)) for part in parts_of(batch, number)] for batch in batches]
    least = min(sum(call.elements for _, call in parts) for parts in calls)
    largest, call = max(chain(*calls), key=lambda each: each[1].elements)
    whole, layer = first(batches[0]), call.layer
    if whole.elements <= call.elements:
        refuse(f"{UNTOLD}, because the layer that {losses} calls first does not see the batch")
    usual = sizes_of_calls(workload, trainer.model, largest, layer)
    seen: list[int] = []

    def see(_: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            seen.append(elements_in((args, kwargs)))
            if seen[-1] > max(usual):
                refuse(
                    "a forward sees more examples than a micro-batch has; train each part by "
                    "itself: for last, part in self.parts(batch)"
                )

    take_step = trainer.train_step

    def train_step(batch: Batch) -> Tensor:
        seen.clear()
        loss = take_step(batch)
        if not seen:
            refuse(f"{UNTOLD}: a step does not call {type(layer).__name__} as {losses} does")
        if sum(seen) < ENOUGH * least * sum(usual) / call.elements:
            refuse("the forwards of a step see fewer examples than the batch has")
        return loss

    layer.register_forward_pre_hook(see, with_kwargs=True, prepend=True)
    trainer.train_step = train_step  # type: ignore[method-assign]


def first_call(workload: Workload, model: nn.Module, batch: Batch) -> FirstCall:
    """Find the layer that a workload calls first for a batch, without running any."""

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


def sizes_of_calls(
    workload: Workload, model: nn.Module, batch: Batch, layer: nn.Module
) -> list[int]:
    """The elements that a layer is given, each time that a workload calls it for a batch."""
    sizes: list[int] = []

    def note(_: nn.Module, args: Any, kwargs: Any) -> None:
        sizes.append(elements_in((args, kwargs)))

    training = [module for module in model.modules() if module.training]
    hook = layer.register_forward_pre_hook(note, with_kwargs=True, prepend=True)
    try:
        with torch.no_grad():
            model.eval()  # no statistics are kept of this batch, and nothing is drawn
            workload.losses(model, batch)
    finally:
        hook.remove()
        for module in training:
            module.training = True
        if isinstance(model, FSDPModule):  # which keeps the root's parameters for a backward
            model.reshard()
    return sizes


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
