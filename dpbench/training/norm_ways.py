"""Which way to the norms of a layer's examples takes least, from shapes alone.

An example has T tokens; a linear layer multiplies its activations ``[T, K]`` by a weight of K × N
numbers. Its squared norm is a sum over products T × T, or is that of the gradient, which is made
only for that or kept for the update. Choosing between the first two by layer is mixed ghost
clipping (Bu, Mao and Xu, "Scalable and Efficient Training of Large Convolutional Neural Networks
with Differential Privacy", 2022, https://arxiv.org/abs/2205.10683).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

PRODUCTS, GRADIENT, KEPT = "products", "gradient", "kept"
"""The ways: products T × T; each example's gradient, made once for the norm and once in the update;
the gradient kept from the norm to the update."""

FLOPS_PER_BYTE = {2: 206, 4: 14, 8: 14}
"""Arithmetic in the time of one byte, by bytes of a number: an H200 does 989, 67 and 67 TFLOP/s and
moves 4.8 TB/s (https://www.nvidia.com/en-us/data-center/h200/); an A100 156, 10 and 10."""


class Shape(NamedTuple):
    """What a linear layer or an embedding computes for a batch."""

    examples: int
    tokens: int
    width: int
    """K, the numbers of a token that it is given; of an embedding, how many rows it has."""
    height: int
    """N, those that it returns."""
    itemsize: int = 4
    """Bytes of a number."""
    rows: bool = False
    """Whether it is an embedding, whose tokens are compared and not multiplied."""


def costs(shape: Shape, *, kernel: bool = False) -> dict[str, float]:
    """What each way takes beside the product in the update, in bytes and flops as bytes.

    Args:
        shape: the layer's.
        kernel: whether products T × T are multiplied in tiles that stay in registers, half of each
            because they are symmetric, and not written to memory.
    """
    examples, tokens, width, height, itemsize, rows = shape
    wide, weight, given = max(itemsize, 4), width * height, 0 if rows else width
    # Norms read activations and output gradients; factors multiply the narrower of these.
    pairs = tokens * (given + height + 2 * (min(given, height) or height)) * itemsize
    flops, squares = tokens**2 * (given + height), 4 * tokens**2 * wide
    each: dict[str, tuple[float, float]] = {
        PRODUCTS: (flops, pairs) if kernel else (2 * flops, pairs + squares),
        GRADIENT: (2 * tokens * weight, pairs + 2 * weight * wide),
        KEPT: (0, 3 * weight * itemsize),
    }
    if rows:  # of the gradient, only those that are named: in float32, zeroed, added to and read
        each[GRADIENT] = 0, pairs + tokens * height * (2 * itemsize + 6 * wide)
    rate = FLOPS_PER_BYTE[itemsize]
    return {way: max(examples, 1) * (moved + flops / rate) for way, (flops, moved) in each.items()}


def cheapest(
    shape: Shape, ways: Collection[str], *, kernel: bool = False, alone: bool = False
) -> str:
    """The way that takes least of those that a trainer has.

    A gradient is kept only if it takes no more memory than activations or output gradients, which
    the other ways keep instead and backward frees otherwise; or if it is that of all examples.

    Args:
        shape: the layer's.
        ways: among which to choose.
        kernel: as in `costs`.
        alone: whether the batch is one example, so that its gradient is kept anyway.
    """
    fits = alone or (min(shape.width, shape.height) <= shape.tokens and not shape.rows)
    cost = costs(shape, kernel=kernel)
    return min((way for way in ways if way != KEPT or fits), key=cost.__getitem__)
