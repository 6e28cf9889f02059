"""Operators of which each is one pass over what it reads: in Triton on a GPU, in PyTorch elsewhere.

What they read and write is what their arguments say, so they are counted without hardware as they
run on it. Triton is loaded when a GPU first needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op
from torch.utils.flop_counter import register_flop_formula

from dpbench.training import gradient_sums

EXAMPLES_AT_A_TIME = 2
"""Of these PyTorch makes the products T × T, where there is no kernel for the type."""

TILINGS = {torch.float32: (64, 32, 4, 4), torch.bfloat16: (128, 64, 8, 3)}
"""Of the kernel by type: rows of a tile, numbers of a row at a time, warps, stages of loading."""


@custom_op("dpbench::gram_norms", mutates_args=())
def gram_norms(activations: Sequence[Tensor], gradients: Sequence[Tensor], bias: bool) -> Tensor:
    """Squared norms of the gradients of layers of one shape, ``[B]``, summed over the layers.

    Of a layer and example it is the sum of ``(x xᵀ) · (g gᵀ)``, with a bias of ``(x xᵀ + 1) · …``;
    of an embedding, whose ``x`` are numbers of rows, ``x xᵀ`` is where two are the same. Products
    and sums are in float32 at least, but of bf16 as exact as the GPU's tensor cores add
    (``bench/gram_norms.py`` prints how exact that is).

    Args:
        activations: of each layer, ``[B, T, K]``, or ``[B, T]`` int64.
        gradients: of what each returned, ``[B, T, N]``.
        bias: whether the layers have one.
    """
    return _by_products(activations, gradients, bias)


@gram_norms.register_fake
def _(activations: Sequence[Tensor], gradients: Sequence[Tensor], bias: bool) -> Tensor:
    return gradients[0].new_empty(len(gradients[0]), dtype=torch.float32)


@register_flop_formula(torch.ops.dpbench.gram_norms)
def _(activations: Any, gradients: Any, bias: bool, out_shape: Any = None) -> int:
    """Of both products a half and the diagonal, because they are symmetric."""
    examples, tokens, _ = gradients[0]
    widths = sum(shape[2] for shape in (*activations, *gradients) if len(shape) == 3)
    return int(examples * tokens * (tokens + 1) * widths)


def _by_products(activations: Sequence[Tensor], gradients: Sequence[Tensor], bias: bool) -> Tensor:
    total = torch.zeros(len(gradients[0]), device=gradients[0].device)
    for x, g in zip(activations, gradients, strict=True):
        for first in range(0, len(g), EXAMPLES_AT_A_TIME):
            some = slice(first, first + EXAMPLES_AT_A_TIME)
            of_x = x[some, :, None] == x[some, None, :] if x.dim() == 2 else _gram(x[some])
            of_g = _gram(g[some])
            if bias:
                of_x += 1
            total[some] += (of_x * of_g).sum((1, 2))
    return total


def _gram(x: Tensor) -> Tensor:
    if x.is_cuda and x.itemsize == 2:
        return torch.bmm(x, x.mT, out_dtype=torch.float32)
    x = x.float() if x.itemsize == 2 else x
    return torch.bmm(x, x.mT)


@gram_norms.register_kernel("cuda")
def _(activations: Sequence[Tensor], gradients: Sequence[Tensor], bias: bool) -> Tensor:
    examples, tokens, height = gradients[0].shape
    dtype, rows = gradients[0].dtype, activations[0].dim() == 2
    if dtype not in TILINGS:
        return _by_products(activations, gradients, bias)
    width = 0 if rows else activations[0].shape[2]
    most, step, warps, stages = TILINGS[dtype]
    tile = min(most, max(16, 1 << (tokens - 1).bit_length()))
    down = -(-tokens // tile)
    tiles = down * (down + 1) // 2
    pairs = [(x.contiguous(), g.contiguous()) for x, g in zip(activations, gradients, strict=True)]
    aligned = all(tensor.data_ptr() % 16 == 0 for pair in pairs for tensor in pair)
    total = torch.zeros(examples, device=gradients[0].device)
    addresses = _addresses(pairs)
    long = tokens * max(width, height) >= 2**31
    # In float32 a product of two numbers is three of tf32, of their upper and lower parts, without
    # that of the lower parts. A part has 11 bits, so what is left out and rounded off is less than
    # 3 · 2⁻²⁰ |a b|, were parts cut off rather than rounded (Ootomo and Yokota, "Recovering single
    # precision accuracy from Tensor Cores", 2022, https://arxiv.org/abs/2203.03341).
    is_half = dtype == torch.bfloat16
    _kernels()["gram_norms"][tiles * examples, len(pairs)](
        addresses, total, tokens, width, height, len(pairs), tiles, bias, rows, is_half, aligned,
        long, "ieee" if is_half else "tf32x3", tile, step, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return total


def _addresses(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Where tensors lie, ``[2, layers]`` int64, written by the GPU: a graph can record that."""
    table = torch.empty(2, len(pairs), dtype=torch.int64, device=pairs[0][0].device)
    for first in range(0, len(pairs), 8):
        some = [*pairs[first : first + 8], *[pairs[-1]] * 8][:8]
        _kernels()["put_addresses"][1,](
            table, len(pairs), first, *(tensor for pair in some for tensor in pair)
        )
    return table


@custom_op("dpbench::scaled", mutates_args=())
def scaled(tensor: Tensor, factors: Tensor) -> Tensor:
    """`dpbench.training.gradient_sums.scaled`, as a kernel that reads several numbers at a time."""
    return gradient_sums.scaled(tensor, factors)


@scaled.register_fake
def _(tensor: Tensor, factors: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


@scaled.register_kernel("cuda")
def _(tensor: Tensor, factors: Tensor) -> Tensor:
    if tensor.dtype not in TILINGS:
        return gradient_sums.scaled(tensor, factors)
    examples = len(tensor)
    length = tensor.numel() // examples
    blocks = -(-length // 2048)
    product = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    _kernels()["scaled"][blocks * examples,](
        tensor.contiguous(), factors, product, length, blocks, 2048
    )
    return product


@custom_op("dpbench::layer_norm_samples", mutates_args=())
def layer_norm_samples(x: Tensor, g: Tensor, eps: float) -> Tensor:
    """Each example's gradients of a layer norm's weight and bias, ``[2, B, H]``.

    They are computed in float32, of float64 in that.

    Args:
        x: what it was given, ``[B, T, H]``.
        g: the gradient of what it returned, ``[B, T, H]``.
        eps: its.
    """
    return _layer_norm_samples(x, g, eps)


def _layer_norm_samples(x: Tensor, g: Tensor, eps: float) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    normal = torch.nn.functional.layer_norm(x.to(wide), x.shape[-1:], eps=eps)
    return torch.stack([(normal * g).sum(1), g.to(wide).sum(1)])


@layer_norm_samples.register_fake
def _(x: Tensor, g: Tensor, eps: float) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(2, len(x), x.shape[-1], dtype=wide)


@layer_norm_samples.register_kernel("cuda")
def _(x: Tensor, g: Tensor, eps: float) -> Tensor:
    if x.dtype == torch.float64:  # the kernel computes in float32
        return _layer_norm_samples(x, g, eps)
    examples, tokens, width = x.shape
    samples = torch.zeros(2, examples, width, device=x.device)
    _kernels()["layer_norm_samples"][examples, -(-tokens // 16)](
        x.contiguous(), g.contiguous(), samples[0], samples[1], tokens, width, eps, 16,
        1 << (width - 1).bit_length(), num_warps=8,
    )  # fmt: skip
    return samples


@custom_op("dpbench::noisy_descent", mutates_args=("parameters",))
def noisy_descent(
    parameters: Tensor, gradient: Tensor, seed: Tensor, deviation: float, rate: float
) -> None:
    """Take ``rate × (gradient + deviation × z)`` off the parameters, for normal z drawn here.

    Noise and update together read gradient and parameters once and write these once: 3 P bytes.

    Args:
        parameters: flat, P elements.
        gradient: as long.
        seed: int64, of Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011);
            another for each step.
        deviation: of the noise.
        rate: of the step.
    """
    _noisy_descent(parameters, gradient, seed, deviation, rate)


def _noisy_descent(
    parameters: Tensor, gradient: Tensor, seed: Tensor, deviation: float, rate: float
) -> None:
    device, wide = parameters.device, torch.promote_types(parameters.dtype, torch.float32)
    generator = torch.Generator(device).manual_seed(int(seed))
    noise = torch.randn(parameters.shape, generator=generator, device=device, dtype=wide)
    parameters.sub_((gradient + deviation * noise) * rate)


@noisy_descent.register_fake
def _(parameters: Tensor, gradient: Tensor, seed: Tensor, deviation: float, rate: float) -> None:
    return None


@noisy_descent.register_kernel("cuda")
def _(parameters: Tensor, gradient: Tensor, seed: Tensor, deviation: float, rate: float) -> None:
    if parameters.dtype == torch.float64:  # the kernel computes in float32
        _noisy_descent(parameters, gradient, seed, deviation, rate)
        return
    length = parameters.numel()
    _kernels()["noisy_descent"][-(-length // 4096),](
        parameters, gradient, length, seed, deviation, rate, 1024, num_warps=8
    )


@cache
def _kernels() -> dict[str, Any]:
    from dpbench.training import triton_kernels

    return vars(triton_kernels)
