"""Upper bounds of the norms of per-sample gradients, and the clipping factors made from them.

If rounding makes a norm too small, the clipped gradient exceeds the threshold. So the rounding
errors of the norm and of the update are bounded, and the bounds are added to the norm.

**The products.** The squared norm of ``G = Σ g_t x_tᵀ`` over tokens t is ``P = Σ A_st B_st`` for
``A = x xᵀ`` and ``B = g gᵀ``, whose terms may cancel: where tokens are alike, what is left can be
rounding error. A is off by a matrix of Frobenius norm ``e_A = a |A| + a' tr A`` at most: each of
its roundings is of a sum over some of the K columns of x, and such a sum is no larger than A,
because both and their difference are positive semidefinite; a and a' are those of
`product_error`. With ``e_B`` likewise, and n roundings of 2⁻²⁴ in the sum
of the products, P is off by at most (Cauchy and Schwarz)::

    e_A |B| + e_B |A| + e_A e_B + n 2⁻²⁴ |A| |B|

This is the worst case, for sums in any order (γ_n of Higham, Accuracy and Stability of Numerical
Algorithms, 2nd edition, 2002, sections 3.1 and 4.2). On ordinary data it adds little: of 1024
tokens, 2048 to 8192 wide, a ten-thousandth.

**A kept gradient** is exactly what the update multiplies. So only two errors remain: that of the
norm's own sum, which is taken in rows, and that of the update's result. See `sample_bound`.

**The update** of other gradients rounds three times:

- its result, by at most the unit roundoff u of its type. The worst case, u times the norm, is
  added;
- its sums over T tokens. A sum over some of them is no larger than ``(|A| |B|)^½``. Tensor cores
  truncate: 3 T float32 units of that bound are added, the worst case. Otherwise 2 T^½ units, at
  most T, are added: if roundings are independent and uniform, a norm is off by more with a
  probability of at most 1e-9, unless one number of a gradient is more than half of its norm (Higham
  and Mary, A New Approach to Probabilistic Rounding Error Analysis, SIAM J. Sci. Comput. 41(5),
  2019, theorem 2.4: 6.6 standard deviations, each ``(T/3)^½`` units of that number). Where the
  gradient itself was made, A and B are not known. Sums over some tokens are then assumed to be no
  larger than ``D^½`` below, as if tokens were independent;
- the numbers that it multiplies: c·g, or the gradient. In float32 and float64 the worst case is
  added: ``T^½ u D^½`` with ``D = Σ |x_t|² |g_t|²``. **In 16 bits, and with TF32,** ``u D^½`` **is
  added, which is the worst case of one token only**: independent, uniform roundings have a root
  mean square of 0.58 u D^½, mostly at a right angle to G. Data can be constructed whose roundings
  agree over tokens. ``u (λ Σ|g_t|²)^½``, for the largest eigenvalue λ of A, would cover them, and
  would lower factors by 1.5 to 2.7 % on ordinary data instead of 0.4 %. With TF32, u is 2⁻¹⁰: the
  norm is that of x and g rounded to 11 bits, and the update rounds x and c·g. Where
  `GhostLeanTrainer` takes gradients from its second backward pass, that pass has rounded c·g in
  each layer between this one and the loss. One rounding is added, not one for each: before 16
  layers in bf16, 8 wide, with tokens alike, one of 20 examples added 1.35 times the threshold.

A NaN in a gradient makes its norm, its factor and the update NaN, so it is visible. A norm too
large for its dtype is infinite, and its factor is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dpbench.training.gradient_sums import rounded_down
from dpbench.training.kernels import TILINGS, has_tf32, wide_type


class ProductError(NamedTuple):
    """How far a product ``a b`` may be off, in the Frobenius norm.

    The product is a sum of terms ``a_k b_kᵀ``. The error is at most ``of_sums`` times the largest
    norm of any partial sum, plus ``of_terms`` times the sum of the norms of all terms. If b is the
    transpose of a, these are the norm and the trace of the product, because no partial sum of
    ``a aᵀ`` is larger than the whole.
    """

    of_sums: float
    of_terms: float
    truncated: float = 0.0
    """By how much each number of a and b may be smaller than in the update, relative to itself."""


def product_error(a: Tensor, b: Tensor | None = None, *, by_kernel: bool = False) -> ProductError:
    """Bound the error of the products of `dpbench.training.kernels`, in the worst case.

    - Each of K sums is rounded to nearest, by at most 2⁻²⁴ of itself, in any order, and so is each
      term (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.1).
    - Tensor cores add several products of 16-bit numbers to an accumulator. They truncate each term
      and the sum to 24 bits of the largest of them (Fasi, Higham, Mikaitis and Pranesh, "Numerical
      behavior of NVIDIA tensor cores", PeerJ Computer Science 7, 2021,
      https://doi.org/10.7717/peerj-cs.330). Before Hopper they add 4 products at a time, without
      extra bits: 12 units of 2⁻²⁴. From Hopper on, 16 at a time, with two extra bits: 11 units.
    - With TF32 switched on, both factors are rounded to 11 bits, here and in the update. The
      products of such numbers are exact; tensor cores add them as above. PyTorch's products round
      the factors to nearest. The kernel of `gram_norms` truncates them, so that a factor may be
      2⁻¹⁰ smaller than in the update (seen on an NVIDIA H200 with torch 2.11 and Triton 3.6).
    - Without TF32 the kernel of `gram_norms` splits each float32 number into an upper and a lower
      tf32 part. It adds three tf32 products and leaves out that of the lower parts. A part has 11
      bits. Even if parts are truncated, what is left out and rounded off is less than 3 · 2⁻²⁰
      (Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores", 2022,
      https://arxiv.org/abs/2203.03341). Each step adds 8 products to an accumulator on tensor
      cores, without extra bits. The results of steps are added in float32.

    Args:
        a: ``[B, I, K]``; integers have no error.
        b: ``[B, K, J]``; by default the transpose of a.
        by_kernel: whether `gram_norms_by_kernel` computes the product.
    """
    if not a.is_floating_point():
        return ProductError(0.0, 0.0)
    length = a.shape[2]
    if wide_type(a, a if b is None else b) == torch.float64 and not by_kernel:
        return ProductError(length * 2.0**-53, 2.0**-53)
    if a.is_cuda and a.itemsize == 2:
        together, units = (16, 11) if torch.cuda.get_device_capability(a.device)[0] > 8 else (4, 12)
        return ProductError((length / together + 1) * units * 2.0**-24, units * 2.0**-24)
    if has_tf32():
        truncated = 2.0**-10 if by_kernel else 0.0
        return ProductError(3 * length * 2.0**-24, 12 * 2.0**-24, truncated)
    if by_kernel:
        step = TILINGS[torch.float32][1]
        return ProductError((length / step + 1) * 2.0**-24, (48 + 18 * step / 8) * 2.0**-24)
    return ProductError(length * 2.0**-24, 2.0**-24)


class GramSums(NamedTuple):
    """Sums over tokens s and t of the products ``A_st = x_s·x_t`` and ``B_st = g_s·g_t``."""

    squared_norm: Tensor
    """P: the sum of ``A_st B_st`` over all pairs."""
    diagonal: Tensor
    """D: the same over pairs of a token with itself."""
    x_trace: Tensor
    """``Σ |x_t|²``."""
    g_trace: Tensor
    """``Σ |g_t|²``."""
    x_squares: Tensor
    """``Σ A_st²``."""
    g_squares: Tensor
    """``Σ B_st²``."""


def clipping_factors(squared_norms: Tensor, threshold: float, divisor: int = 1) -> Tensor:
    """The clipping factors ``[B]``, at most 1, divided by ``divisor`` and rounded down.

    Args:
        squared_norms: ``[B]``, upper bounds, from the functions below.
        threshold: C.
        divisor: by which the clipped gradients are to be divided as well, such as B.
    """
    exact = (threshold / (squared_norms.double().sqrt() + 1e-6)).clamp(max=1.0) / divisor
    return rounded_down(exact, squared_norms.dtype)


def total(squared_norms: Sequence[Tensor]) -> Tensor:
    """The sum of squared norms ``[B]`` of several gradients, in float64."""
    each = torch.stack([*squared_norms])
    return (each.sum(0, dtype=torch.float64) * (1 + 4 * unit(each.dtype))).to(each.dtype)


def unit(dtype: torch.dtype) -> float:
    """The unit roundoff u: the largest relative error of rounding to nearest."""
    return torch.finfo(dtype).eps / 2


def wide_unit(dtype: torch.dtype) -> float:
    """`unit` of the dtype in which numbers of ``dtype`` are summed."""
    return unit(torch.promote_types(dtype, torch.float32))


def is_in_tf32(dtype: torch.dtype, tf32: bool | None = None) -> bool:
    """Whether the update uses TF32: as it is known to, or else as matrix products do."""
    return dtype == torch.float32 and (has_tf32() if tf32 is None else tf32)


def of_terms(dtype: torch.dtype, tokens: int, tf32: bool | None = None) -> float:
    """The update's rounding error in the numbers that it multiplies, relative to ``D^½``."""
    if dtype.itemsize == 2:
        return unit(dtype)
    return 2.0**-10 if is_in_tf32(dtype, tf32) else math.sqrt(tokens) * unit(dtype)


def of_sums(
    dtype: torch.dtype,
    tokens: int,
    summed_in: torch.dtype | None = None,
    tf32: bool | None = None,
) -> float:
    """The update's rounding error in sums over tokens, relative to the largest of them."""
    if summed_in is not None:
        return tokens * unit(summed_in)
    if dtype.itemsize == 2 or is_in_tf32(dtype, tf32):
        return 3 * tokens * wide_unit(dtype)
    return min(tokens, 2 * math.sqrt(tokens)) * wide_unit(dtype)


def gram_bound(
    parts: Sequence[Tensor],
    tokens: int,
    errors: tuple[ProductError, ProductError],
    dtype: torch.dtype,
    summed_in: torch.dtype | None = None,
    tf32: bool | None = None,
) -> Tensor:
    """Upper bounds of the squared norms of the update's gradients, ``[layers, B]``.

    Args:
        parts: the `GramSums` of each layer, ``[6, B]`` in float32 or float64.
        tokens: T.
        errors: the errors of the products ``x xᵀ`` and ``g gᵀ``.
        dtype: the dtype in which the update multiplies.
        summed_in: the dtype of the update's sums, if narrower than float32.
        tf32: whether the update may use TF32, if that is not for matrix products to say.
    """
    stacked = torch.stack([*parts], 1)
    sums = GramSums(*stacked)
    roots = stacked[4:].sqrt()
    off = [
        torch.add(error.of_sums * root, trace, alpha=error.of_terms)
        for error, root, trace in zip(errors, roots, (sums.x_trace, sums.g_trace), strict=True)
    ]
    size_x, size_g = (
        torch.add(root, error, alpha=2) for root, error in zip(roots, off, strict=True)
    )
    # Products A_st B_st are rounded again, and summed in rows or in tiles.
    number = (2 * tokens + 130 + (tokens / 64) ** 2) * unit(stacked.dtype)
    sizes = size_x * size_g
    error = torch.addcmul(number * sizes, off[0], size_g).addcmul_(off[1], size_x)
    # The sums in it are off by these parts themselves.
    higher = 1 + 4 * (number + sum(map(sum, errors)))
    truncated = sum(error.truncated for error in errors)
    squared = torch.add(sums.squared_norm, error, alpha=higher)
    rounded = sizes.sqrt_().mul_(of_sums(dtype, tokens, summed_in, tf32) * higher)
    rounded.add_(sums.diagonal.sqrt(), alpha=of_terms(dtype, tokens, tf32) * higher)
    if truncated:
        rounded.add_(squared.clamp(min=0).sqrt_(), alpha=truncated * higher)
    return with_rounding(squared, rounded, dtype)


def gradient_bound(
    parts: Sequence[Tensor], tokens: int, error: ProductError, dtype: torch.dtype
) -> Tensor:
    """`gram_bound` for per-sample gradients that exist in memory.

    Args:
        parts: for each layer ``[3, B]``: the squared norm, ``Σ |x_t| |g_t|`` over tokens, and D.
        tokens: T.
        error: the error of the gradient, which is a product.
        dtype: the dtype in which the update multiplies.
    """
    squares, lengths, diagonal = torch.stack([*parts], 1)
    off = error.of_sums + error.of_terms
    squared = torch.add(squares.sqrt(), lengths, alpha=off).square()
    rounded = diagonal.sqrt() * (of_sums(dtype, tokens) + of_terms(dtype, tokens))
    return with_rounding(squared, rounded, dtype)


def row_bound(
    parts: Sequence[Tensor], tokens: int, dtype: torch.dtype, summed_in: torch.dtype | None = None
) -> Tensor:
    """`gram_bound` for the rows of an embedding's gradient.

    If n tokens look up a row, its gradient is the sum of their output gradients g. In the
    norm and in the update this sum is off by at most n units of Σ|g|, in any order of summation.

    Args:
        parts: for each layer ``[3, B]``: the squared norm, ``(Σ (n Σ|g|)²)^½`` over rows, and D.
        tokens: T.
        dtype: the dtype in which the update multiplies.
        summed_in: the dtype of the update's sums, if narrower than float32.
    """
    squares, sums, diagonal = torch.stack([*parts], 1)
    squared = torch.add(squares.sqrt(), sums, alpha=unit(sums.dtype)).square()
    in_update = unit(summed_in) if summed_in else wide_unit(dtype)
    return with_rounding(
        squared, in_update * sums + of_terms(dtype, tokens) * diagonal.sqrt(), dtype
    )


def with_rounding(squared: Tensor, rounded: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Squared norms, raised by the rounding of the update's result and by ``rounded``."""
    of_result = 1 + unit(dtype) + 8 * wide_unit(dtype)
    norms = squared.clamp(min=0).sqrt() * of_result + rounded
    squares: Tensor = norms.square().to(torch.promote_types(dtype, torch.float32))
    return squares


def row_norms(samples: Tensor) -> Tensor:
    """Norms ``[B, N]`` of gradients ``[B, …]`` along their last dimension.

    A CPU adds squares one by one: the norm of a whole matrix would be up to 1e-3 too small.
    """
    width = samples.shape[-1] if samples.dim() > 1 else 1
    rows = samples.reshape(len(samples), math.prod(samples.shape[1:-1]), width)
    norms: Tensor = torch.linalg.vector_norm(rows, dim=2, dtype=wide_type(rows, rows))
    return norms


def sample_bound(
    norms: Sequence[Tensor], width: int, dtype: torch.dtype, by_product: bool = False
) -> Tensor:
    """Bounds ``[1, B]`` of squared norms, for gradients that the update multiplies by factors.

    Args:
        norms: `row_norms` of the gradients.
        width: the largest number of elements in a row.
        dtype: the update's dtype.
        by_product: whether it multiplies by a matrix product, which may round both to 11 bits.
    """
    rows = torch.cat([*norms], 1)
    squares = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).square_()
    squares *= 1 + (width + 8) * unit(rows.dtype)
    rounded = squares.sqrt() * 2.0**-10 if by_product and is_in_tf32(dtype) else 0.0
    return with_rounding(squares, rounded, dtype)[None]


def squared_sample_norms(samples: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Bounds ``[B]`` of the squared norms of per-sample gradients ``[B, …]``.

    Args:
        samples: the gradients that the update multiplies by clipping factors.
        dtype: the update's dtype, if it differs.
    """
    width = samples.shape[-1] if samples.dim() > 1 else 1
    return sample_bound([row_norms(samples)], width, dtype or samples.dtype)[0]
