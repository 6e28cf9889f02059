"""What a tensor addresses, and how many bytes that is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, TypeAlias

from torch import Tensor

Region: TypeAlias = tuple[int, int, tuple[tuple[int, int], ...]]
"""Storage, offset in elements, and ``(size, stride)`` of each dimension that cannot be merged."""


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in an argument or a result: one, a list of them, or none."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


def region_of(tensor: Tensor) -> tuple[Region, int]:
    """What a tensor addresses, and how many bytes that is; transposing changes neither."""
    dims, elements = _layout(tuple(tensor.shape), tensor.stride())
    storage = tensor.untyped_storage()._cdata
    return (storage, int(tensor.storage_offset()), dims), elements * tensor.itemsize


@lru_cache(maxsize=8192)
def _layout(
    shape: tuple[int, ...], stride: tuple[int, ...]
) -> tuple[tuple[tuple[int, int], ...], int]:
    """An index set in a form that `view`, `expand` and `transpose` leave, and its size.

    Dimensions by falling stride, neighbours merged.
    """
    if 0 in shape:
        return (), 0
    merged: list[tuple[int, int]] = []
    dims = [(size, step) for size, step in zip(shape, stride, strict=True) if size > 1 and step]
    for size, step in sorted(dims, key=lambda dim: -dim[1]):
        if merged and merged[-1][1] == size * step:
            merged[-1] = (merged[-1][0] * size, step)
        else:
            merged.append((size, step))
    span = 1 + sum((size - 1) * step for size, step in merged)
    return tuple(merged), min(span, math.prod(size for size, _ in merged))
