"""Upper bounds of the norms of per-sample gradients, and clipping factors from these bounds.

If rounding makes a norm too small, the clipped gradient can exceed the threshold. So each norm is
increased by bounds of two rounding errors: the error of the norm, and the error of the update. Most
bounds hold in the worst case. The bounds that data could exceed are named below.

**Norms from products T × T**, where T is the number of tokens. An example has activations x and
output gradients g, each with one row per token. The example's gradient is ``G = Σ g_t x_tᵀ``,
summed over tokens t. The squared norm of G is ``P = Σ A_st B_st``, summed over pairs of tokens s
and t, with ``A = x xᵀ`` and ``B = g gᵀ``. If the terms of P cancel, the computed P may consist of
rounding errors only. Here ``|A|`` is the Frobenius norm of A, and ``tr A`` is its trace. The error
of the computed A is a matrix whose Frobenius norm is at most ``e_A = a |A| + a' tr A``, where
`product_error` returns a and a'. This holds because each rounding error is relative to a sum over
some columns of x. The norm of such a sum is at most ``|A|``, because the sum and A minus the sum
are positive semidefinite. In the same way, the error of B has a bound ``e_B``. In P, each term
takes part in at most n roundings. The relative error of one rounding is at most u', which is
``2⁻²⁴`` in float32 and ``2⁻⁵³`` in float64. By the inequality of Cauchy and Schwarz, the error of P
is at most::

    e_A |B| + e_B |A| + e_A e_B + n u' |A| |B|

This bound is the worst case, for sums in any order (γ_n of Higham, Accuracy and Stability of
Numerical Algorithms, 2nd edition, 2002, sections 3.1 and 4.2).

**Norms of kept gradients.** The update multiplies exactly the gradient whose norm was computed. So
only two errors are left. The first is the error of the norm, which is computed row by row. The
second is the rounding of the update's result. If the update is a matrix product in TF32, there is a
third error, because TF32 rounds the gradient and the clipping factor. See `sample_bound`.

**If gradients are not kept**, the update computes them again, and rounds three kinds of numbers:

- The update's result is rounded to its dtype. The worst case is added, which is u times the norm,
  where u is the unit roundoff of this dtype.
- Sums over T tokens are rounded. The norm of a sum over some tokens is at most ``(|A| |B|)^½``. The
  added error is this norm times a number of unit roundoffs. In 16 bits and with TF32, tensor cores
  may truncate sums, so 3 T units of float32 are added, which is the worst case. If the update sums
  in 16 bits, T units of the 16-bit dtype are added. In all other cases, 2 T^½ units are added, but
  at most T units. Data could exceed 2 T^½ units. If roundings are independent and uniform, this is
  very unlikely, unless one number of a gradient is more than half of the gradient's norm (Higham
  and Mary, A New Approach to Probabilistic Rounding Error Analysis, SIAM J. Sci. Comput. 41(5),
  2019, theorem 2.4). If the norm was computed from the gradient, A and B are unknown. The norm of a
  sum over some tokens is then assumed to be at most ``D^½``, with D as below, as if tokens were
  independent.
- The numbers that the update multiplies are rounded, such as c·g with the clipping factor c. In
  float32 and float64, the worst case is added: ``T^½ u D^½`` with ``D = Σ |x_t|² |g_t|²``. **In 16
  bits and with TF32,** ``u D^½`` **is added, which is the worst case for one token only.** If an
  example has several tokens, data can be constructed whose roundings have the same direction for
  all tokens, and exceed this bound. The bound ``u (λ Σ|g_t|²)^½``, with the largest eigenvalue λ of
  A, would hold for such data, but would lower clipping factors more on ordinary data. With TF32, u
  is 2⁻¹⁰, because the norm is computed from x and g rounded to 11 bits, and the update rounds x and
  c·g. In the second backward pass of `GhostLeanTrainer`, each layer between the loss and the
  clipped layer rounds c·g again, but the bound includes only one of these roundings.

A NaN in a gradient is not hidden: the norm, the clipping factor and the update also become NaN. If
a norm is too large for its dtype, the norm is infinite, and the clipping factor is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dpbench.training.gradient_sums import rounded_down
from dpbench.training.kernels import TILINGS, has_tf32, is_in_tf32, wide_type


class ProductError(NamedTuple):
    """A bound of the error of a matrix product ``a b``, in the Frobenius norm.

    The product is a sum of terms, each of which is a column of a times a row of b. The error is at
    most ``of_sums`` times the largest norm of a partial sum, plus ``of_terms`` times the sum of the
    norms of all terms. If b is the transpose of a, no partial sum has a larger norm than the
    product, and the sum of the norms of all terms is the trace of the product.
    """

    of_sums: float
    of_terms: float
    truncated: float = 0.0
    """Largest relative amount by which the elements of a and b may be smaller here than in the
    update."""


def product_error(a: Tensor, b: Tensor | None = None, *, by_kernel: bool = False) -> ProductError:
    """Bound the error of a product that `dpbench.training.kernels` computes, in the worst case.

    - Without tensor cores, each term and each partial sum is rounded to nearest. The bound holds
      for every order of summation (Higham, Accuracy and Stability of Numerical Algorithms, 2002,
      section 3.1). The relative error of each rounding is at most 2⁻²⁴, or 2⁻⁵³ if the product is
      computed in float64.
    - Tensor cores add several products of 16-bit numbers to an accumulator. They truncate each
      product and the sum to the 24 leading bits of the largest of these numbers (Fasi, Higham,
      Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor cores", PeerJ Computer Science 7,
      2021, https://doi.org/10.7717/peerj-cs.330). For GPUs before Hopper, 4 products at a time
      without extra bits are assumed, so the error of one addition is 12 units of 2⁻²⁴. For Hopper
      and later GPUs, 16 products at a time with two extra bits are assumed, so the error is 11
      units.
    - With TF32, both factors are rounded to 11 bits, here and in the update. The products of
      rounded numbers are exact, and tensor cores truncate their sums. PyTorch's products round the
      factors to nearest. The kernel of `gram_norms` truncates them, so its factors may be 2⁻¹⁰
      smaller than in the update (seen on an NVIDIA H200 with torch 2.11 and Triton 3.6).
    - Without TF32, the kernel of `gram_norms` still uses tensor cores. It splits each float32
      number into an upper and a lower part of 11 bits each. It adds three products of parts, and
      leaves out the product of the two lower parts. Even if the parts are truncated, the error of a
      term is less than 3 · 2⁻²⁰ (Ootomo and Yokota, "Recovering single precision accuracy from
      Tensor Cores", 2022, https://arxiv.org/abs/2203.03341). Tensor cores add 8 products at a time
      to an accumulator, without extra bits. The accumulators are added in float32.

    Args:
        a: the first factor, ``[B, I, K]``. Row indices are also allowed, whose products have no
            error.
        b: the second factor, ``[B, K, J]``; None for the transpose of a.
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
    """Sums over tokens s and t of the products ``A_st = x_s·x_t`` and ``B_st = g_s·g_t``.

    With a trained bias, x has an additional column of ones. For an embedding, x_t has a one at the
    row index of token t, and zeros elsewhere.

    Attributes:
        squared_norm: P, the sum of ``A_st B_st`` over all pairs of tokens.
        diagonal: D, the sum of ``A_tt B_tt`` over all tokens.
        x_trace: the sum of ``|x_t|²``.
        g_trace: the sum of ``|g_t|²``.
        x_squares: the sum of ``A_st²``.
        g_squares: the sum of ``B_st²``.
    """

    squared_norm: Tensor
    diagonal: Tensor
    x_trace: Tensor
    g_trace: Tensor
    x_squares: Tensor
    g_squares: Tensor


def clipping_factors(squared_norms: Tensor, threshold: float, divisor: int = 1) -> Tensor:
    """Return clipping factors divided by ``divisor``, ``[B]``, rounded down.

    Args:
        squared_norms: upper bounds of the examples' squared norms, ``[B]``.
        threshold: C, the clipping threshold.
        divisor: for example the batch size, so that a weighted sum of gradients is a mean.
    """
    exact = (threshold / (squared_norms.double().sqrt() + 1e-6)).clamp(max=1.0) / divisor
    return rounded_down(exact, squared_norms.dtype)


def total(squared_norms: Sequence[Tensor]) -> Tensor:
    """Return upper bounds ``[B]`` of the sums of squared norms over the parts of a gradient."""
    each = torch.stack([*squared_norms])
    return (each.sum(0, dtype=torch.float64) * (1 + 4 * unit(each.dtype))).to(each.dtype)


def unit(dtype: torch.dtype) -> float:
    """Return the unit roundoff u, which is the largest relative error of rounding to nearest."""
    return torch.finfo(dtype).eps / 2


def wide_unit(dtype: torch.dtype) -> float:
    """Return the unit roundoff of float32, or of ``dtype`` if ``dtype`` is wider."""
    return unit(torch.promote_types(dtype, torch.float32))


def of_terms(dtype: torch.dtype, tokens: int, tf32: bool | None = None) -> float:
    """Bound the error from rounding the numbers that the update multiplies, in units of ``D^½``.

    D is `GramSums.diagonal`.
    """
    if dtype.itemsize == 2:
        return unit(dtype)
    return 2.0**-10 if is_in_tf32(dtype, tf32) else math.sqrt(tokens) * unit(dtype)


def of_sums(
    dtype: torch.dtype,
    tokens: int,
    summed_in: torch.dtype | None = None,
    tf32: bool | None = None,
) -> float:
    """Bound the error from rounding sums over tokens in the update, relative to the largest sum."""
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
    """Return upper bounds of the squared norms of the update's gradients, ``[layers, B]``.

    Args:
        parts: the `GramSums` of each layer, ``[6, B]`` in float32 or float64.
        tokens: T, the number of tokens.
        errors: bounds of the errors of the products ``x xᵀ`` and ``g gᵀ``.
        dtype: dtype in which the update multiplies.
        summed_in: dtype in which the update sums over tokens, if narrower than float32.
        tf32: whether the update may use TF32; None to use `has_tf32`.
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
    # Products of elements of A and B are rounded, and then summed by rows or by tiles.
    number = (2 * tokens + 130 + (tokens / 64) ** 2) * unit(stacked.dtype)
    sizes = size_x * size_g
    error = torch.addcmul(number * sizes, off[0], size_g).addcmul_(off[1], size_x)
    # The sums from which ``error`` is computed also have rounding errors, so ``error`` is raised.
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
    """Return bounds like those of `gram_bound`, but for norms from per-sample gradients.

    Args:
        parts: for each layer ``[3, B]``: the squared norm, ``Σ |x_t| |g_t|`` over tokens, and D,
            which is ``Σ |x_t|² |g_t|²``.
        tokens: T, the number of tokens.
        error: bound of the error of the gradient, which is a matrix product.
        dtype: dtype in which the update multiplies.
    """
    squares, lengths, diagonal = torch.stack([*parts], 1)
    off = error.of_sums + error.of_terms
    squared = torch.add(squares.sqrt(), lengths, alpha=off).square()
    rounded = diagonal.sqrt() * (of_sums(dtype, tokens) + of_terms(dtype, tokens))
    return with_rounding(squared, rounded, dtype)


def row_bound(
    parts: Sequence[Tensor], tokens: int, dtype: torch.dtype, summed_in: torch.dtype | None = None
) -> Tensor:
    """Return bounds like those of `gram_bound`, but from the rows of an embedding's gradient.

    If n tokens look up a row, the row's gradient is the sum of the output gradients g of these
    tokens. In every order of summation, the error of this sum is at most n unit roundoffs times
    Σ|g|, both in the norm and in the update.

    Args:
        parts: for each layer ``[3, B]``: the squared norm, ``(Σ (n Σ|g|)²)^½`` over rows, and D,
            which is ``Σ|g|²`` over tokens.
        tokens: T, the number of tokens.
        dtype: dtype in which the update multiplies.
        summed_in: dtype in which the update sums over tokens, if narrower than float32.
    """
    squares, sums, diagonal = torch.stack([*parts], 1)
    squared = torch.add(squares.sqrt(), sums, alpha=unit(sums.dtype)).square()
    in_update = unit(summed_in) if summed_in else wide_unit(dtype)
    return with_rounding(
        squared, in_update * sums + of_terms(dtype, tokens) * diagonal.sqrt(), dtype
    )


def with_rounding(squared: Tensor, rounded: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Add the update's rounding errors to norms, and return the squares of the sums.

    Args:
        squared: upper bounds of squared norms, without the update's rounding errors.
        rounded: bounds of the norms of the update's rounding errors. The rounding of the update's
            result is not part of them, but is added here.
        dtype: dtype of the update.
    """
    of_result = 1 + unit(dtype) + 8 * wide_unit(dtype)
    norms = squared.clamp(min=0).sqrt() * of_result + rounded
    squares: Tensor = norms.square().to(torch.promote_types(dtype, torch.float32))
    return squares


def row_norms(samples: Tensor) -> Tensor:
    """Return norms ``[B, rows]`` of gradients ``[B, …]``, each along the last dimension.

    A float32 sum over a whole matrix can be too small. In a test on a CPU with equal numbers, it
    was too small by 0.1 %.
    """
    width = samples.shape[-1] if samples.dim() > 1 else 1
    rows = samples.reshape(len(samples), math.prod(samples.shape[1:-1]), width)
    norms: Tensor = torch.linalg.vector_norm(rows, dim=2, dtype=wide_type(rows, rows))
    return norms


def sample_bound(
    norms: Sequence[Tensor], width: int, dtype: torch.dtype, by_product: bool = False
) -> Tensor:
    """Return upper bounds ``[1, B]`` of the squared norms of kept gradients.

    Args:
        norms: `row_norms` of the gradients.
        width: the number of elements in a row, or an upper bound of this number.
        dtype: dtype of the update.
        by_product: whether the update multiplies gradients and factors in a matrix product, which
            may round both to 11 bits.
    """
    rows = torch.cat([*norms], 1)
    squares = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).square_()
    squares *= 1 + (width + 8) * unit(rows.dtype)
    rounded = squares.sqrt() * 2.0**-10 if by_product and is_in_tf32(dtype) else 0.0
    return with_rounding(squares, rounded, dtype)[None]


def squared_sample_norms(samples: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return upper bounds ``[B]`` of the squared norms of per-sample gradients.

    Args:
        samples: the gradients that the update multiplies by clipping factors, ``[B, …]``.
        dtype: dtype of the update; None for the dtype of ``samples``.
    """
    width = samples.shape[-1] if samples.dim() > 1 else 1
    return sample_bound([row_norms(samples)], width, dtype or samples.dtype)[0]
