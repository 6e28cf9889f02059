"""Operators that draw noise as they use it: written in Triton for a GPU, in PyTorch for a CPU.

Both operators add ``deviation × z`` to a sum of clipped gradients, where z is standard normal. On a
GPU, Philox draws z (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011); on a CPU,
PyTorch's generator does. The seed is one int64, a new one for each step. On one device both
operators draw the same z from a seed. They compute in float32 or wider, and round once.

Noise that is correlated over steps (`dpbench.training.correlated_noise`) is not kept in memory: the
noise of earlier steps is drawn again from their seeds. z is then
``w[0] × z(seed[0]) + w[1] × z(seed[1]) + …``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpbench.training.kernels import triton_kernels


class Numbers(NamedTuple):
    """The scalars of an update of parameters p, with moving averages m and v of gradients.

    - g = ``scale`` × (gradient + ``deviation`` × z) + ``decay`` × p
    - m = ``first_kept`` × m + ``first_added`` × g; v = ``second_kept`` × v + ``second_added`` × g²
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
    """Draw noise and update parameters in one pass, which reads and writes each tensor once.

    P bytes of parameters move 3 P bytes without moving averages, 5 P with one, and 7 P with two.

    Args:
        parameters: flat; changed in place.
        moments: the moving averages that the rule has, of the same length; changed in place.
        gradient: the sum of clipped gradients, of the same length.
        seed: the noise's seed, int64; with ``weights``, one seed per weight.
        rule: ``plain``, ``momentum``, ``nesterov`` or ``adam``.
        numbers: see `Numbers`.
        weights: the weight of each seed's noise, float32, the first 1; None for one seed.
    """
    torch.ops.dpbench.noisy_update(parameters, moments, gradient, seed, rule, numbers, weights)


def noisy_mean(
    gradient: Tensor, seed: Tensor, deviation: float, scale: float, weights: Tensor | None = None
) -> None:
    """Replace ``gradient``, in place, by ``scale`` × (gradient + ``deviation`` × z)."""
    torch.ops.dpbench.noisy_mean(gradient, seed, deviation, scale, weights)


def _noisy(
    gradient: Tensor, seed: Tensor, deviation: float, scale: float, weights: Tensor | None
) -> Tensor:
    device, wide = gradient.device, torch.promote_types(gradient.dtype, torch.float32)
    of_each = [1.0] if weights is None else weights.tolist()
    total = gradient.to(wide, copy=True)
    for each, weight in zip(seed.view(-1).tolist(), of_each, strict=True):
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
        of_each = seed if weights is None else weights  # not read if there is one seed
        length = flats[-1].numel()
        kernel[blocks,](*flats, length, seed, of_each, *numbers, rule, 1024, bands, num_warps=8)


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
    first, second = [*moments, parameters, parameters][:2]  # unused ones are not read
    _launch([parameters, first, second, gradient], seed, rule, numbers, weights)


def _define(
    name: str, arguments: str, function: Callable[..., None], on_gpu: Callable[..., None]
) -> None:
    """Define an operator. The kernel computes in float32, so float64 uses PyTorch."""

    def by_type(*given: Any) -> None:
        (function if given[0].dtype == torch.float64 else on_gpu)(*given)

    torch.library.define(f"dpbench::{name}", f"({arguments}) -> ()")
    torch.library.impl(f"dpbench::{name}", "CompositeExplicitAutograd", function)
    torch.library.impl(f"dpbench::{name}", "CUDA", by_type)
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
