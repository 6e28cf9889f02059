"""Norms that clip: upper bounds of the norms of examples' gradients, and the factors they give.

A gradient that is clipped by a norm that rounding made too small goes into the update above the
threshold. Of products T × T the squared norm is ``P = Σ (x_s·x_t)(g_s·g_t)``, whose terms may
cancel: where tokens are alike, what is left can be rounding error. So P's error is bounded and
added, and what the update rounds is added to the norm.

**The products.** An entry ``x_s·x_t`` is off by at most ``a |x_s| |x_t|``, and one of g by
``b |g_s| |g_t|``: see `dpbench.training.kernels.entry_error`. P is then off by at most::

    a Σ |x_s| |x_t| |g_s·g_t|  +  b Σ |g_s| |g_t| |x_s·x_t|  +  a b Σ |x_s| |x_t| |g_s| |g_t|

By Cauchy and Schwarz over the pairs off the diagonal, the first sum is at most
``D + Σ|x_t|² (Σ_{s≠t} (g_s·g_t)²)^½`` with ``D = Σ |x_t|² |g_t|²``, the second likewise, and the
third ``Σ|x_t|² Σ|g_t|²``. `GramSums` has what this needs. That is the worst case, for sums in any
order (γ_n of Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, 2002, sections
3.1 and 4.2). On ordinary data it adds little: of 1024 tokens, 2048 to 8192 wide, about 1 %.

**The update.** It rounds c·g or the gradient to its type, and the result: by half a unit u each.
Of the first ``u D^½`` is added to the norm, of the second u times the norm. The first is the worst
case of one token, and of several unless roundings of tokens agree in sign: were each uniform and
independent, they come to 0.58 u D^½ at most in the root mean square. Sums over T tokens round by
about ``T^½`` units more (Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis,
SIAM J. Sci. Comput. 41(5), 2019): twice that is added.

A NaN in a gradient makes its norm, its factor and the update NaN, for all to see. A norm that is
too large for its type is infinite, and its factor 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from dpbench.training.gradient_sums import rounded_down
from dpbench.training.kernels import (
    by_kernel,
    entry_error,
    gram_norms,
    gram_sums,
    products,
    wide_product,
    wide_type,
)

Item = TypeVar("Item")


class GramSums(NamedTuple):
    """Sums over tokens s and t of the products ``x_s·x_t`` and ``g_s·g_t`` of an example."""

    squared_norm: Tensor
    """P: both multiplied, over all pairs."""
    diagonal: Tensor
    """D: the same of each token with itself."""
    x: Tensor
    """``Σ |x_t|²``."""
    g: Tensor
    """``Σ |g_t|²``."""
    x_pairs: Tensor
    """``Σ (x_s·x_t)²`` over pairs of different tokens."""
    g_pairs: Tensor
    """``Σ (g_s·g_t)²`` over these."""


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


def gram_bound(
    sums: GramSums, tokens: int, errors: tuple[float, float], dtype: torch.dtype
) -> Tensor:
    """Squared norms of gradients as the update makes them, at most.

    Args:
        sums: of products in float32, or float64.
        tokens: T.
        errors: a and b of the products.
        dtype: in which the update multiplies.
    """
    a, b = errors
    wide = unit(sums.x.dtype)
    off_x, off_g = sums.x_pairs.sqrt(), sums.g_pairs.sqrt()
    # Each product was rounded once more, and summed: in rows of a product or in tiles.
    summed = (2 * tokens + 130 + (tokens / 64) ** 2) * wide
    if sums.x.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        summed += 2.0**-10
    error = (
        a * (sums.diagonal + sums.x * off_g)
        + b * (sums.diagonal + sums.g * off_x)
        + a * b * sums.x * sums.g
        + summed * (sums.diagonal + off_x * off_g)
    )
    # The sums in it are off by these parts themselves.
    squared = sums.squared_norm + error * (1 + 4 * (a + b + summed))
    return with_rounding(squared, sums.diagonal, tokens, dtype)


def with_rounding(
    squared_norms: Tensor, diagonal: Tensor, tokens: int, dtype: torch.dtype
) -> Tensor:
    """Squared norms, with what the update rounds."""
    wide = unit(torch.promote_types(dtype, torch.float32))
    of_result = 1 + unit(dtype) + 8 * wide
    of_terms = diagonal.sqrt() * terms_rounding(dtype, tokens)
    norms = squared_norms.clamp(min=0).sqrt() * of_result + of_terms
    squares: Tensor = norms.square().to(torch.promote_types(dtype, torch.float32))
    return squares


def terms_rounding(dtype: torch.dtype, number: int) -> float:
    """What the update rounds of so many terms, as a part of the root of their squares' sum."""
    return unit(dtype) + 2 * math.sqrt(number) * unit(torch.promote_types(dtype, torch.float32))


def squared_product_norms(x: Tensor, g: Tensor) -> Tensor:
    """Of each example's gradient of a linear layer or embedding, ``[B]``, by products T × T.

    Args:
        x: activations ``[B, T, K]``, or rows ``[B, T]`` int64.
        g: gradients of what it returned, ``[B, T, N]``.
    """
    sums = GramSums(*gram_sums(*products(x, g)))
    return gram_bound(sums, x.shape[1], (entry_error(x), entry_error(g)), g.dtype)


def squared_norms_of_products(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """`squared_product_norms` of several layers, with one bound for those of a shape.

    A bound is some forty small kernels, and a step waits for their launches.
    """
    norms: list[Tensor] = []
    for alike in grouped(pairs, lambda pair: tuple((t.shape[1:], t.dtype) for t in pair)):
        x, g = alike[0]
        sums = GramSums(*torch.stack([gram_sums(*products(*pair)) for pair in alike], 1))
        errors = entry_error(x), entry_error(g)
        norms += gram_bound(sums, x.shape[1], errors, g.dtype).unbind()
    return norms


def grouped(items: Iterable[Item], kind: Callable[[Item], object]) -> Iterable[list[Item]]:
    """The items that are of a kind, together."""
    kinds: dict[object, list[Item]] = {}
    for item in items:
        kinds.setdefault(kind(item), []).append(item)
    return kinds.values()


def squared_norms_of_alike(xs: Sequence[Tensor], gs: Sequence[Tensor], bias: bool) -> Tensor:
    """`squared_product_norms` of layers of one shape, by `gram_norms`, ``[layers, B]``."""
    x, g = xs[0], gs[0]
    errors = [entry_error(each, by_kernel=by_kernel(x, g)) for each in (x, g)]
    sums = GramSums(*gram_norms(xs, gs, bias))
    return gram_bound(sums, x.shape[1], (errors[0], errors[1]), g.dtype)


def squared_gradient_norms(x: Tensor, g: Tensor) -> Tensor:
    """The same from the gradients ``[B, N, K]``, which are sums over tokens themselves."""
    samples = wide_product(g.mT, x)
    sizes = [torch.linalg.vector_norm(each, dim=2, dtype=samples.dtype) for each in (x, g)]
    of_tokens = sizes[0] * sizes[1]
    squares = squared_sample_norms(samples)
    norms = squares.sqrt() + entry_error(g.mT, x) * of_tokens.sum(1)
    return with_rounding(norms.square(), of_tokens.square().sum(1), x.shape[1], g.dtype)


def products_are_smaller(tokens: int, weights: int) -> bool:
    """Whether both products T × T together have no more elements than a weight has."""
    return 2 * tokens**2 <= weights


def cheaper_squared_norms(x: Tensor, g: Tensor) -> Tensor:
    """By products, or from the gradients, which are as large as the weight."""
    by_products = products_are_smaller(x.shape[1], x.shape[2] * g.shape[2])
    return squared_product_norms(x, g) if by_products else squared_gradient_norms(x, g)


def squared_bias_norms(g: Tensor) -> Tensor:
    """Of each example's gradient of a linear layer's bias, ``[B]``: a sum over tokens."""
    return squared_norms_of_biases([g])[0]


def squared_norms_of_biases(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The same of several layers, with one rounding for those of a length and type."""
    norms: list[Tensor] = []
    for alike in grouped(gradients, lambda g: (g.shape[1], g.dtype)):
        squares = torch.stack([g.sum(1, dtype=torch.float64).square().sum(1) for g in alike])
        norms += with_rounding(squares, squares, alike[0].shape[1], alike[0].dtype).unbind()
    return norms


def squared_norms_of_samples(samples: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Of each example's gradient, ``[B]``, which is there in parts ``[B, …]`` of one type.

    One kernel a part: steps of small models wait for launches. Rows of parts are summed in float64.
    The update is of a type of its own.
    """
    rows = [rows_of(each) for each in samples]
    types = {wide_type(each, each) for each in rows}
    within = torch.float64 if types == {torch.float64} else torch.float32
    norms = [torch.linalg.vector_norm(each, dim=2, dtype=within) for each in rows]
    squares = torch.linalg.vector_norm(torch.cat(norms, 1), dim=1, dtype=torch.float64).square()
    squares *= 1 + (max(each.shape[2] for each in rows) + 8) * unit(within)
    return with_rounding(squares, torch.zeros_like(squares), 0, dtype)


def rows_of(samples: Tensor) -> Tensor:
    """Gradients ``[B, …]`` as rows ``[B, N, K]``, of the last dimension."""
    return samples.reshape(len(samples), -1, samples.shape[-1] if samples.dim() > 1 else 1)


def squared_sample_norms(samples: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Of each example's gradient ``[B, …]`` that is there, ``[B]``, as the update makes it.

    A CPU adds up squares one by one: of a whole matrix at once, a norm is up to 1e-3 too small.

    Args:
        samples: as they go into the update, but for the factor.
        dtype: of the update, if it is not theirs.
    """
    rows = rows_of(samples)
    within = wide_type(rows, rows)
    norms = torch.linalg.vector_norm(rows, dim=2, dtype=within)
    squares = norms.square().sum(1, dtype=torch.float64)
    squares = squares * (1 + (rows.shape[2] + 8) * unit(within))
    return with_rounding(squares, torch.zeros_like(squares), 0, dtype or samples.dtype)
