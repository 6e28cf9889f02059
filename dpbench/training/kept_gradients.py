"""Per-sample gradients that backward made, kept from the norms to the update."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import torch
from torch import Tensor

from dpbench.training.ghost_norms import GhostNorms
from dpbench.training.gradient_sums import LARGE, Sums
from dpbench.training.kernels import weighted_sum

ROW = 128
"""Small gradients are concatenated and cut into rows of this many numbers; each row has a norm."""


class KeptGradients:
    """Per-sample gradients ``[B, …]``; small ones are concatenated, to launch few kernels.

    Args:
        samples: the gradients, by parameter; the dictionary is emptied.
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
        """The squared norms of parts of each example's gradient, each ``[B]``."""
        norms = GhostNorms()
        for (first, *_), samples in self._joined:
            norms.add_samples(samples.unflatten(1, (-1, ROW)), first.dtype)
        for parameter, samples in self._large.items():
            norms.add_samples(samples, parameter.dtype)
        return norms.squared_norms()

    def put_small(self, factors: Tensor, sums: Sums) -> None:
        """Add to ``sums`` the clipped gradients of all small parameters, summed over examples."""
        while self._joined:
            parameters, samples = self._joined.pop()
            total = samples.new_empty(samples.shape[1], dtype=parameters[0].dtype)
            weighted_sum(samples, factors, total)
            sizes = [parameter.numel() for parameter in parameters]
            parts = total[: sum(sizes)].split(sizes)
            sums.put_all({p: part.view(p.shape) for p, part in zip(parameters, parts, strict=True)})

    def put(self, parameters: Collection[Tensor], factors: Tensor, sums: Sums) -> None:
        """The same for the large ones among these parameters; free their per-sample gradients."""
        for parameter in parameters:
            if parameter in self._large:
                samples = self._large.pop(parameter).flatten(1)
                sums.put_made(parameter, partial(weighted_sum, samples, factors))
