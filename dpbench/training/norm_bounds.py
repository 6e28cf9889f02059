"""Norms that clip: upper bounds of the norms of examples' gradients, and the factors they give.

A gradient that is clipped by a norm that rounding made too small goes into the update above the
threshold. So what rounding takes from a norm is bounded and added, and what the update rounds too.

**The products.** The squared norm of ``G = Σ g_t x_tᵀ`` over tokens t is ``P = Σ A_st B_st`` for
``A = x xᵀ`` and ``B = g gᵀ``, whose terms may cancel: where tokens are alike, what is left can be
rounding error. A is off by a matrix of Frobenius norm ``e_A = a |A| + a' tr A`` at most: each of
its roundings is of a sum over some of the K columns of x, and such a sum is no larger than A,
because both and their difference are positive semidefinite; a and a' are those of
`dpbench.training.kernels.product_error`. With ``e_B`` likewise, and n roundings of 2⁻²⁴ in the sum
of the products, P is off by at most (Cauchy and Schwarz)::

    e_A |B| + e_B |A| + e_A e_B + n 2⁻²⁴ |A| |B|

This is the worst case, for sums in any order (γ_n of Higham, Accuracy and Stability of Numerical
Algorithms, 2nd edition, 2002, sections 3.1 and 4.2). On ordinary data it adds little: of 1024
tokens, 2048 to 8192 wide, a ten-thousandth.

**The update** rounds three times:

- its result, by half a unit u of its type: u times the norm, the worst case;
- its sums over T tokens. A sum over some of them is no larger than ``(|A| |B|)^½``. Tensor cores
  cut it off: 3 T units of float32 of that are added, the worst case. Else 2 T^½ units are, at most
  T: if roundings are independent and uniform, a norm is off by more with a probability of at most
  1e-9, unless one number of a gradient is more than half of its norm (Higham and Mary, A New
  Approach to Probabilistic Rounding Error Analysis, SIAM J. Sci. Comput. 41(5), 2019, theorem 2.4:
  6.6 standard deviations, each ``(T/3)^½`` units of that number). Where the gradient itself was
  made, A and B are not known: sums over some tokens are taken to be no larger than ``D^½`` below,
  as if tokens were independent;
- the numbers that it multiplies, c·g or the gradient. In float32 and float64 ``T^½ u D^½`` is added
  for it, where ``D = Σ |x_t|² |g_t|²``, the worst case. **In 16 bits, and with TF32, it is**
  ``u D^½``, **which is the worst case of one token only**: were roundings independent and uniform,
  they would come to 0.58 u D^½ in the root mean square, and mostly at a right angle to G. Data
  could be made for which they agree over tokens: ``u (λ Σ|g_t|²)^½`` for the largest eigenvalue λ
  of A would cover these, and lower factors by 1.5 to 2.7 % on ordinary data instead of 0.4 %.

A NaN in a gradient makes its norm, its factor and the update NaN, for all to see. A norm that is
too large for its type is infinite, and its factor 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dpbench.training.gradient_sums import rounded_down
from dpbench.training.kernels import ProductError, has_tf32, wide_type


class GramSums(NamedTuple):
    """Sums over tokens s and t of the products ``A_st = x_s·x_t`` and ``B_st = g_s·g_t``."""

    squared_norm: Tensor
    """P: both multiplied, over all pairs."""
    diagonal: Tensor
    """D: the same of each token with itself."""
    x_trace: Tensor
    """``Σ |x_t|²``."""
    g_trace: Tensor
    """``Σ |g_t|²``."""
    x_squares: Tensor
    """``Σ A_st²``."""
    g_squares: Tensor
    """``Σ B_st²``."""


def clipping_factors(squared_norms: Tensor, threshold: float, divisor: int = 1) -> Tensor:
    """What gradients are multiplied by, ``[B]``: at most 1, over ``divisor``, and rounded down.

    Args:
        squared_norms: ``[B]``, upper bounds, as the functions below make them.
        threshold: C.
        divisor: what the clipped gradients are divided by at once.
    """
    exact = (threshold / (squared_norms.double().sqrt() + 1e-6)).clamp(max=1.0) / divisor
    return rounded_down(exact, squared_norms.dtype)


def total(squared_norms: Sequence[Tensor]) -> Tensor:
    """The squared norms ``[B]`` of several gradients as one; added up in float64."""
    each = torch.stack([*squared_norms])
    return (each.sum(0, dtype=torch.float64) * (1 + 4 * unit(each.dtype))).to(each.dtype)


def unit(dtype: torch.dtype) -> float:
    """By how much a number is off that was rounded to the nearest, as a part of it, at most."""
    return torch.finfo(dtype).eps / 2


def wide_unit(dtype: torch.dtype) -> float:
    """`unit` of the type in which numbers of a type are summed."""
    return unit(torch.promote_types(dtype, torch.float32))


def of_terms(dtype: torch.dtype, tokens: int) -> float:
    """What the update rounds of the numbers that it multiplies, as a part of ``D^½``."""
    if dtype.itemsize == 2:
        return unit(dtype)
    tf32 = dtype == torch.float32 and has_tf32()
    return 2.0**-10 if tf32 else math.sqrt(tokens) * unit(dtype)


def of_sums(dtype: torch.dtype, tokens: int, summed_in: torch.dtype | None = None) -> float:
    """What the update rounds of sums over tokens, as a part of the largest of them."""
    if summed_in is not None:
        return tokens * unit(summed_in)
    if dtype.itemsize == 2 or (dtype == torch.float32 and has_tf32()):
        return 3 * tokens * wide_unit(dtype)
    return min(tokens, 2 * math.sqrt(tokens)) * wide_unit(dtype)


def gram_bound(
    parts: Sequence[Tensor],
    tokens: int,
    errors: tuple[ProductError, ProductError],
    dtype: torch.dtype,
    summed_in: torch.dtype | None = None,
) -> Tensor:
    """Squared norms of gradients as the update makes them, at most, ``[layers, B]``.

    Args:
        parts: of each layer the `GramSums`, ``[6, B]`` in float32 or float64.
        tokens: T.
        errors: of both products.
        dtype: in which the update multiplies.
        summed_in: in which the update adds up, if not in float32 or wider.
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
    # Each product was rounded once more, and summed: in rows of a product or in tiles.
    number = (2 * tokens + 130 + (tokens / 64) ** 2) * unit(stacked.dtype)
    sizes = size_x * size_g
    error = torch.addcmul(number * sizes, off[0], size_g).addcmul_(off[1], size_x)
    # The sums in it are off by these parts themselves.
    higher = 1 + 4 * (number + sum(map(sum, errors)))
    squared = torch.add(sums.squared_norm, error, alpha=higher)
    rounded = sizes.sqrt_().mul_(of_sums(dtype, tokens, summed_in) * higher)
    rounded.add_(sums.diagonal.sqrt(), alpha=of_terms(dtype, tokens) * higher)
    return with_rounding(squared, rounded, dtype)


def gradient_bound(
    parts: Sequence[Tensor], tokens: int, error: ProductError, dtype: torch.dtype
) -> Tensor:
    """`gram_bound` of gradients that are there.

    Args:
        parts: of each layer ``[3, B]``: the squared norm, ``Σ |x_t| |g_t|`` over tokens, and D.
        tokens: T.
        error: of the gradient.
        dtype: in which the update multiplies.
    """
    squares, lengths, diagonal = torch.stack([*parts], 1)
    squared = torch.add(squares.sqrt(), lengths, alpha=sum(error)).square()
    rounded = diagonal.sqrt() * (of_sums(dtype, tokens) + of_terms(dtype, tokens))
    return with_rounding(squared, rounded, dtype)


def with_rounding(squared: Tensor, rounded: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Squared norms, with what the update rounds: its result, and ``rounded``."""
    of_result = 1 + unit(dtype) + 8 * wide_unit(dtype)
    norms = squared.clamp(min=0).sqrt() * of_result + rounded
    squares: Tensor = norms.square().to(torch.promote_types(dtype, torch.float32))
    return squares


def row_norms(samples: Tensor) -> Tensor:
    """Norms ``[B, N]`` of the rows of gradients ``[B, …]``, which are of the last dimension.

    A CPU adds up squares one by one: of a whole matrix at once, a norm is up to 1e-3 too small.
    """
    rows = samples.reshape(len(samples), -1, samples.shape[-1] if samples.dim() > 1 else 1)
    norms: Tensor = torch.linalg.vector_norm(rows, dim=2, dtype=wide_type(rows, rows))
    return norms


def sample_bound(norms: Sequence[Tensor], width: int, dtype: torch.dtype) -> Tensor:
    """Squared norms ``[1, B]`` of gradients that go into the update as they are, but for a factor.

    Args:
        norms: `row_norms` of their parts.
        width: numbers of a row, at most.
        dtype: of the update.
    """
    rows = torch.cat([*norms], 1)
    squares = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).square_()
    return with_rounding(squares * (1 + (width + 8) * unit(rows.dtype)), 0.0, dtype)[None]


def squared_sample_norms(samples: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Of each example's gradient ``[B, …]`` that is there, ``[B]``, as the update makes it.

    Args:
        samples: as they go into the update, but for the factor.
        dtype: of the update, if it is not theirs.
    """
    width = samples.shape[-1] if samples.dim() > 1 else 1
    return sample_bound([row_norms(samples)], width, dtype or samples.dtype)[0]
