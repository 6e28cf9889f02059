"""Noise that is correlated over steps, with earlier noise kept in memory.

One operator adds ``banded`` noise, and another adds ``blt`` noise. A Triton kernel runs both on a
GPU, in one pass over the tensors. PyTorch runs both on a CPU and for float64. The operators compute
in the dtype of the kept noise. The kernel rounds the result once to the dtype of the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dpbench.training.correlated_noise import Mechanism
from dpbench.training.kernels import triton_kernels


class KeptNoise:
    """Adds correlated noise to tensors, and keeps in memory what later steps need.

    For ``banded`` noise, the normal samples of earlier steps are kept. For ``blt`` noise, the
    buffers of the mechanism are kept. Both are kept in float32 or wider, as in jax-privacy, because
    in bf16 sums would lose small terms.

    Args:
        mechanism: the mechanism of ``blt`` noise, or of ``banded`` noise with at least two weights.
            For other noise, `add_to` must not be called.
    """

    def __init__(self, mechanism: Mechanism) -> None:
        self._weights, self._decays, self._shares = mechanism
        self._rows = len(self._decays) or len(self._weights) - 1
        self._kept: dict[Hashable, Tensor] = {}
        self._steps: dict[Hashable, int] = {}
        self._on_device: dict[Hashable, Tensor] = {}

    def add_to(
        self,
        total: Tensor,
        deviation: float,
        key: Hashable,
        generator: torch.Generator | None = None,
    ) -> None:
        """Add the noise of this step, in place.

        Args:
            total: the tensor to which noise is added, contiguous; changed in place.
            deviation: standard deviation of the normal sample z that this step draws.
            key: identifies the tensor. Later steps must pass the same key for the same sum.
            generator: draws z; None for PyTorch's default generator.
        """
        flat, wide = total.view(-1), torch.promote_types(total.dtype, torch.float32)
        if key not in self._kept:
            self._kept[key] = flat.new_zeros(self._rows, len(flat), dtype=wide)
            self._steps[key] = 0
        kept, oldest = self._kept[key], self._steps[key] % self._rows
        self._steps[key] += 1
        z = torch.empty_like(flat, dtype=wide).normal_(std=deviation, generator=generator)
        if self._decays:
            weights = self._tensor((self._weights[0], *self._shares), kept)
            add_buffered(flat, z, kept, weights, self._tensor(self._decays, kept))
        else:
            ages = ((oldest - row - 1) % self._rows + 1 for row in range(self._rows))
            of_row = (self._weights[0], *(self._weights[age] for age in ages))
            add_banded(flat, z, kept, self._tensor(of_row, kept), out=kept[oldest])

    def _tensor(self, numbers: tuple[float, ...], like: Tensor) -> Tensor:
        """Return a tensor of ``numbers`` on the device of ``like``.

        The numbers are copied to the device only once, because a copy makes the CPU wait.
        """
        place = numbers, like.dtype, like.device
        if place not in self._on_device:
            self._on_device[place] = torch.tensor(numbers, dtype=like.dtype, device=like.device)
        return self._on_device[place]


def add_banded(total: Tensor, z: Tensor, kept: Tensor, weights: Tensor, *, out: Tensor) -> None:
    """Add to ``total`` the weighted sum of ``z`` and the kept samples, and keep ``z``.

    Args:
        total: the sum of clipped gradients, ``[n]``; changed in place.
        z: the sample of this step, ``[n]``.
        kept: the samples of earlier steps, ``[rows, n]``.
        weights: the weight of ``z``, and then the weight of each row, ``[1 + rows]``.
        out: the row of ``kept`` that ``z`` replaces.
    """
    torch.ops.dpbench.add_banded.default(total, z, kept, weights, out=out)


def add_buffered(total: Tensor, z: Tensor, kept: Tensor, weights: Tensor, decays: Tensor) -> None:
    """Add ``weights[0]`` × y to ``total``, where y is z minus the weighted sum of the buffers.

    Each buffer is multiplied by its decay, and y is added to it.

    Args:
        total: the sum of clipped gradients, ``[n]``; changed in place.
        z: the sample of this step, ``[n]``.
        kept: the buffers, ``[rows, n]``; changed in place.
        weights: the weight of y, and then the weight of each buffer in the sum that is subtracted
            from z, ``[1 + rows]``.
        decays: the decay of each buffer, ``[rows]``.
    """
    torch.ops.dpbench.add_buffered.default(total, z, kept, weights, decays)


def _add_banded(total: Tensor, z: Tensor, kept: Tensor, weights: Tensor, *, out: Tensor) -> None:
    total.add_(kept.mT @ weights[1:] + weights[0] * z)
    out.copy_(z)


def _add_buffered(total: Tensor, z: Tensor, kept: Tensor, weights: Tensor, decays: Tensor) -> None:
    newest = z - kept.mT @ weights[1:]
    kept.mul_(decays[:, None]).add_(newest)
    total.add_(weights[0] * newest)


def _add_banded_on_gpu(
    total: Tensor, z: Tensor, kept: Tensor, weights: Tensor, *, out: Tensor
) -> None:
    if kept.dtype == torch.float64:
        _add_banded(total, z, kept, weights, out=out)
    else:
        _launch(total, z, kept, out, weights, weights, False)


def _add_buffered_on_gpu(
    total: Tensor, z: Tensor, kept: Tensor, weights: Tensor, decays: Tensor
) -> None:
    if kept.dtype == torch.float64:
        _add_buffered(total, z, kept, weights, decays)
    else:
        _launch(total, z, kept, z, weights, decays, True)


def _launch(
    total: Tensor,
    z: Tensor,
    kept: Tensor,
    out: Tensor,
    weights: Tensor,
    decays: Tensor,
    buffered: bool,
) -> None:
    """Launch the kernel, which computes in float32. It ignores ``out`` if ``buffered`` is True."""
    rows, length = kept.shape
    if blocks := -(-length // 1024):
        triton_kernels()["add_kept_noise"][blocks,](
            total, z, kept, out, weights, decays, length, rows, buffered, 1024
        )


def _define(
    name: str, arguments: str, function: Callable[..., None], on_gpu: Callable[..., None]
) -> None:
    torch.library.define(f"dpbench::{name}", f"({arguments}) -> ()")
    torch.library.impl(f"dpbench::{name}", "CompositeExplicitAutograd", function)
    torch.library.impl(f"dpbench::{name}", "CUDA", on_gpu)
    torch.library.register_fake(f"dpbench::{name}", lambda *_, **__: None)


_define(
    "add_banded",
    "Tensor(a!) total, Tensor z, Tensor kept, Tensor weights, *, Tensor(b!) out",
    _add_banded,
    _add_banded_on_gpu,
)
_define(
    "add_buffered",
    "Tensor(a!) total, Tensor z, Tensor(b!) kept, Tensor weights, Tensor decays",
    _add_buffered,
    _add_buffered_on_gpu,
)


@register_flop_formula(torch.ops.dpbench.add_banded)
def _(_total: Any, _z: Any, kept: Any, _weights: Any, *, out: Any = None, **_: Any) -> int:
    return int(2 * (kept[0] + 1) * kept[1])


@register_flop_formula(torch.ops.dpbench.add_buffered)
def _(_total: Any, _z: Any, kept: Any, *_: Any, **__: Any) -> int:
    return int((4 * kept[0] + 3) * kept[1])
