"""Defines the interface of workloads, and functions that check and divide batches."""

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
"""A tensor, or nested tuples, lists and dictionaries of tensors. The first dimension of each tensor
is the number of examples, B."""


class Workload(ABC):
    """A model with its batches and losses.

    The parameters of a workload are the arguments of its constructor.
    """

    @abstractmethod
    def model(self) -> nn.Module:
        """Build the model. The caller sets the random seed and the default device."""

    @abstractmethod
    def batches(self, batch_size: int) -> Iterable[Batch]:
        """Return batches in CPU memory. A caller that needs more batches repeats them."""

    @abstractmethod
    def losses(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        """Return the losses of the examples in a batch, a tensor ``[B]`` for B examples.

        ``model`` is the model that the method `model` built, or a wrapper around this model.
        """

    def loss(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        """Return the mean of `losses`, a scalar. Subclasses may have a faster computation."""
        return self.losses(model, batch).mean()

    def captured_with(self) -> object:
        """Return what must be equal at the capture and each replay of a step."""
        return None

    def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
        """Return the parts of the model that are recomputed by activation checkpointing.

        FSDP2 gathers the parameters of each of these parts together.
        """
        raise ConfigurationError(
            f"activation checkpointing and parallel=fsdp2 need the blocks of the model: define "
            f"{type(self).__name__}.blocks(model), or use neither option"
        )


def examples_in(batch: Batch) -> int:
    """Return the number of examples in a batch, which is the first size of each tensor.

    Raises `ConfigurationError` if the tensors have different first sizes.
    """
    tensors = pytree.tree_leaves(batch)
    if wrong := [type(leaf).__name__ for leaf in tensors if not isinstance(leaf, Tensor)]:
        raise ConfigurationError(
            f"a batch may contain tuples, lists, dictionaries and tensors, but not {wrong[0]}: "
            f"leave it out, for example in collate_fn"
        )
    firsts: set[Any] = {tensor.shape[0] if tensor.dim() else None for tensor in tensors}
    if len(firsts) != 1 or None in firsts:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors) or "no tensors"
        raise ConfigurationError(
            f"the first dimension of each tensor in a batch must be the example; shapes: {shapes}"
        )
    examples: int = firsts.pop()
    return examples


def part_sizes(examples: int, number: int) -> list[int]:
    """Return the sizes of ``number`` parts of a batch.

    The sizes differ by at most 1, and larger sizes come first.
    """
    return [(examples + number - 1 - part) // number for part in range(number)]


def parts_of(batch: Batch, sizes: Sequence[int]) -> Iterator[Batch]:
    """Yield successive parts of a batch. ``sizes`` has the number of examples of each part."""
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
    """Yield ``number`` batches of a workload, in which ``place`` has replaced each tensor."""
    given = workload.batches(batch_size)
    batches = cycle(() if given is None else given)  # None if the method returns nothing
    for _ in range(number):
        if (batch := next(batches, None)) is None:
            raise ConfigurationError(f"{type(workload).__name__}.batches returned no batch")
        if (examples := examples_in(batch)) != batch_size:
            raise ConfigurationError(
                f"{type(workload).__name__}.batches({batch_size}) returned a batch of {examples} "
                f"examples; the first dimension of each tensor must be the example"
            )
        yield pytree.tree_map(place, batch)


def checked_losses(losses: Tensor, workload: Workload, batch: Batch) -> Tensor:
    """Return the losses; raise an error unless there is one loss for each example."""
    batch_size = examples_in(batch)
    shape = list(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
    if shape != [batch_size]:
        name = getattr(workload, "losses_name", f"{type(workload).__name__}.losses")
        raise ConfigurationError(
            f"{name} must return one loss for each example, "
            f"[{batch_size}], but returned {shape}; do not return the mean"
        )
    return losses
