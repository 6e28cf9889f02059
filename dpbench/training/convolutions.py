"""Per-sample gradients of convolutions, their norms, and sums of clipped gradients.

A convolution multiplies windows of its padded input by its weight. If the windows of an example are
the columns of a matrix U ``[K, T]``, with one column for each of T positions of the output, the
example's gradient is ``g Uᵀ``, as for a linear layer with T tokens and K input features. K is the
number of input channels times the number of elements of the kernel. U repeats most elements of the
input, so it is computed for a part of the batch, and not kept. There are two ways to compute the
norm of the gradient:

- ``kept`` computes the per-sample gradient, and keeps it for the update.
- ``products`` uses products of positions × positions, see `dpbench.training.norms`. The product of
  two windows is the sum of products of single positions. So ``Uᵀ U`` is a sum of parts of ``xᵀ x``,
  where x is the padded input ``[C, P]``, and U is not needed.

The sum of clipped gradients is then one gradient of the weight for the whole batch, from output
gradients that are multiplied by the clipping factors.

In all functions, ``layer`` is a convolution in one, two or three dimensions, which are not named in
shapes: x is its input ``[B, C, …]``, and g is the output gradient ``[B, N, …]`` in the same dtype.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpbench.training.kernels import gram_sums, has_tf32, wide_product
from dpbench.training.norms import (
    KEPT,
    PRODUCTS,
    ProductError,
    of_sums,
    of_terms,
    product_error,
    unit,
)

BYTES_AT_ONCE = 2**28
"""Most bytes of temporary matrices, unless those of a single example are larger."""

MOST_KEPT = 1.25
"""A per-sample gradient is kept if it has at most this many elements for each element of the
example's input and output gradient, which would be kept instead."""

FAST_ALGORITHMS = 8.0
"""Assumed ratio of the rounding errors of a gradient of cuDNN to those of a matrix product, without
tensor cores. cuDNN may use Winograd's algorithm or an FFT. For windows of 3 × 3, the largest error
of Winograd's algorithm was 7 times that of the direct algorithm (Lavin and Gray, "Fast Algorithms
for Convolutional Neural Networks", 2015, https://arxiv.org/abs/1509.09308). Data could exceed this
ratio."""


def cheapest_way(layer: Any, x: Tensor, g: Tensor, ways: Collection[str], *, alone: bool) -> str:
    """Choose ``kept`` or ``products``.

    To keep per-sample gradients costs little time, because the update then needs no other product.

    Args:
        layer: a convolution without groups.
        x: the input.
        g: the output gradient.
        ways: the ways that a trainer supports.
        alone: see `dpbench.training.norms.cheapest`.
    """
    fits = alone or layer.weight.numel() <= MOST_KEPT * (x[0].numel() + g[0].numel())
    return KEPT if KEPT in ways and fits else PRODUCTS


def padded(layer: Any, x: Tensor) -> Tensor:
    """Pad the input as the layer does."""
    if not any(pads := layer._reversed_padding_repeated_twice):
        return x
    return F.pad(x, pads, "constant" if layer.padding_mode == "zeros" else layer.padding_mode)


def windows(layer: Any, x: Tensor) -> tuple[list[int], list[int], list[int]]:
    """Return where windows are in a padded input, with a number for each dimension.

    Returns:
        How many windows there are, and the strides from one window to the next and from one element
        of a window to the next.
    """
    sizes = zip(x.shape[2:], layer.kernel_size, layer.dilation, layer.stride, strict=True)
    return (
        [(size - apart * (width - 1) - 1) // step + 1 for size, width, apart, step in sizes],
        [a * b for a, b in zip(x.stride()[2:], layer.stride, strict=True)],
        [a * b for a, b in zip(x.stride()[2:], layer.dilation, strict=True)],
    )


def unfolded(layer: Any, x: Tensor) -> Tensor:
    """Return the windows of a padded input as columns of matrices, ``[B, K, T]``."""
    number, between, within = windows(layer, x)
    shape, strides = x.shape[:2] + layer.kernel_size, (*x.stride()[:2], *within, *between)
    return x.as_strided((*shape, *number), strides).reshape(len(x), math.prod(shape[1:]), -1)


def samples_of_weight(layer: Any, x: Tensor, g: Tensor) -> Tensor:
    """Return the per-sample gradients of the weight, ``[B, N, C / groups, …]``."""
    shape, tokens = layer.weight.shape, g[0, 0].numel()
    width, height = math.prod(shape[1:]), shape[0] // layer.groups
    number = at_once(layer.groups * width * tokens * g.itemsize)
    made = [
        torch.bmm(
            of_some.reshape(-1, height, tokens),
            unfolded(layer, some).reshape(-1, width, tokens).mT,
        )
        for some, of_some in zip(padded(layer, x).split(number), g.split(number), strict=True)
    ]
    return torch.cat(made).view(len(g), *shape)


def at_once(bytes_of_each: int) -> int:
    """Return for how many examples temporary matrices have at most `BYTES_AT_ONCE`."""
    return max(1, BYTES_AT_ONCE // bytes_of_each)


def sums_of_products(
    layer: Any, calls: Sequence[tuple[Tensor, Tensor]], bias: bool
) -> tuple[Tensor, int, tuple[ProductError, ProductError], torch.dtype, ProductError]:
    """Return the arguments of `dpbench.training.norms.gram_bound` for one layer.

    Args:
        layer: a convolution without groups.
        calls: x and g of each call of the layer.
        bias: whether the bias is trained.
    """
    calls = [(padded(layer, x), g.flatten(2)) for x, g in calls]
    (x, g), *others = calls
    tokens, kernel = sum(g.shape[2] for _, g in calls), math.prod(layer.kernel_size)
    places = x[0, 0].numel()
    shifts = not others and places**2 < kernel * tokens**2
    size = g.itemsize * (0 if shifts else x.shape[1] * kernel * tokens)
    number = at_once(size + 4 * (2 * tokens**2 + (places if shifts else tokens) ** 2))
    made, errors = [], []
    for some in zip(*(zip(*(t.split(number) for t in c), strict=True) for c in calls), strict=True):
        rows = torch.cat([g for _, g in some], 2).mT
        if shifts:
            of_x, error = shifted_products(layer, some[0][0])
        else:
            columns = torch.cat([unfolded(layer, x) for x, _ in some], 2)
            of_x, error = wide_product(columns.mT, columns), product_error(columns.mT)
        of_g = wide_product(rows, rows.mT)
        wide = min(of_x.dtype, of_g.dtype, key=lambda dtype: dtype.itemsize)
        made.append(gram_sums(of_x.to(wide), of_g.to(wide), bias))
        errors.append((error, product_error(rows)))
    # The first part is the largest, and products of small parts may have smaller errors.
    return torch.cat(made, 1), tokens, errors[0], g.dtype, update_error(g, tokens)


def shifted_products(layer: Any, x: Tensor) -> tuple[Tensor, ProductError]:
    """Return the products of all pairs of windows, ``[B, T, T]``, and a bound of their error.

    Each element of the kernel selects T of the P positions. The products of windows are the sum,
    over elements of the kernel, of the products of selected positions. This is one order of a sum
    of K terms, in which each sum over channels is a sum over some columns of ``Uᵀ``.

    Args:
        layer: a convolution.
        x: the padded input.
    """
    x = x.contiguous()
    rows = x.flatten(2).mT
    of_positions = wide_product(rows, rows.mT)
    number, between, within = windows(layer, x)
    places, kernel = rows.shape[1], layer.kernel_size
    strides = (
        places**2,
        *(places * a for a in between),
        *between,
        *((places + 1) * a for a in within),
    )
    view = of_positions.as_strided((len(x), *number, *number, *kernel), strides)
    products = view.sum([*range(-len(kernel), 0)])
    error = product_error(rows)
    times = math.prod(kernel)
    error = error._replace(of_sums=times * (error.of_sums + unit(products.dtype)))
    return products.view(len(x), math.prod(number), -1), error


def update_error(g: Tensor, tokens: int) -> ProductError:
    """Bound the error of the gradient that `clipped_gradient` computes for one example.

    ``of_sums`` and ``of_terms`` are as returned by the functions of these names in
    `dpbench.training.norms`. In 16 bits and with TF32, cuDNN is assumed to use tensor cores
    as matrix products do, and to add in float32. With TF32, it may also truncate numbers. It has
    its own setting for TF32, so the norm may be computed from other numbers than the update.
    Otherwise, `FAST_ALGORITHMS` is assumed.
    """
    own = of_sums(g.dtype, tokens), of_terms(g.dtype, tokens)
    if g.itemsize == 2:
        return ProductError(*own)
    cudnn: Any = torch.backends.cudnn
    in_tf32 = has_tf32() or (g.is_cuda and cudnn.conv.fp32_precision == "tf32")
    if g.dtype == torch.float32 and in_tf32:
        return ProductError(3 * tokens * unit(g.dtype), 2.0**-9)
    return ProductError(*(FAST_ALGORITHMS * each for each in own))


def clipped_gradient(layer: Any, x: Tensor, g: Tensor, bias: bool) -> list[Tensor]:
    """Return the gradients of the weight and, if wanted, of the bias, summed over the batch.

    The gradients are in float32 for tensors in 16 bits, because cuDNN would round the sums. TF32
    has all bits of such numbers, so tensor cores multiply them exactly.

    Args:
        layer: the convolution.
        x: the input.
        g: the output gradients, multiplied by the clipping factors.
        bias: whether the gradient of the bias is wanted.
    """
    padding, zeros = layer.padding, [0] * len(layer.stride)
    narrow, wide = g.itemsize == 2, torch.promote_types(g.dtype, torch.float32)
    x, g = x.to(wide), g.to(wide)
    if isinstance(padding, str) or layer.padding_mode != "zeros":
        x, padding = padded(layer, x), zeros
    shape = g.new_empty(()).expand(layer.weight.shape)  # FSDP2 may have freed the weight
    with tf32(narrow):
        _, *made = torch.ops.aten.convolution_backward(
            g, x, shape, [g.shape[1]], layer.stride, padding, layer.dilation, False,
            zeros, layer.groups, [False, True, bias],
        )  # fmt: skip
    gradients: list[Tensor] = made[: 1 + bias]
    return gradients


@contextmanager
def tf32(on: bool) -> Iterator[None]:
    """In this context, let cuDNN use TF32, if ``on``."""
    cudnn: Any = torch.backends.cudnn
    settings = cudnn.conv
    before = settings.fp32_precision
    try:
        if on:
            settings.fp32_precision = "tf32"
        yield
    finally:
        settings.fp32_precision = before
