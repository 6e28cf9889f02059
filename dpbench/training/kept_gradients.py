"""Per-sample gradients that stay in memory from the backward until they are summed."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import torch
from torch import Tensor

from dpbench.training.ghost_norms import GhostNorms
from dpbench.training.gradient_sums import LARGE, Sums
from dpbench.training.kernels import weighted_sum

ROW = 128
"""Small gradients are concatenated, and then divided into rows of this many numbers. Each row has
its own norm."""


class KeptGradients:
    """Per-sample gradients of several layers.

    Small gradients are concatenated, so that few kernels are launched.

    Args:
        samples: the per-sample gradients ``[B, …]``, by parameter. The constructor empties this
            dictionary.
    """

    def __init__(self, samples: dict[Tensor, Tensor]) -> None:
        small = {p: g for p, g in samples.items() if p.numel() < LARGE}
        self._large = {p: g for p, g in samples.items() if p not in small}
        samples.clear()
        self._joined: list[tuple[list[Tensor], Tensor]] = []
        for dtype in dict.fromkeys(each.dtype for each in small.values()):
            alike = [p for p, each in small.items() if each.dtype == dtype]
            parts = [(each := small.pop(p)).reshape(len(each), p.numel()) for p in alike]
            rest = -sum(part.shape[1] for part in parts) % ROW
            parts.append(parts[0].new_zeros(len(parts[0]), rest))
            self._joined.append((alike, torch.cat(parts, 1)))

    def squared_norms(self) -> list[Tensor]:
        """Return for each part of the gradient the squared norms of all examples, ``[B]``."""
        norms = GhostNorms()
        for (first, *_), samples in self._joined:
            norms.add_samples(samples.unflatten(1, (-1, ROW)), first.dtype)
        for parameter, samples in self._large.items():
            norms.add_samples(samples, parameter.dtype)
        return norms.squared_norms()

    def add_small(self, factors: Tensor, sums: Sums) -> None:
        """Add the clipped gradients of all small parameters to ``sums``."""
        while self._joined:
            parameters, samples = self._joined.pop()
            total = samples.new_empty(samples.shape[1], dtype=parameters[0].dtype)
            weighted_sum(samples, factors, total)
            sizes = [parameter.numel() for parameter in parameters]
            parts = total[: sum(sizes)].split(sizes)
            totals = zip(parameters, parts, strict=True)
            sums.add_many({parameter: part.view(parameter.shape) for parameter, part in totals})

    def add_large(self, parameters: Collection[Tensor], factors: Tensor, sums: Sums) -> None:
        """Add the clipped gradients of the large parameters among ``parameters`` to ``sums``.

        The per-sample gradients of these parameters are freed.
        """
        for parameter in parameters:
            if parameter in self._large:
                samples = self._large.pop(parameter).flatten(1)
                sums.add_written(parameter, partial(weighted_sum, samples, factors))
