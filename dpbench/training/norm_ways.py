"""Chooses the cheapest way to a layer's per-sample gradient norms, from shapes alone.

An example has T tokens. A linear layer multiplies its activations ``[T, K]`` by a weight of K × N
numbers. There are three ways to the squared norm: sum over products T × T; make the per-sample
gradient for the norm only; or make it and keep it for the update. Choosing between the first two by
layer is mixed ghost clipping (Bu, Mao and Xu, "Scalable and Efficient Training of Large
Convolutional Neural Networks with Differential Privacy", 2022, https://arxiv.org/abs/2205.10683).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

PRODUCTS, GRADIENT, KEPT = "products", "gradient", "kept"
"""The ways: products T × T; the per-sample gradient, made for the norm and again in the update; the
per-sample gradient, kept from the norm to the update."""

FLOPS_PER_BYTE = {2: 206, 4: 14, 8: 14}
"""FLOPs in the time of moving one byte, by bytes per number. An H200 does 989, 67 and 67 TFLOP/s
and moves 4.8 TB/s (https://www.nvidia.com/en-us/data-center/h200/). An A100 has 156, 10 and 10."""

TF32_FLOPS_PER_BYTE = 103
"""The same for TF32 products of float32 numbers: an H200 does 494 TFLOP/s."""


class Shape(NamedTuple):
    """The sizes of a linear layer's or an embedding's work on a batch."""

    examples: int
    tokens: int
    width: int
    """K, the input features; of an embedding, its rows."""
    height: int
    """N, the output features."""
    itemsize: int = 4
    """Bytes per number."""
    rows: bool = False
    """Whether it is an embedding: row indices are compared, not multiplied."""
    tf32: bool = False
    """Whether products of float32 numbers use TF32."""


def costs(shape: Shape, *, kernel: bool = False) -> dict[str, float]:
    """The cost of each way, beyond the product in the update: bytes, plus FLOPs as bytes.

    Args:
        shape: the layer's.
        kernel: whether a kernel makes products T × T in tiles that stay in registers and are not
            written to memory. It makes only half of each, because they are symmetric.
    """
    examples, tokens, width, height, itemsize, rows, tf32 = shape
    wide, weight, given = max(itemsize, 4), width * height, 0 if rows else width
    # Norms read activations and output gradients; the factors scale the narrower of the two.
    pairs = tokens * (given + height + 2 * (min(given, height) or height)) * itemsize
    flops, squares = tokens**2 * (given + height), 4 * tokens**2 * wide
    each: dict[str, tuple[float, float]] = {
        PRODUCTS: (flops, pairs) if kernel else (2 * flops, pairs + squares),
        GRADIENT: (2 * tokens * weight, pairs + 2 * weight * wide),
        KEPT: (0, 3 * weight * itemsize),
    }
    if rows:  # only rows looked up have a gradient: float32, zeroed, added to and read
        each[GRADIENT] = 0, pairs + tokens * height * (2 * itemsize + 6 * wide)
    rate = TF32_FLOPS_PER_BYTE if tf32 and itemsize == 4 else FLOPS_PER_BYTE[itemsize]
    return {way: max(examples, 1) * (moved + flops / rate) for way, (flops, moved) in each.items()}


def cheapest(
    shape: Shape, ways: Collection[str], *, kernel: bool = False, alone: bool = False
) -> str:
    """The cheapest of ``ways``.

    Per-sample gradients are kept only if they take no more memory than activations or output
    gradients, which the other ways must keep instead; or if the batch is one example.

    Args:
        shape: the layer's.
        ways: the ways that a trainer has.
        kernel: as in `costs`.
        alone: whether the batch is one example, so that its gradient is kept anyway.
    """
    fits = alone or (min(shape.width, shape.height) <= shape.tokens and not shape.rows)
    cost = costs(shape, kernel=kernel)
    return min((way for way in ways if way != KEPT or fits), key=cost.__getitem__)
