"""Operators for gradients, norms and sums, in Triton for a GPU and in PyTorch for a CPU.

dpbench's logical counts assume that each operator reads its arguments once and writes its results
once. The Triton kernels store no intermediate results, so these counts are close to hardware
counters. Triton is imported on first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op
from torch.utils.flop_counter import register_flop_formula

PRODUCTS_AT_A_TIME = 2**22
"""Most elements of products of tokens × tokens in memory at the same time, where `gram_norms` does
not use its Triton kernel. The products of two examples may have more."""

SMALL = 2**22
"""If two arguments have at most this many elements in total, `wide_product` computes in float64,
which takes little time."""

ROW, LARGE = 64, 2**20
"""`aligned` changes tensors of at least `LARGE` numbers, to rows of a multiple of `ROW` numbers."""

TILINGS = {torch.float32: (64, 32, 4, 4), torch.bfloat16: (128, 64, 8, 3)}
"""For each dtype, settings of the Triton kernel of `gram_norms`: rows of a tile, columns that each
iteration loads, warps, and stages of the pipeline."""

TF32_TILING = (128, 32, 8, 4)
"""Settings as in `TILINGS`, which replace the settings for float32 if products may use TF32."""


def tiling(dtype: torch.dtype, shared: int) -> tuple[int, int, int, int]:
    """Return one of `TILINGS`, with a stage more where a block may have 160 KiB of shared memory.

    Args:
        dtype: float32 or bfloat16.
        shared: how many bytes of shared memory a block may have.
    """
    tile, step, warps, stages = TILINGS[dtype]
    has_room = dtype == torch.bfloat16 and shared >= 160 * 1024
    return tile, step, warps, stages + has_room


def has_tf32() -> bool:
    """Return True if products of float32 matrices may use TF32, which rounds to 11 bits."""
    # `torch.get_float32_matmul_precision` raises if ``fp32_precision`` was set.
    return str(torch.backends.cuda.matmul.fp32_precision) == "tf32"


def is_in_tf32(dtype: torch.dtype) -> bool:
    """Return True if the update may use TF32."""
    return dtype == torch.float32 and has_tf32()


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    wide = wide_type(a, b)
    if a.shape[1] == b.shape[2] == 1:  # cuBLAS would launch one kernel for each example
        return (a.to(wide) * b.mT.to(wide)).sum(2, keepdim=True)
    if a.is_cuda and a.itemsize == 2 and wide == torch.float32:
        return torch.bmm(a, b, out_dtype=wide)
    return torch.bmm(a.to(wide), b.to(wide))


def _wide_product_fake(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(len(a), a.shape[1], b.shape[2], dtype=wide_type(a, b))


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Return the B products of ``[B, I, K]`` and ``[B, K, J]``, in float64 or float32.

    `dpbench.training.norms.product_error` bounds the error of these products.
    """
    product: Tensor = torch.ops.dpbench.wide_product.default(a, b)
    return product


# `custom_op` would make each call slower in Python, and each layer needs several calls.
torch.library.define("dpbench::wide_product", "(Tensor a, Tensor b) -> Tensor")
torch.library.impl("dpbench::wide_product", "CompositeExplicitAutograd", _wide_product)
torch.library.register_fake("dpbench::wide_product", _wide_product_fake)


@register_flop_formula(torch.ops.dpbench.wide_product)
def _(a: Any, b: Any, out_shape: Any = None) -> int:
    return int(2 * a[0] * a[1] * a[2] * b[2])


def is_small(a: Tensor, b: Tensor) -> bool:
    """Return True if ``a`` and ``b`` are so small that `wide_product` computes in float64."""
    return a.numel() + b.numel() <= SMALL


def wide_type(a: Tensor, b: Tensor) -> torch.dtype:
    """Return the dtype in which `wide_product` computes."""
    is_wide = a.dtype == torch.float64 or is_small(a, b)
    return torch.float64 if is_wide else torch.float32


def sums_type(x: Tensor, g: Tensor) -> torch.dtype:
    """Return the dtype of the sums that `gram_norms` returns for inputs x and output gradients g.

    If the batch is divided into parts, the sums of a part may be float64. They are then converted
    to this dtype.
    """
    types = {wide_type(each, each) for each in (x, g) if each.is_floating_point()}
    return torch.float64 if types == {torch.float64} else torch.float32


def aligned(tensor: Tensor) -> Tensor:
    """Append zeros to each row of a large tensor, so that rows begin at multiples of 16 bytes.

    From other addresses, kernels load single numbers, which takes several times as long. GPT-2's
    head has such rows, because it has 50257 outputs.

    Args:
        tensor: ``[…, N]``. A small tensor, or one whose rows are aligned, is returned as it is.
    """
    width = tensor.shape[-1]
    if tensor.numel() < LARGE or width * tensor.itemsize % 16 == 0:
        return tensor
    longer = tensor.new_empty(*tensor.shape[:-1], width + -width % ROW)
    longer[..., width:].zero_()
    longer[..., :width].copy_(tensor)
    return longer


@custom_op("dpbench::gram_norms", mutates_args=())
def gram_norms(activations: Sequence[Tensor], gradients: Sequence[Tensor], bias: bool) -> Tensor:
    """Return `dpbench.training.norms.GramSums` for layers of equal shape, ``[6, inputs, B]``.

    The sums are over the elements of products T × T, where T is the number of tokens. The products
    are ``x xᵀ``, or ``x xᵀ + 1`` with a bias, and ``g gᵀ``. For an embedding, x has row indices,
    and the elements of ``x xᵀ`` are 1 for equal indices and 0 for different indices. Layers with
    the same input count as one layer, whose ``g gᵀ`` is the sum of theirs.

    Args:
        activations: different inputs of layers, ``[B, T, K]``, or row indices ``[B, T]`` int64.
        gradients: output gradients, ``[B, T, N]``: first those of the layers with the first input,
            and so on. Each input belongs to the same number of layers.
        bias: whether the layers have a trained bias.
    """
    return _by_products(activations, gradients, bias)


@gram_norms.register_fake
def _(activations: Sequence[Tensor], gradients: Sequence[Tensor], bias: bool) -> Tensor:
    x, g = activations[0], gradients[0]
    return g.new_empty(6, len(activations), len(g), dtype=sums_type(x, g))


@register_flop_formula(torch.ops.dpbench.gram_norms)
def _(activations: Any, gradients: Any, bias: bool, out_shape: Any = None) -> int:
    """Count only the diagonal and the elements below it, because the products are symmetric."""
    examples, tokens, _ = gradients[0]
    widths = sum(shape[2] for shape in (*activations, *gradients) if len(shape) == 3)
    return int(examples * tokens * (tokens + 1) * widths)


def _by_products(activations: Sequence[Tensor], gradients: Sequence[Tensor], bias: bool) -> Tensor:
    made, number = [], max(2, PRODUCTS_AT_A_TIME // (2 * gradients[0].shape[1] ** 2))
    joined = len(gradients) // len(activations)
    for n, x in enumerate(activations):
        alike = (x, *gradients[n * joined : (n + 1) * joined])
        parts = zip(*(each.split(number) for each in alike), strict=True)
        made.append(torch.cat([gram_sums(*products(*part), bias) for part in parts], 1))
    return torch.stack(made, 1).to(sums_type(activations[0], gradients[0]))


def products(x: Tensor, g: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
    """Return the products of tokens × tokens of an input, as in `gram_norms` without a bias."""
    of_g = wide_product(g, g.mT)
    for each in others:
        of_g += wide_product(each, each.mT)
    if x.dim() == 2:
        return (x[:, :, None] == x[:, None, :]).to(of_g.dtype), of_g
    wide = sums_type(x, g)
    return wide_product(x, x.mT).to(wide), of_g.to(wide)


def gram_sums(of_x: Tensor, of_g: Tensor, bias: bool = False) -> Tensor:
    """Return `dpbench.training.norms.GramSums`, ``[6, B]``, from products in memory.

    The products are the results of `products`. On a GPU, one kernel reads them once.
    """
    sums: Tensor = torch.ops.dpbench.gram_sums.default(of_x, of_g, bias)
    return sums


def _gram_sums(of_x: Tensor, of_g: Tensor, bias: bool) -> Tensor:
    of_x = of_x + 1 if bias else of_x
    x, g = (each.diagonal(dim1=1, dim2=2) for each in (of_x, of_g))
    both, *squares = (
        (one * other).sum(2).sum(1) for one, other in ((of_x, of_g), (of_x, of_x), (of_g, of_g))
    )
    return torch.stack([both, (x * g).sum(1), x.sum(1), g.sum(1), *squares])


def _gram_sums_on_gpu(of_x: Tensor, of_g: Tensor, bias: bool) -> Tensor:
    examples, tokens, _ = of_x.shape
    sums = torch.zeros(6, examples, dtype=of_x.dtype, device=of_x.device)
    blocks = -(-tokens // 8)
    triton_kernels()["gram_sums"][blocks * examples,](
        of_x.contiguous(), of_g.contiguous(), sums, tokens, examples, blocks, bias, 8, 128
    )
    return sums


def _gram_sums_fake(of_x: Tensor, of_g: Tensor, bias: bool) -> Tensor:
    return of_x.new_empty(6, len(of_x))


torch.library.define("dpbench::gram_sums", "(Tensor of_x, Tensor of_g, bool bias) -> Tensor")
torch.library.impl("dpbench::gram_sums", "CompositeExplicitAutograd", _gram_sums)
torch.library.impl("dpbench::gram_sums", "CUDA", _gram_sums_on_gpu)
torch.library.register_fake("dpbench::gram_sums", _gram_sums_fake)


@register_flop_formula(torch.ops.dpbench.gram_sums)
def _(of_x: Any, of_g: Any, bias: bool, out_shape: Any = None) -> int:
    return int(6 * of_x[0] * of_x[1] * of_x[2])


@gram_norms.register_kernel("cuda")
def _(activations: Sequence[Tensor], gradients: Sequence[Tensor], bias: bool) -> Tensor:
    made = gram_norms_by_kernel if by_kernel(activations[0], gradients[0]) else _by_products
    return made(activations, gradients, bias)


def by_kernel(x: Tensor, g: Tensor) -> bool:
    """Return True if `gram_norms` uses its Triton kernel for inputs x and output gradients g."""
    return g.is_cuda and g.dtype in TILINGS and not (is_small(x, x) and is_small(g, g))


def gram_norms_by_kernel(
    activations: Sequence[Tensor], gradients: Sequence[Tensor], bias: bool
) -> Tensor:
    """Compute `gram_norms` without storing products of tokens × tokens."""
    examples, tokens, height = gradients[0].shape
    dtype, rows = gradients[0].dtype, activations[0].dim() == 2
    width = 0 if rows else activations[0].shape[2]
    in_tf32 = dtype == torch.float32 and has_tf32()
    shared = _shared_memory(gradients[0].device.index)
    most, step, warps, stages = TF32_TILING if in_tf32 else tiling(dtype, shared)
    is_half = dtype == torch.bfloat16
    tile = min(most, max(16, 1 << (tokens - 1).bit_length()))
    down = -(-tokens // tile)
    tiles, inputs = down * (down + 1) // 2, len(activations)
    tensors = [each.contiguous() for each in (*activations, *gradients)]
    aligned = all(each.data_ptr() % 16 == 0 for each in tensors)
    sums = torch.zeros(6, inputs, examples, device=gradients[0].device)
    long, whole = tokens * max(width, height) >= 2**31, width % step == height % step == 0
    precision = "tf32" if in_tf32 else "ieee" if is_half else "tf32x3"
    triton_kernels()["gram_norms"][tiles * examples, inputs](
        _addresses(tensors), sums, tokens, width, height, inputs, tiles, examples, bias, rows,
        is_half, aligned, long, len(gradients) // inputs, whole, precision, tile, step,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return sums


@cache
def _shared_memory(device: int) -> int:
    """Return how many bytes of shared memory a block may have on a GPU."""
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def _addresses(tensors: Sequence[Tensor]) -> Tensor:
    """Return the addresses of tensors on the GPU, as a tensor of int64 on the GPU.

    A kernel writes the addresses, so that a CUDA graph can contain this function.
    """
    table = torch.empty(len(tensors), dtype=torch.int64, device=tensors[0].device)
    for first in range(0, len(tensors), 16):
        some = [*tensors[first : first + 16], *[tensors[-1]] * 16][:16]
        triton_kernels()["put_addresses"][1,](table, len(tensors), first, *some)
    return table


def multiplied(tensor: Tensor, factors: Tensor) -> Tensor:
    """Multiply each example by its factor, in float32 or wider, and round the product once.

    A factor that is first rounded down to bf16 could make the product 0.8 % too small.

    Args:
        tensor: ``[B, T, N]``.
        factors: ``[B]``, float32 or wider.
    """
    return torch.mul(tensor, factors[:, None, None], out=torch.empty_like(tensor))


@custom_op("dpbench::scaled", mutates_args=())
def multiplied_by_kernel(tensor: Tensor, factors: Tensor) -> Tensor:
    """Return the result of `multiplied`. On a GPU, a Triton kernel multiplies float32 and bf16."""
    return multiplied(tensor, factors)


@multiplied_by_kernel.register_fake
def _(tensor: Tensor, factors: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


@multiplied_by_kernel.register_kernel("cuda")
def _(tensor: Tensor, factors: Tensor) -> Tensor:
    if tensor.dtype not in TILINGS:
        return multiplied(tensor, factors)
    examples = len(tensor)
    length = tensor.numel() // examples
    blocks = -(-length // 2048)
    product = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    triton_kernels()["scaled"][blocks * examples,](
        tensor.contiguous(), factors, product, length, blocks, 2048
    )
    return product


def weighted_sum(samples: Tensor, factors: Tensor, out: Tensor) -> None:
    """Write into ``out`` the sum of factor × gradient over examples.

    The sum is computed in float32 or wider, and then rounded to the dtype of ``out``.

    Args:
        samples: per-sample gradients, ``[B, n]``.
        factors: clipping factors, ``[B]``, float32 or wider. An example whose factor is 0 adds
            nothing, even if its gradient is not finite.
        out: receives the sum, ``[n]``, contiguous.
    """
    torch.ops.dpbench.weighted_sum.default(samples, factors, out=out)


def _weighted_sum(samples: Tensor, factors: Tensor, *, out: Tensor) -> None:
    wide = torch.promote_types(samples.dtype, torch.float32)
    samples = without_dropped(samples, factors, in_place=False).to(wide)
    out.copy_(torch.mv(samples.t(), factors.to(wide)))


def _weighted_sum_on_gpu(samples: Tensor, factors: Tensor, *, out: Tensor) -> None:
    if not TILINGS.keys() >= {samples.dtype, out.dtype}:
        _weighted_sum(samples, factors, out=out)
        return
    examples, length = samples.shape
    triton_kernels()["weighted_sum"][-(-length // 2048),](
        samples.contiguous(), factors, out, length, examples, 2048, num_warps=8
    )


def _weighted_sum_fake(samples: Tensor, factors: Tensor, *, out: Tensor) -> None:
    return None


# `custom_op` cannot declare that ``out`` is written, but not read.
torch.library.define(
    "dpbench::weighted_sum", "(Tensor samples, Tensor factors, *, Tensor(a!) out) -> ()"
)
torch.library.impl("dpbench::weighted_sum", "CompositeExplicitAutograd", _weighted_sum)
torch.library.impl("dpbench::weighted_sum", "CUDA", _weighted_sum_on_gpu)
torch.library.register_fake("dpbench::weighted_sum", _weighted_sum_fake)


@register_flop_formula(torch.ops.dpbench.weighted_sum)
def _(samples: Any, factors: Any, *, out: Any = None, out_shape: Any = None) -> int:
    return int(2 * samples[0] * samples[1])


@custom_op("dpbench::layer_norm_samples", mutates_args=())
def layer_norm_samples(x: Tensor, g: Tensor, eps: float) -> Tensor:
    """Return the per-sample gradients of a layer norm's weight and bias, ``[2, B, H]``.

    The gradients are computed in float32, or in float64 for float64 inputs.

    Args:
        x: the layer's input, ``[B, T, H]``.
        g: the output gradient, ``[B, T, H]``.
        eps: the layer norm's epsilon.
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
    block = 1 << (width - 1).bit_length()
    at_once = max(1, min(4, 2**13 // block))  # so that registers suffice
    triton_kernels()["layer_norm_samples"][examples, -(-tokens // 16)](
        x.contiguous(), g.contiguous(), samples[0], samples[1], tokens, width, eps, 16, at_once,
        block, num_warps=8,
    )  # fmt: skip
    return samples


def put_product(total: Tensor, a: Tensor, b: Tensor, *, adds: bool) -> None:
    """Write the matrix product ``a b`` into a tensor, or add it, with each number rounded once.

    Args:
        total: ``[I, J]``. For 16-bit factors, it is float32.
        a: ``[I, K]``.
        b: ``[K, J]``.
        adds: whether ``total`` already has numbers, to which the product is added.
    """
    if a.dtype == total.dtype:
        total.addmm_(a, b) if adds else torch.mm(a, b, out=total)
    elif adds:
        torch.ops.dpbench.add_product.default(a, b, total)
    else:
        torch.ops.dpbench.product.default(a, b, out=total)


def _product(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    if a.is_cuda and a.itemsize == 2:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def _add_product(a: Tensor, b: Tensor, total: Tensor) -> None:
    if not (a.is_cuda and a.itemsize == 2):
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
        return
    try:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    except RuntimeError:  # some versions of PyTorch accept only a 16-bit summand
        total.add_(torch.mm(a, b, out_dtype=total.dtype))


torch.library.define("dpbench::product", "(Tensor a, Tensor b, *, Tensor(a!) out) -> ()")
torch.library.define("dpbench::add_product", "(Tensor a, Tensor b, Tensor(a!) total) -> ()")
torch.library.impl("dpbench::product", "CompositeExplicitAutograd", _product)
torch.library.impl("dpbench::add_product", "CompositeExplicitAutograd", _add_product)
torch.library.register_fake("dpbench::product", lambda a, b, *, out: None)
torch.library.register_fake("dpbench::add_product", lambda a, b, total: None)


@register_flop_formula([torch.ops.dpbench.product, torch.ops.dpbench.add_product])
def _(a: Any, b: Any, *_: Any, out: Any = None, out_shape: Any = None) -> int:
    return int(2 * a[0] * a[1] * b[1])


def without_dropped(tensor: Tensor, factors: Tensor, *, in_place: bool) -> Tensor:
    """Return a tensor with zeros for each example whose clipping factor is 0.

    If the tensor may be changed in place, on a GPU only these examples are written, and nothing is
    read. Index tensors are returned unchanged.

    Args:
        tensor: ``[B, …]``.
        factors: ``[B]``.
        in_place: whether the tensor may be changed, which is possible if it is contiguous.
    """
    if not tensor.is_floating_point():
        return tensor
    if in_place and tensor.is_contiguous():
        torch.ops.dpbench.clear_dropped.default(tensor, factors)
        return tensor
    # In a CUDA graph, `torch.where` with a number would wait for the GPU.
    return tensor.masked_fill(factors.view(-1, *[1] * (tensor.dim() - 1)) == 0, 0)


def _clear_dropped(tensor: Tensor, factors: Tensor) -> None:
    tensor.index_fill_(0, (factors == 0).nonzero().squeeze(1), 0)


def _clear_dropped_on_gpu(tensor: Tensor, factors: Tensor) -> None:
    if tensor.numel():
        length = tensor.numel() // len(tensor)
        programs = min(32, -(-length // 1024))  # for each example
        triton_kernels()["clear_dropped"][programs * len(tensor),](
            tensor, factors, length, programs, 1024
        )


torch.library.define("dpbench::clear_dropped", "(Tensor(a!) tensor, Tensor factors) -> ()")
torch.library.impl("dpbench::clear_dropped", "CompositeExplicitAutograd", _clear_dropped)
torch.library.impl("dpbench::clear_dropped", "CUDA", _clear_dropped_on_gpu)
torch.library.register_fake("dpbench::clear_dropped", lambda tensor, factors: None)


@cache
def triton_kernels() -> dict[str, Any]:
    """Return all Triton kernels by name. The first call imports Triton."""
    from dpbench.training import triton_kernels

    return vars(triton_kernels)
