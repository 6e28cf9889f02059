"""Chooses the cheapest way to compute the norms of a layer's per-sample gradients.

The choice depends on shapes and dtypes, and on whether matrix products use TF32, but not on values.
An example has T tokens. A linear layer multiplies the example's activations ``[T, K]`` by a weight
of K × N numbers. There are three ways to compute the squared norm:

- ``products`` sums over products T × T of activations and of output gradients.
- ``gradient`` computes the per-sample gradient, and discards it after computing the norm. For an
  embedding, only the rows that the example looks up are computed.
- ``kept`` computes the per-sample gradient, and keeps it for the update.

Mixed ghost clipping chooses between the first two ways for each layer (Bu, Mao and Xu, "Scalable
and Efficient Training of Large Convolutional Neural Networks with Differential Privacy", 2022,
https://arxiv.org/abs/2205.10683).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

PRODUCTS, GRADIENT, KEPT = "products", "gradient", "kept"
"""Names of the three ways."""

FLOPS_PER_BYTE = {2: 206, 4: 14, 8: 14}
"""FLOPs that a GPU can compute in the time in which it moves one byte, by bytes per number. The
values are for an H200, which computes 989, 67 and 67 TFLOP/s with numbers of 2, 4 and 8 bytes, and
moves 4.8 TB/s (https://www.nvidia.com/en-us/data-center/h200/). For an A100, the values would be
156, 10 and 10."""

TF32_FLOPS_PER_BYTE = 103
"""Used instead of `FLOPS_PER_BYTE` for float32 numbers whose products use TF32. An H200 computes
494 TFLOP/s with TF32."""


class Shape(NamedTuple):
    """Sizes of a linear layer or an embedding, and of a batch.

    Attributes:
        examples: B, the number of examples.
        tokens: T, the number of tokens in an example.
        width: K, the number of input features, or the number of rows of an embedding.
        height: N, the number of output features.
        itemsize: bytes per number.
        rows: whether the layer is an embedding, whose inputs are row indices.
        tf32: whether products of float32 numbers use TF32.
    """

    examples: int
    tokens: int
    width: int
    height: int
    itemsize: int = 4
    rows: bool = False
    tf32: bool = False


def costs(shape: Shape, *, kernel: bool = False) -> dict[str, float]:
    """Return the cost of each way in bytes, without the matrix product that computes the update.

    FLOPs are counted as the number of bytes that a GPU moves in the same time.

    Args:
        shape: sizes of the layer and the batch.
        kernel: whether one kernel computes products T × T in tiles, without writing them to memory.
            The products are symmetric, so the kernel computes about half of each product.
    """
    examples, tokens, width, height, itemsize, rows, tf32 = shape
    wide, weight, read = max(itemsize, 4), width * height, 0 if rows else width
    # Norms read activations and output gradients. Later, the narrower of these two tensors is
    # multiplied by the clipping factors.
    pairs = tokens * (read + height + 2 * (min(read, height) or height)) * itemsize
    flops, squares = tokens**2 * (read + height), 4 * tokens**2 * wide
    each: dict[str, tuple[float, float]] = {
        PRODUCTS: (flops, pairs) if kernel else (2 * flops, pairs + squares),
        GRADIENT: (2 * tokens * weight, pairs + 2 * weight * wide),
        KEPT: (0, 3 * weight * itemsize),
    }
    if rows:  # sums in float32 over the looked-up rows, which are zeroed, added to and read
        each[GRADIENT] = 0, pairs + tokens * height * (2 * itemsize + 6 * wide)
    rate = TF32_FLOPS_PER_BYTE if tf32 and itemsize == 4 else FLOPS_PER_BYTE[itemsize]
    return {way: max(examples, 1) * (moved + flops / rate) for way, (flops, moved) in each.items()}


def cheapest(
    shape: Shape, ways: Collection[str], *, kernel: bool = False, alone: bool = False
) -> str:
    """Return the cheapest of ``ways``.

    The other ways must keep activations and output gradients in memory. The way ``kept`` is
    considered only for a linear layer, and only if a per-sample gradient is no larger than the
    larger of the example's activations and output gradients. If ``alone``, ``kept`` is always
    considered, even for an embedding.

    Args:
        shape: sizes of the layer and the batch.
        ways: the ways that a trainer supports.
        kernel: see `costs`.
        alone: whether the batch has a single example, whose gradient the update needs anyway.
    """
    fits = alone or (min(shape.width, shape.height) <= shape.tokens and not shape.rows)
    cost = costs(shape, kernel=kernel)
    return min((way for way in ways if way != KEPT or fits), key=cost.__getitem__)
