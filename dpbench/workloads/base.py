"""The interface of a workload, and functions on its batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpbench.core.errors import ConfigurationError

Batch: TypeAlias = Any
"""A tensor, or nested tuples, lists and dictionaries of tensors, each ``[B, …]``."""


class Workload(ABC):
    """A model, its batches and its losses. Constructor arguments are the workload's parameters."""

    @abstractmethod
    def model(self) -> nn.Module:
        """Make the model. The caller sets the seed and the default device."""

    @abstractmethod
    def batches(self, batch_size: int) -> Iterable[Batch]:
        """Batches in CPU memory. They are repeated if there are too few."""

    @abstractmethod
    def losses(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        """The loss of each example ``[B]``; ``model`` is the model or a wrapper of it."""

    def loss(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        """The mean of `losses`, a scalar. Override it if fewer operations suffice."""
        return self.losses(model, batch).mean()

    def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
        """The blocks that activation checkpointing recomputes and FSDP2 gathers one by one."""
        raise ConfigurationError(
            f"{type(self).__name__} does not say which blocks its model has. Activation "
            f"checkpointing and parallel=fsdp2 need them: define blocks(model), or use neither"
        )


def examples_in(batch: Batch) -> int:
    """The number of examples in a batch: the first dimension of each tensor."""
    tensors = pytree.tree_leaves(batch)
    if wrong := [type(leaf).__name__ for leaf in tensors if not isinstance(leaf, Tensor)]:
        raise ConfigurationError(
            f"a batch is a nest of tuples, lists, dictionaries and tensors, and has a {wrong[0]}"
        )
    firsts: set[Any] = {tensor.shape[0] if tensor.dim() else None for tensor in tensors}
    if len(firsts) != 1 or None in firsts:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors) or "none at all"
        raise ConfigurationError(
            f"the first dimension of each tensor of a batch must be the example; they are {shapes}"
        )
    examples: int = firsts.pop()
    return examples


def part_sizes(examples: int, number: int) -> list[int]:
    """The sizes of parts, which differ by at most 1, the larger ones first."""
    return [(examples + number - 1 - part) // number for part in range(number)]


def parts_of(batch: Batch, sizes: Sequence[int]) -> Iterator[Batch]:
    """Yield successive parts of a batch with these numbers of examples; a single part is itself."""
    if len(sizes) == 1:
        yield batch
        return
    start = 0
    for size in sizes:
        own = slice(start, start := start + size)
        yield pytree.tree_map(lambda tensor, own=own: tensor[own], batch)


def batches_of(
    workload: Workload, batch_size: int, number: int, place: Callable[[Tensor], Tensor]
) -> Iterator[Batch]:
    """Yield the first ``number`` batches of a workload, with ``place`` applied to each tensor."""
    given = workload.batches(batch_size)
    batches = cycle(() if given is None else given)  # a method without return
    for _ in range(number):
        if (batch := next(batches, None)) is None:
            raise ConfigurationError(f"{type(workload).__name__}.batches gave no batch")
        if (examples := examples_in(batch)) != batch_size:
            raise ConfigurationError(
                f"{type(workload).__name__}.batches({batch_size}) gave a batch of {examples} "
                f"examples; the first dimension of each tensor must be the example"
            )
        yield pytree.tree_map(place, batch)


def checked_losses(losses: Tensor, workload: Workload, batch: Batch) -> Tensor:
    """The losses, or an error unless there is one for each example of the batch."""
    batch_size = examples_in(batch)
    shape = list(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
    if shape != [batch_size]:
        raise ConfigurationError(
            f"{type(workload).__name__}.losses must give one loss for each of {batch_size} "
            f"examples, [{batch_size}], and gave {shape}; do not take their mean"
        )
    return losses
