"""Upper bounds of norms of per-sample gradients, from layers' inputs and output gradients.

`dpbench.training.norm_ways` chooses how to compute the norms. `squared_norms_of_alike` returns
bounds of squared norms for layers of equal shape. For large layers on a GPU, one kernel computes
sums over the products T × T, where T is the number of tokens. Other operators compute the bounds
from these sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dpbench.training.kernels import (
    by_kernel,
    gram_norms,
    gram_sums,
    products,
    wide_product,
    wide_type,
)
from dpbench.training.norm_bounds import (
    ProductError,
    gradient_bound,
    gram_bound,
    product_error,
    row_bound,
    row_norms,
    sample_bound,
    squared_sample_norms,
    with_rounding,
)
from dpbench.training.norm_ways import PRODUCTS


class GhostNorms:
    """Computes upper bounds of squared norms, for each example and each part of its gradient.

    A part is, for example, the gradient of one layer. The parts are added layer by layer. Each
    bound takes about twenty small kernels, whose launches would make a step slower. So
    `squared_norms` computes the bounds of all layers with equal settings at once. Until then, only
    the sums or norms that the bounds need are kept.
    """

    def __init__(self) -> None:
        self._parts: dict[tuple[Any, ...], list[Tensor]] = {}

    def add(
        self,
        x: Tensor,
        g: Tensor,
        *,
        way: str = PRODUCTS,
        weight: bool = True,
        bias: bool = False,
        summed_in: torch.dtype | None = None,
        tf32: bool | None = None,
    ) -> None:
        """Add a linear layer or an embedding.

        Args:
            x: activations ``[B, T, K]`` of a linear layer, or row indices ``[B, T]`` int64 of an
                embedding.
            g: output gradients, ``[B, T, N]``.
            way: ``products`` computes the norms from products T × T, and ``gradient`` from
                per-sample gradients.
            weight: whether the weight is trained.
            bias: whether the bias is trained.
            summed_in: dtype in which the update sums over tokens, if it is narrower than float32.
            tf32: whether the update may use TF32, which only the way ``products`` considers; None
                if the setting for matrix products decides. Convolutions have their own setting.
        """
        tokens = g.shape[1]
        if weight and way == PRODUCTS:
            errors = product_error(x), product_error(g)
            sums = gram_sums(*products(x, g), bias)
            self._put(sums, gram_bound, tokens, errors, g.dtype, summed_in, tf32)
            return
        if x.dim() == 2:
            self._put(row_sums(x, g), row_bound, tokens, g.dtype, summed_in)
            return
        lengths = torch.linalg.vector_norm(g, dim=2, dtype=wide_type(g, g))
        if weight:
            of_x = torch.linalg.vector_norm(x, dim=2, dtype=lengths.dtype)
            samples, error = wide_product(g.mT, x), product_error(g.mT, x)
            self._put_gradient(samples, of_x * lengths, error, tokens, g.dtype)
        if bias:
            samples, error = g.sum(1, dtype=torch.float64), ProductError(tokens * 2.0**-53, 0.0)
            self._put_gradient(samples, lengths, error, tokens, g.dtype)

    def _put_gradient(
        self, samples: Tensor, lengths: Tensor, error: ProductError, tokens: int, dtype: torch.dtype
    ) -> None:
        squares = row_norms(samples).square().sum(1)
        sums = torch.stack([squares.to(lengths.dtype), lengths.sum(1), lengths.square().sum(1)])
        self._put(sums, gradient_bound, tokens, error, dtype)

    def add_samples(
        self,
        samples: Tensor,
        dtype: torch.dtype,
        rounded: Tensor | None = None,
        *,
        by_product: bool = False,
    ) -> None:
        """Add per-sample gradients that are in memory.

        Args:
            samples: the per-sample gradients, ``[B, …]``.
            dtype: dtype of the parameter.
            rounded: upper bounds of the norms of the differences between ``samples`` and the
                gradients that the update uses, ``[B]``; None if the update uses ``samples``.
            by_product: see `sample_bound`; only if ``rounded`` is None.
        """
        # The update is assumed to round to the narrower of the two dtypes.
        dtype = min(dtype, samples.dtype, key=lambda each: each.itemsize)
        if rounded is not None:
            squares = squared_sample_norms(samples, dtype)
            self._put(torch.stack([squares, rounded.to(squares.dtype)]), off_bound, dtype)
            return
        norms = row_norms(samples)
        width = samples.shape[-1] if samples.dim() > 1 else 1
        self._put(norms, sample_bound, width, dtype, by_product)

    def _put(self, part: Tensor, bound: Callable[..., Tensor], *about: object) -> None:
        self._parts.setdefault((bound, part.dtype, *about), []).append(part)

    def squared_norms(self) -> list[Tensor]:
        """Return for each part upper bounds of squared norms, ``[B]``, in float32 or wider."""
        kinds = self._parts.items()
        made = [bound(parts, *about) for (bound, _, *about), parts in kinds]
        return [each for norms in made for each in norms.unbind()]


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


def off_bound(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return upper bounds of squared norms, ``[layers, B]``.

    Args:
        parts: for each layer a tensor ``[2, B]``. Its first row has the squared norms of per-sample
            gradients. Its second row bounds the norms of their differences from the gradients that
            the update uses.
        dtype: dtype of the update.
    """
    squares, rounded = torch.stack([*parts], 1)
    return with_rounding(squares, rounded, dtype)


def squared_norms_of_alike(xs: Sequence[Tensor], gs: Sequence[Tensor], bias: bool) -> Tensor:
    """Return upper bounds of the squared norms for layers of equal shape, ``[layers, B]``.

    Args:
        xs: for each layer the argument ``x`` of `GhostNorms.add`.
        gs: for each layer the argument ``g`` of `GhostNorms.add`.
        bias: whether the layers have a trained bias.
    """
    x, g = xs[0], gs[0]
    errors = [product_error(each, by_kernel=by_kernel(x, g)) for each in (x, g)]
    parts = gram_norms(xs, gs, bias).unbind(1)
    return gram_bound(parts, x.shape[1], (errors[0], errors[1]), g.dtype)
