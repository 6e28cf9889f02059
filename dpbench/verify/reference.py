"""Computes the correct gradient of a private step, with a loop over examples and no hooks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from dpbench.core.errors import ConfigurationError
from dpbench.workloads.base import Batch, examples_in, part_sizes, parts_of

Gradients = Mapping[str, Tensor]
"""Gradients, keyed by the names of trained parameters."""

CLIPS = ("flat", "per layer")
"""Values of a trainer's label ``clips``. ``flat`` clips an example's whole gradient to the clipping
threshold C. ``per layer`` clips the gradient of each of n parameters to C/√n."""

Threshold = float | list[float]
"""The clipping threshold C, or a threshold for each parameter. The norm of the list is C."""

NEGLIGIBLE = 1e-6
"""A gradient whose norm is below this share of the largest norm counts as rounding error. One case
is the gradient of the bias of attention keys, which is 0 without rounding."""


@dataclass(frozen=True)
class Examples:
    """Per-sample gradients of a batch of B examples, by parameter, each ``[B, …]`` float32.

    Means are sums divided by ``expected`` if it is set, otherwise by the number of examples.
    """

    gradients: Gradients
    expected: int | None = None

    def chosen(self, kept: slice | Tensor, expected: int | None = None) -> Examples:
        """Return the gradients of the examples that ``kept`` selects, with a new ``expected``."""
        chosen = {name: gradient[kept] for name, gradient in self.gradients.items()}
        return Examples(chosen, expected)

    @classmethod
    def joined(cls, batches: Sequence[Examples]) -> Examples:
        """Join the gradients of several batches into one batch."""
        names = batches[0].gradients
        return cls({name: torch.cat([each.gradients[name] for each in batches]) for name in names})

    @classmethod
    def computed(
        cls, model: nn.Module, batch: Batch, losses: Callable[[nn.Module, Batch], Tensor]
    ) -> Examples:
        """Compute the gradients with one backward pass per example.

        ``losses`` returns one loss for each example of a batch.
        """
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        each = []
        for example in parts_of(batch, [1] * examples_in(batch)):
            model.zero_grad(set_to_none=True)
            losses(model, example).sum().backward()  # reentrant checkpointing needs backward()
            found = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained.values()]
            each.append([gradient.float() for gradient in found])
        model.zero_grad(set_to_none=True)
        stacked = map(torch.stack, zip(*each, strict=True))
        return cls(dict(zip(trained, stacked, strict=True)))

    @cached_property
    def norms(self) -> Tensor:
        """The norm of each per-sample gradient, ``[examples, parameters]`` float64."""
        each = [g.double().reshape(len(g), math.prod(g.shape[1:])) for g in self._each]
        return torch.stack([torch.linalg.vector_norm(g, dim=1) for g in each], dim=1)

    @cached_property
    def sizes(self) -> dict[str, float]:
        """The norm of each parameter's mean gradient, without clipping."""
        unclipped = self.mean(torch.ones_like(self.norms))
        return {name: float(gradient.norm()) for name, gradient in unclipped.items()}

    @cached_property
    def float32_error(self) -> float:
        """The largest relative error if PyTorch computes norms of per-sample gradients in float32.

        Float32 sums of millions of squares have relative errors of about 1e-5 or more.
        """
        rounded = torch.stack([g.reshape(len(g), -1).norm(2, dim=1) for g in self._each], dim=1)
        return float((rounded - self.norms).abs().div(self.norms).nan_to_num(posinf=0.0).max())

    @property
    def _each(self) -> Sequence[Tensor]:
        return [*self.gradients.values()]

    def factors(self, clips: str, threshold: Threshold, added: float = 1e-6) -> Tensor:
        """Return the clipping factors, ``[examples, parameters]``.

        ``added`` is added to the norms. Opacus adds 1e-6.
        """
        norms, limit = self.norms, self.norms.new_tensor(threshold)
        if clips == "flat":
            norms, limit = norms.norm(dim=1, keepdim=True), limit.norm()
        elif not limit.ndim:
            limit = limit / len(self.gradients) ** 0.5
        factors: Tensor = (limit / (norms + added)).clamp(max=1.0)
        return factors.expand_as(self.norms)

    def mean_factors(self, threshold: Threshold, parts: int) -> Tensor:
        """Return the factors of a known mistake: clipping the mean gradient of each micro-batch."""
        sizes = part_sizes(len(self.norms), parts)
        means = [
            torch.stack([p.mean(0).flatten() for p in g.double().split(sizes)]) for g in self._each
        ]
        norms = torch.cat(means, dim=1).norm(dim=1)
        of_parts: Tensor = (norms.new_tensor(threshold).norm() / norms).clamp(max=1.0)
        each = of_parts.repeat_interleave(torch.tensor(sizes, device=norms.device))
        return each[:, None].expand_as(self.norms)

    def mean(self, factors: Tensor) -> Gradients:
        """Return the mean over examples of factor × gradient."""
        return {name: self.mean_of(name, factors) for name in self.gradients}

    def mean_of(self, name: str, factors: Tensor) -> Tensor:
        """Return `mean` for one parameter."""
        of_examples = factors[:, [*self.gradients].index(name)] / (self.expected or len(factors))
        gradients = self.gradients[name]
        mean: Tensor = torch.tensordot(of_examples.to(gradients.dtype), gradients, 1)
        return mean.double()

    def candidate_means(self, clips: str, threshold: Threshold, parts: int) -> dict[str, Tensor]:
        """Return clipping factors, keyed by a description of the resulting mean.

        The correct factors come first, then the factors of common mistakes.
        """
        [other] = {*CLIPS} - {clips}
        return {
            f"the mean of gradients clipped {clips}": self.factors(clips, threshold),
            "the mean of gradients that are not clipped": torch.ones_like(self.norms),
            f"the mean of gradients clipped {other}": self.factors(other, threshold),
            "the batch's gradient, clipped as one": self.mean_factors(threshold, 1),
            "the mean of micro-batches' gradients, clipped": self.mean_factors(threshold, parts),
        }

    def diagnose(self, name: str, seen: Tensor, known: Mapping[str, Tensor], near: float) -> str:
        """Describe a wrong gradient as a multiple of a known mean.

        Return "" if the gradient is a multiple of no mean in ``known``, or equals the first mean,
        which is the correct mean.

        Args:
            name: the parameter.
            seen: the wrong gradient.
            known: the factors of known means, by description.
            near: the largest relative difference at which a gradient counts as a multiple of a
                mean.
        """
        if not seen.isfinite().all():
            return "not finite"
        if not seen.any():
            return "does not move"
        found = []
        for order, (words, factors) in enumerate(known.items()):
            gradient = self.mean_of(name, factors)
            times = float((seen * gradient).sum() / gradient.square().sum())
            if (seen - times * gradient).norm() <= near * seen.norm():
                scaled = abs(times - 1) > near
                found.append((scaled, order, f"{times:.4g} times {words}" if scaled else words))
        first = min(found, default=(True, 0, ""))
        return "" if first[:2] == (False, 0) else first[2]


def thresholds(batches: Sequence[Examples], clips: str) -> tuple[float, float, float]:
    """Return clipping thresholds that about half, all and none of the norms exceed.

    Negligible norms (see `NEGLIGIBLE`) are ignored.
    """
    norms = torch.cat([examples.norms for examples in batches])
    share = norms.shape[1] ** 0.5
    if clips == "flat":
        norms, share = norms.norm(dim=1), 1.0
    largest = float(norms.max())
    if not 0 < largest < math.inf:
        raise ConfigurationError(
            f"no gradient can be verified: the largest norm of an example's gradient is {largest}"
        )
    norms = norms[norms > NEGLIGIBLE * largest]
    return float(norms.median()) * share, float(norms.min()) / 2 * share, 10 * largest * share


def distances(seen: Gradients, wanted: Gradients, sizes: Mapping[str, float]) -> dict[str, float]:
    """Return the relative error of each parameter's gradient. An error of NaN becomes infinite.

    Errors are divided by the norm of the wanted gradient. But if no loss depends on a parameter,
    the error is divided by 1 % of the largest norm in ``sizes``.
    """
    largest = max(sizes.values())
    found = {}
    for name, gradient in wanted.items():
        if not largest:  # an empty batch: nothing may move
            found[name] = math.inf if seen[name].any() else 0.0
            continue
        depends = sizes[name] >= NEGLIGIBLE * largest
        size = float(gradient.norm()) if depends else 0.01 * largest
        far = float((seen[name] - gradient).norm()) / size
        found[name] = math.inf if math.isnan(far) else far
    return found
