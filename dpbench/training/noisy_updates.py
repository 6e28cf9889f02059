"""Operators that draw noise and add it at once, in Triton for a GPU and in PyTorch for a CPU.

Both operators add ``deviation × z`` to a sum of clipped gradients, where z is standard normal. On a
GPU, a Triton kernel draws z with the generator Philox (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", 2011). On a CPU, and for float64, PyTorch's generator draws z. The seed is an
int64, and each step has a new seed. If both operators get the same seed on the same device, they
draw the same z. The operators compute in float32 or wider, and round each result once.

Noise that is correlated over steps (`dpbench.training.correlated_noise`) is not kept in memory.
Instead, the noise of earlier steps is drawn again from the earlier seeds. Then z is the weighted
sum ``w[0] × z(seed[0]) + w[1] × z(seed[1]) + …``, where seed[0] is the seed of this step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpbench.training.kernels import triton_kernels


class Numbers(NamedTuple):
    """Scalars of an update of parameters p, where gradients have moving averages m and v.

    The update computes new values from the old values and the noise z, in this order:

    - g = ``scale`` × (gradient + ``deviation`` × z) + ``decay`` × p
    - m = ``first_kept`` × m + ``first_added`` × g
    - v = ``second_kept`` × v + ``second_added`` × g²
    - p = ``kept`` × p - ``rate`` × change

    The change is g for the rule ``plain``, m for ``momentum``, g + ``first_kept`` × m for
    ``nesterov``, and m ∕ (√v × ``correction`` + ``eps``) for ``adam``.
    """

    deviation: float
    scale: float
    rate: float = 0.0
    decay: float = 0.0
    kept: float = 1.0
    first_kept: float = 0.0
    first_added: float = 1.0
    second_kept: float = 0.0
    second_added: float = 1.0
    correction: float = 1.0
    eps: float = 0.0


def noisy_update(
    parameters: Tensor,
    moments: Sequence[Tensor],
    gradient: Tensor,
    seed: Tensor,
    rule: str,
    numbers: Numbers,
    weights: Tensor | None = None,
) -> None:
    """Draw noise and update parameters, on a GPU in one pass over the tensors.

    The pass reads each tensor once, and writes the parameters and moving averages once. If the
    parameters have P bytes, the pass moves 3 P bytes without moving averages, 5 P bytes with one
    moving average, and 7 P bytes with two moving averages.

    Args:
        parameters: the parameters, ``[n]``; changed in place.
        moments: the rule's moving averages, each ``[n]``; changed in place.
        gradient: the sum of clipped gradients, ``[n]``.
        seed: seed of the noise, int64. With ``weights``, it has one seed for each weight.
        rule: ``plain``, ``momentum``, ``nesterov`` or ``adam``.
        numbers: the scalars of the update.
        weights: for each seed, the weight of its noise, float32; None for one seed. The first
            weight is 1.
    """
    torch.ops.dpbench.noisy_update(parameters, moments, gradient, seed, rule, numbers, weights)


def noisy_mean(
    gradient: Tensor, seed: Tensor, deviation: float, scale: float, weights: Tensor | None = None
) -> None:
    """Replace ``gradient`` by ``scale`` × (gradient + ``deviation`` × noise), in place."""
    torch.ops.dpbench.noisy_mean(gradient, seed, deviation, scale, weights)


def _noisy(
    gradient: Tensor, seed: Tensor, deviation: float, scale: float, weights: Tensor | None
) -> Tensor:
    device, wide = gradient.device, torch.promote_types(gradient.dtype, torch.float32)
    factors = [1.0] if weights is None else weights.tolist()
    total = gradient.to(wide, copy=True)
    for each, weight in zip(seed.view(-1).tolist(), factors, strict=True):
        generator = torch.Generator(device).manual_seed(each)
        noise = torch.randn(gradient.shape, generator=generator, device=device, dtype=wide)
        total.add_(noise, alpha=deviation * weight)
    return total.mul_(scale)


def _mean(
    gradient: Tensor, seed: Tensor, deviation: float, scale: float, weights: Tensor | None = None
) -> None:
    gradient.copy_(_noisy(gradient, seed, deviation, scale, weights))


def _update(
    parameters: Tensor,
    moments: Sequence[Tensor],
    gradient: Tensor,
    seed: Tensor,
    rule: str,
    numbers: Sequence[float],
    weights: Tensor | None = None,
) -> None:
    n = Numbers(*numbers)
    change = _noisy(gradient, seed, n.deviation, n.scale, weights)
    value = parameters.to(change.dtype)
    change = change + n.decay * value
    if rule != "plain":
        mean = n.first_kept * moments[0].to(change.dtype) + n.first_added * change
        moments[0].copy_(mean)
        if rule == "adam":
            square = n.second_kept * moments[1].to(change.dtype) + n.second_added * change.square()
            moments[1].copy_(square)
            change = mean / (square.sqrt() * n.correction + n.eps)
        else:
            change = change + n.first_kept * mean if rule == "nesterov" else mean
    parameters.copy_(n.kept * value - n.rate * change)


def _launch(
    flats: Sequence[Tensor],
    seed: Tensor,
    rule: str,
    numbers: Sequence[float],
    weights: Tensor | None,
) -> None:
    if blocks := -(-flats[-1].numel() // 4096):
        kernel, bands = triton_kernels()["noisy_update"], seed.numel()
        factors = seed if weights is None else weights  # the kernel reads no weights for one seed
        length = flats[-1].numel()
        kernel[blocks,](*flats, length, seed, factors, *numbers, rule, 1024, bands, num_warps=8)


def _mean_on_gpu(
    gradient: Tensor, seed: Tensor, deviation: float, scale: float, weights: Tensor | None = None
) -> None:
    _launch([gradient] * 4, seed, "mean", Numbers(deviation, scale), weights)


def _update_on_gpu(
    parameters: Tensor,
    moments: Sequence[Tensor],
    gradient: Tensor,
    seed: Tensor,
    rule: str,
    numbers: Sequence[float],
    weights: Tensor | None = None,
) -> None:
    first, second = [*moments, parameters, parameters][:2]  # the kernel reads no missing moments
    _launch([parameters, first, second, gradient], seed, rule, numbers, weights)


def _define(
    name: str, arguments: str, function: Callable[..., None], on_gpu: Callable[..., None]
) -> None:
    """Define an operator. Its Triton kernel computes in float32, so PyTorch handles float64."""

    def by_dtype(*arguments: Any) -> None:
        (function if arguments[0].dtype == torch.float64 else on_gpu)(*arguments)

    torch.library.define(f"dpbench::{name}", f"({arguments}) -> ()")
    torch.library.impl(f"dpbench::{name}", "CompositeExplicitAutograd", function)
    torch.library.impl(f"dpbench::{name}", "CUDA", by_dtype)
    torch.library.register_fake(f"dpbench::{name}", lambda *_: None)


_define(
    "noisy_mean",
    "Tensor(a!) gradient, Tensor seed, float deviation, float scale, Tensor? weights=None",
    _mean,
    _mean_on_gpu,
)
_define(
    "noisy_update",
    "Tensor(a!) parameters, Tensor(b!)[] moments, Tensor gradient, Tensor seed, str rule, "
    "float[] numbers, Tensor? weights=None",
    _update,
    _update_on_gpu,
)
