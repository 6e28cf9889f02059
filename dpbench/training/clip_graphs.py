"""The clip of a step as CUDA graphs, where forward and backward cannot be: under FSDP2.

FSDP2 gathers parameters by Python, so tensors that clip reads are elsewhere in each step. They are
copied to where the graphs read: once more the memory of activations and output gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpbench.training import reductions
from dpbench.training.gradient_sums import ALIGNED
from dpbench.training.per_layer import Seen


class FixedInputs:
    """Copies of what clip reads, in the same memory in each step.

    Args:
        seen: what layers have seen in one step; that of another fits if tensors have the same
            shapes, and if the same tensors are one, as what query, key and value were given.
    """

    def __init__(self, seen: Mapping[nn.Module, Seen]) -> None:
        self._kind, places = kind_of_inputs(seen)
        self._copies = {key: tensor.clone() for key, tensor in places.items()}
        copies = iter([self._copies[key] for key in map(memory_of, tensors_in(seen))])
        self.seen: dict[nn.Module, Seen] = {
            layer: pytree.tree_map_only(Tensor, lambda _: next(copies), calls)
            for layer, calls in seen.items()
        }

    def take(self, seen: Mapping[nn.Module, Seen]) -> bool:
        """Copy what was seen in a step; nothing if it does not fit."""
        kind, places = kind_of_inputs(seen)
        if kind != self._kind:
            return False
        by_type: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        for copy, tensor in zip(self._copies.values(), places.values(), strict=True):
            by_type.setdefault(tensor.dtype, []).append((copy, tensor))
        for pairs in by_type.values():
            copies, tensors = zip(*pairs, strict=True)
            torch._foreach_copy_(copies, tensors)
        return True


def tensors_in(seen: Mapping[nn.Module, Seen]) -> Iterator[Tensor]:
    """What was kept of each layer's calls: pairs, or gradients by parameter."""
    for calls in seen.values():
        for call in calls:
            yield from call.values() if isinstance(call, Mapping) else call


def kind_of_inputs(seen: Mapping[nn.Module, Seen]) -> tuple[object, dict[object, Tensor]]:
    """What must stay as it is, and each tensor once, by `memory_of`."""
    places: dict[object, Tensor] = {}
    numbers: dict[object, int] = {}
    each: list[object] = []
    for tensor in tensors_in(seen):
        key = memory_of(tensor)
        places.setdefault(key, tensor)
        each.append((numbers.setdefault(key, len(numbers)), tensor.shape, tensor.dtype))
    return ([*map(id, seen)], each), places


def memory_of(tensor: Tensor) -> object:
    """Where a tensor is, and in which form; of tensors that are alive."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


MOST_SUMS = 16
"""Of a layer that are large, and of which each begins at a multiple of `ALIGNED`."""


class Turns:
    """Memory for two groups of sums: one is sent while the other is filled.

    Args:
        largest: elements of a layer's sums, at most.
        of_type: a tensor of the sums' type.
    """

    def __init__(self, largest: int, of_type: Tensor) -> None:
        size = largest + reductions.REDUCED_TOGETHER // of_type.itemsize + MOST_SUMS * ALIGNED
        self._memory = [torch.empty(size, dtype=of_type.dtype, device=of_type.device) for _ in "ab"]
        self._used = 0

    def swap(self) -> None:
        """Begin with the other group."""
        self._memory.reverse()
        self._used = 0

    def __call__(self, length: int) -> Tensor:
        """The next elements of this group's memory."""
        begin, self._used = self._used, self._used + length
        return self._memory[0][begin : self._used]
