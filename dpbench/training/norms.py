"""Upper bounds of the norms of per-sample gradients, and clipping factors from these bounds.

`cheapest` chooses how to compute the norms of a layer. The choice depends on shapes and dtypes, and
on whether matrix products use TF32, but not on values. An example has T tokens. A linear layer
multiplies the example's activations ``[T, K]`` by a weight of K × N numbers. There are three ways
to compute the squared norm:

- ``products`` sums over products T × T of activations and of output gradients.
- ``gradient`` computes the per-sample gradient, and discards it after computing the norm. For an
  embedding, only the rows that the example looks up are computed.
- ``kept`` computes the per-sample gradient, and keeps it for the update.

Mixed ghost clipping chooses between the first two ways for each layer (Bu, Mao and Xu, "Scalable
and Efficient Training of Large Convolutional Neural Networks with Differential Privacy", 2022,
https://arxiv.org/abs/2205.10683).

**Bounds.** If rounding makes a norm too small, the clipped gradient can exceed the threshold. So
each norm is increased by bounds of two rounding errors: the error of the norm, and the error of the
update. Most bounds hold in the worst case. The bounds that data could exceed are named below.

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
second is the rounding of the update's result. See `sample_bound`.

**If gradients are not kept**, the update computes them again, and rounds three kinds of numbers:

- The update's result is rounded to the dtype of the parameters. Sums are in float32 or wider, so
  this happens after noise is added. But without noise, the update shall not exceed the threshold
  either. The worst case is added, which is u times the norm, where u is the unit roundoff of this
  dtype.
- Sums over T tokens are rounded. The norm of a sum over some tokens is at most ``(|A| |B|)^½``. The
  added error is this norm times a number of unit roundoffs. In 16 bits and with TF32, tensor cores
  may truncate sums, so 3 T units of float32 are added, which is the worst case. In all other cases,
  2 T^½ units are added, but at most T units. Data could exceed 2 T^½ units. If roundings are
  independent and uniform, this is very unlikely, unless one number of a gradient is more than half
  of the gradient's norm (Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis,
  SIAM J. Sci. Comput. 41(5), 2019, theorem 2.4). If the norm was computed from the gradient, A and
  B are unknown. The norm of a sum over some tokens is then assumed to be at most ``D^½``, with D as
  below, as if tokens were independent.
- The numbers that the update multiplies are rounded, such as c·g with the clipping factor c. In
  float32 and float64, the worst case is added: ``T^½ u D^½`` with ``D = Σ |x_t|² |g_t|²``. **In 16
  bits and with TF32,** ``u D^½`` **is added, which is the worst case for one token only.** If an
  example has several tokens, data can be constructed whose roundings have the same direction for
  all tokens, and exceed this bound. The bound ``u (λ Σ|g_t|²)^½``, with the largest eigenvalue λ of
  A, would hold for such data, but would lower clipping factors more on ordinary data. With TF32, u
  is 2⁻¹⁰, because the norm is computed from x and g rounded to 11 bits, and the update rounds x and
  c·g.

If a norm is infinite or NaN, the clipping factor is 0. A norm that is too large for its dtype is
infinite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpbench.training.kernels import (
    TILINGS,
    by_kernel,
    gram_norms,
    gram_sums,
    has_tf32,
    is_in_tf32,
    products,
    wide_product,
    wide_type,
)

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


def rounded_down(factors: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert factors to another dtype. Never round up, which would weaken clipping."""
    rounded = factors.to(dtype)
    if dtype == factors.dtype:
        return rounded
    lower = torch.nextafter(rounded, torch.zeros_like(rounded))
    return torch.where(rounded > factors, lower, rounded)


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

    def of_sum(self, number: int) -> ProductError:
        """Return a bound of the error of a sum of this number of such products ``a aᵀ``.

        No term of a sum of positive semidefinite matrices has a larger norm than the sum.
        """
        sums = number * self.of_sums + (number - 1) * self.of_terms
        return self._replace(of_sums=sums)

    def of_blocks(self, number: int) -> ProductError:
        """Return a bound of the error of a product ``a aᵀ`` of which blocks are computed apart.

        Blocks may add the columns of a in different orders. A sum over some columns has a norm of
        at most ``|A_ij| ≤ (|A_ii| |A_jj|)^½`` in each block, so of at most ``Σ |A_ii|`` in all.

        Args:
            number: of blocks on the diagonal.
        """
        return self._replace(of_sums=math.sqrt(number) * self.of_sums)


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


def worst(errors: Sequence[ProductError]) -> ProductError:
    """Return a bound that holds for products with any of these errors."""
    return ProductError(*map(max, zip(*errors, strict=True)))


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


def clipping_factors(squared_norms: Tensor, threshold: float | Tensor) -> Tensor:
    """Return clipping factors, ``[B]``, rounded down; 0 if a norm is not finite.

    Args:
        squared_norms: upper bounds of the examples' squared norms, ``[B]``.
        threshold: C, the clipping threshold.
    """
    exact = (threshold / (squared_norms.double().sqrt() + 1e-6)).clamp(max=1.0)
    return rounded_down(exact.nan_to_num(nan=0.0), squared_norms.dtype)


def total(squared_norms: Sequence[Tensor]) -> Tensor:
    """Return upper bounds ``[B]`` of the sums of squared norms over the pieces of a gradient."""
    each = torch.stack([*squared_norms])
    return (each.sum(0, dtype=torch.float64) * (1 + 4 * unit(each.dtype))).to(each.dtype)


def unit(dtype: torch.dtype) -> float:
    """Return the unit roundoff u, which is the largest relative error of rounding to nearest."""
    return torch.finfo(dtype).eps / 2


def wide_unit(dtype: torch.dtype) -> float:
    """Return the unit roundoff of float32, or of ``dtype`` if ``dtype`` is wider."""
    return unit(torch.promote_types(dtype, torch.float32))


def of_terms(dtype: torch.dtype, tokens: int) -> float:
    """Bound the error from rounding the numbers that the update multiplies, in units of ``D^½``.

    D is `GramSums.diagonal`.
    """
    if dtype.itemsize == 2:
        return unit(dtype)
    return 2.0**-10 if is_in_tf32(dtype) else math.sqrt(tokens) * unit(dtype)


def of_sums(dtype: torch.dtype, tokens: int) -> float:
    """Bound the error from rounding sums over tokens in the update, relative to the largest sum."""
    if dtype.itemsize == 2 or is_in_tf32(dtype):
        return 3 * tokens * wide_unit(dtype)
    return min(tokens, 2 * math.sqrt(tokens)) * wide_unit(dtype)


def gram_bound(
    pieces: Sequence[Tensor],
    tokens: int,
    errors: tuple[ProductError, ProductError],
    dtype: torch.dtype,
    update: ProductError | None = None,
) -> Tensor:
    """Return upper bounds of the squared norms of the update's gradients, ``[layers, B]``.

    Args:
        pieces: the `GramSums` of each layer, ``[6, B]`` in float32 or float64.
        tokens: T, the number of tokens.
        errors: bounds of the errors of the products ``x xᵀ`` and ``g gᵀ``.
        dtype: dtype in which the update multiplies.
        update: the results of `of_sums` and `of_terms` for another update than a matrix product.
    """
    update = update or ProductError(of_sums(dtype, tokens), of_terms(dtype, tokens))
    stacked = torch.stack([*pieces], 1)
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
    rounded = sizes.sqrt_().mul_(update.of_sums * higher)
    rounded.add_(sums.diagonal.sqrt(), alpha=update.of_terms * higher)
    if truncated:
        rounded.add_(squared.clamp(min=0).sqrt_(), alpha=truncated * higher)
    return with_rounding(squared, rounded, dtype)


def gradient_bound(
    pieces: Sequence[Tensor], tokens: int, error: ProductError, dtype: torch.dtype
) -> Tensor:
    """Return bounds like those of `gram_bound`, but for norms from per-sample gradients.

    Args:
        pieces: for each layer ``[3, B]``: the squared norm, ``Σ |x_t| |g_t|`` over tokens, and D,
            which is ``Σ |x_t|² |g_t|²``.
        tokens: T, the number of tokens.
        error: bound of the error of the gradient, which is a matrix product.
        dtype: dtype in which the update multiplies.
    """
    squares, lengths, diagonal = torch.stack([*pieces], 1)
    off = error.of_sums + error.of_terms
    squared = torch.add(squares.sqrt(), lengths, alpha=off).square()
    rounded = diagonal.sqrt() * (of_sums(dtype, tokens) + of_terms(dtype, tokens))
    return with_rounding(squared, rounded, dtype)


def row_bound(pieces: Sequence[Tensor], tokens: int, dtype: torch.dtype) -> Tensor:
    """Return bounds like those of `gram_bound`, but from the rows of an embedding's gradient.

    If n tokens look up a row, the row's gradient is the sum of the output gradients g of these
    tokens. In every order of summation, the error of this sum is at most n unit roundoffs times
    Σ|g|, both in the norm and in the update.

    Args:
        pieces: for each layer ``[3, B]``: the squared norm, ``(Σ (n Σ|g|)²)^½`` over rows, and D,
            which is ``Σ|g|²`` over tokens.
        tokens: T, the number of tokens.
        dtype: dtype in which the update multiplies.
    """
    squares, sums, diagonal = torch.stack([*pieces], 1)
    squared = torch.add(squares.sqrt(), sums, alpha=unit(sums.dtype)).square()
    rounded = wide_unit(dtype) * sums + of_terms(dtype, tokens) * diagonal.sqrt()
    return with_rounding(squared, rounded, dtype)


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


def sample_bound(norms: Sequence[Tensor], width: int, dtype: torch.dtype) -> Tensor:
    """Return upper bounds ``[1, B]`` of the squared norms of kept gradients.

    Args:
        norms: `row_norms` of the gradients.
        width: the number of elements in a row, or an upper bound of this number.
        dtype: dtype of the update.
    """
    rows = torch.cat([*norms], 1)
    squares = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).square_()
    squares *= 1 + (width + 8) * unit(rows.dtype)
    return with_rounding(squares, 0.0, dtype)[None]


class GhostNorms:
    """Computes upper bounds of squared norms, for each example and each piece of its gradient.

    A piece is, for example, the gradient of one layer. The pieces are added layer by layer. Each
    bound takes about twenty small kernels, whose launches would make a step slower. So
    `squared_norms` computes the bounds of all layers with equal settings at once. Until then, only
    the sums or norms that the bounds need are kept.

    Args:
        together: whether one operator computes products T × T of all layers of equal shape. Their
            activations and output gradients are kept until `squared_norms`.
    """

    def __init__(self, *, together: bool = False) -> None:
        self._together = together
        self._pieces: dict[tuple[Any, ...], list[Tensor]] = {}
        self._alike: dict[tuple[Any, ...], dict[Any, tuple[Tensor, list[Tensor]]]] = {}

    def add(
        self,
        x: Tensor,
        g: Tensor,
        *,
        way: str = PRODUCTS,
        bias: bool = False,
    ) -> None:
        """Add a linear layer or an embedding.

        Args:
            x: activations ``[B, T, K]`` of a linear layer, or row indices ``[B, T]`` int64 of an
                embedding.
            g: output gradients, ``[B, T, N]``.
            way: ``products`` computes the norms from products T × T, and ``gradient`` from
                per-sample gradients.
            bias: whether the bias is trained.
        """
        tokens = g.shape[1]
        if way == PRODUCTS and self._together:
            kind = bias, x.shape[1:], x.dtype, g.shape[1:], g.dtype
            inputs = self._alike.setdefault(kind, {})
            inputs.setdefault(place_of(x), (x, []))[1].append(g)
            return
        if way == PRODUCTS:
            errors = product_error(x), product_error(g)
            self._put(gram_sums(*products(x, g), bias), gram_bound, tokens, errors, g.dtype)
            return
        if x.dim() == 2:
            self._put(row_sums(x, g), row_bound, tokens, g.dtype)
            return
        lengths = torch.linalg.vector_norm(g, dim=2, dtype=wide_type(g, g))
        of_x = torch.linalg.vector_norm(x, dim=2, dtype=lengths.dtype)
        samples, error = wide_product(g.mT, x), product_error(g.mT, x)
        self._put_gradient(samples, of_x * lengths, error, tokens, g.dtype)
        if bias:
            self.add_bias(g)

    def add_bias(self, g: Tensor) -> None:
        """Add the bias of a linear layer with output gradients ``[B, T, N]``."""
        lengths = torch.linalg.vector_norm(g, dim=2, dtype=wide_type(g, g))
        error = ProductError(g.shape[1] * 2.0**-53, 0.0)
        samples = g.sum(1, dtype=torch.float64)
        self._put_gradient(samples, lengths, error, g.shape[1], g.dtype)

    def add_sums(self, sums: Tensor, *about: object) -> None:
        """Add a layer whose `GramSums` are known. The arguments are those of `gram_bound`."""
        self._put(sums, gram_bound, *about)

    def add_tied(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Add a weight ``[V, D]`` that linear layers and embeddings share.

        A token of a linear layer adds ``g xᵀ`` to the gradient, and a token of an embedding adds
        ``e gᵀ``, where e has a one at the token's row index. So the squared norm is that of a
        linear layer with all these tokens. Its products consist of blocks: one for each layer, and
        one for each pair of layers, which counts twice, and has no part in the diagonal.

        Args:
            pairs: for each layer the arguments ``x`` and ``g`` of `add`.
        """
        sums, errors_x, errors_g = list[Tensor](), list[ProductError](), list[ProductError]()
        narrow = [x if x.dim() == 3 else g for x, g in pairs]
        for (x, g), own in zip(pairs, narrow, strict=True):
            if self._together:
                of_layer, kernel = gram_norms([x], [g], False)[:, 0], by_kernel(x, g)
            else:
                of_layer, kernel = gram_sums(*products(x, g)), False
            # An embedding's vectors of length V are its inputs.
            sums.append(of_layer if own is x else of_layer[[0, 1, 3, 2, 5, 4]])
            for errors, factor in ((errors_x, own), (errors_g, g if own is x else x)):
                errors += [product_error(factor), product_error(factor, by_kernel=kernel)]
        for one, other in combinations(range(len(pairs)), 2):
            of_wide = product_of_wide(pairs[one], pairs[other])
            of_narrow = wide_product(narrow[one], narrow[other].mT)
            sums.append(2 * sums_of_block(of_narrow, of_wide))
        wide = max((each.dtype for each in sums), key=lambda dtype: dtype.itemsize)
        total = torch.stack([each.to(wide) for each in sums]).sum(0)
        tokens = sum(each.shape[1] for each in narrow)
        bounds = tuple(worst(each).of_blocks(len(pairs)) for each in (errors_x, errors_g))
        self._put(total, gram_bound, tokens, bounds, narrow[0].dtype)

    def _put_gradient(
        self, samples: Tensor, lengths: Tensor, error: ProductError, tokens: int, dtype: torch.dtype
    ) -> None:
        squares = row_norms(samples).square().sum(1)
        sums = torch.stack([squares.to(lengths.dtype), lengths.sum(1), lengths.square().sum(1)])
        self._put(sums, gradient_bound, tokens, error, dtype)

    def add_samples(self, samples: Tensor, dtype: torch.dtype) -> None:
        """Add per-sample gradients that are in memory.

        Args:
            samples: the per-sample gradients, ``[B, …]``.
            dtype: dtype of the parameter.
        """
        # The update is assumed to round to the narrower of the two dtypes.
        dtype = min(dtype, samples.dtype, key=lambda each: each.itemsize)
        width = samples.shape[-1] if samples.dim() > 1 else 1
        self._put(row_norms(samples), sample_bound, width, dtype)

    def _put(self, piece: Tensor, bound: Callable[..., Tensor], *about: object) -> None:
        self._pieces.setdefault((bound, piece.dtype, *about), []).append(piece)

    def squared_norms(self) -> list[Tensor]:
        """Return for each piece upper bounds of squared norms, ``[B]``, in float32 or wider."""
        kinds = self._pieces.items()
        made = [bound(pieces, *about) for (bound, _, *about), pieces in kinds]
        for (bias, *_), inputs in self._alike.items():
            for number in {len(gs) for _, gs in inputs.values()}:
                some = [(x, gs) for x, gs in inputs.values() if len(gs) == number]
                xs, gs = [x for x, _ in some], [g for _, gs in some for g in gs]
                made.append(squared_norms_of_alike(xs, gs, bias))
        return [each for norms in made for each in norms.unbind()]


def product_of_wide(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    """Return products ``[B, T, T']`` between tokens of two layers that share a weight ``[V, D]``.

    The vectors of length V are a linear layer's output gradients, or the rows' unit vectors of an
    embedding, see `GhostNorms.add_tied`.
    """
    (x, g), (y, h) = one, other
    if x.dim() == y.dim() == 3:
        return wide_product(g, h.mT)
    if x.dim() == y.dim() == 2:
        equal: Tensor = x[:, :, None] == y[:, None, :]
        return equal.to(wide_type(g, h))
    if x.dim() == 2:
        return product_of_wide(other, one).mT
    return g.gather(2, y[:, None, :].expand(-1, g.shape[1], -1)).to(wide_type(g, h))


def sums_of_block(of_x: Tensor, of_g: Tensor) -> Tensor:
    """Return the `GramSums`, ``[6, B]``, of a block of products that is beside the diagonal."""
    of_x, of_g = (each.to(torch.promote_types(of_x.dtype, of_g.dtype)) for each in (of_x, of_g))
    both, x_squares, g_squares = (
        (one * other).sum(2).sum(1) for one, other in ((of_x, of_g), (of_x, of_x), (of_g, of_g))
    )
    none = torch.zeros_like(both)
    return torch.stack([both, none, none, none, x_squares, g_squares])


def row_sums(rows: Tensor, g: Tensor) -> Tensor:
    """Return the sums ``[3, B]`` from which `row_bound` bounds norms of an embedding's gradients.

    The shapes of all tensors are independent of the data, so that a CUDA graph can contain this
    function.
    """
    examples, tokens = rows.shape
    order = rows.argsort(1)
    differs = rows.gather(1, order).diff(dim=1).ne(0).long()
    slot = torch.zeros_like(rows).scatter_(1, order[:, 1:], differs.cumsum(1))
    slot += tokens * torch.arange(examples, device=rows.device)[:, None]
    wide = wide_type(g, g)
    lengths = torch.linalg.vector_norm(g, dim=2, dtype=wide)

    def added(values: Tensor) -> Tensor:
        sums = values.new_zeros(values.shape, dtype=wide).flatten(0, 1)
        return sums.index_add_(0, slot.flatten(), values.to(wide).flatten(0, 1)).view(values.shape)

    squares = row_norms(added(g)).square().sum(1)
    sums = torch.linalg.vector_norm(added(torch.ones_like(lengths)) * added(lengths), dim=1)
    return torch.stack([squares, sums, lengths.square().sum(1)])


def place_of(tensor: Tensor) -> tuple[object, ...]:
    """Return what is equal for two tensors that view the same memory in the same way."""
    shape, stride = tensor.shape, tensor.stride()
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), shape, stride, tensor.dtype


def squared_norms_of_alike(xs: Sequence[Tensor], gs: Sequence[Tensor], bias: bool) -> Tensor:
    """Return upper bounds of squared norms for layers of equal shape, ``[inputs, B]``.

    For layers with the same input, the bound of their joint norm is returned.

    Args:
        xs: the argument ``activations`` of `dpbench.training.kernels.gram_norms`.
        gs: the argument ``gradients``.
        bias: whether the layers have a trained bias.
    """
    x, g, joined = xs[0], gs[0], len(gs) // len(xs)
    of_x, of_g = (product_error(each, by_kernel=by_kernel(x, g)) for each in (x, g))
    tokens, pieces = x.shape[1], gram_norms(xs, gs, bias).unbind(1)
    # The layers' products may add tokens in different orders. By the inequality of Cauchy and
    # Schwarz, the sum of the norms |B| of their products is at most joined^½ times the norm of the
    # sum, see "Sums over T tokens are rounded" above.
    rounding = joined**0.25 * of_sums(g.dtype, tokens)
    update = ProductError(rounding, of_terms(g.dtype, tokens))
    return gram_bound(pieces, tokens, (of_x, of_g.of_sum(joined)), g.dtype, update)
