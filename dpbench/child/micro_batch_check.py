"""Checks that a trainer uses micro-batches, by counting the examples in its loss calls.

Under ``torch.func.vmap`` a loss call receives one example, but computes the losses of all mapped
examples. All mapped examples are counted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpbench.core.errors import ConfigurationError
from dpbench.training.base import Batch, TrainerBase
from dpbench.workloads.base import examples_in


def enforce_micro_batches(trainer: TrainerBase, number: int, size: int) -> None:
    """Make training steps raise if the trainer does not use micro-batches of ``size`` examples.

    A step raises if one forward computes more than ``size`` examples, if the step never calls the
    workload's loss, or if all forwards together compute too few examples. Steps that replay a CUDA
    graph call no loss, and are not checked.
    """
    seen: list[int] = []

    def refuse(why: str) -> None:
        raise ConfigurationError(f"{type(trainer).__name__} with micro_batches={number}: {why}")

    def seeing(losses: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def called(model: Callable[..., Any], batch: Batch) -> Tensor:
            if torch.is_grad_enabled():
                seen.append(examples_with_mapped(batch))
                if seen[-1] > size:
                    refuse(
                        "one forward computes more examples than a micro-batch has; train each "
                        "micro-batch separately: for last, part in self.parts(batch)"
                    )
            return losses(model, batch)

        return called

    take_step = trainer.train_step

    def train_step(batch: Batch) -> Tensor:
        seen.clear()
        loss = take_step(batch)
        if trainer.replays:
            return loss
        examples = examples_in(batch)
        if not seen and examples:
            losses = f"{type(trainer.workload).__name__}.losses"
            refuse(f"a step never calls {losses}, so the examples in a forward cannot be counted")
        if sum(seen) < examples:
            refuse("all forwards of a step together compute fewer examples than the batch has")
        return loss

    workload = trainer.workload = copy.copy(trainer.workload)  # other trainers may share it
    vars(workload).update(losses=seeing(workload.losses), loss=seeing(workload.loss))
    trainer.train_step = train_step  # type: ignore[method-assign]


def examples_with_mapped(batch: Batch) -> int:
    """Return the number of examples in a batch, multiplied by the sizes of mapped dimensions."""
    leaves = pytree.tree_leaves(batch)
    mapped: int = max(_unmapped(leaf).numel() // leaf.numel() for leaf in leaves)
    return examples_in(batch) * mapped


def _unmapped(tensor: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return tensor
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
