"""What the gradient of a private step must be: a loop over examples, without Opacus or hooks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from dpbench.core.errors import ConfigurationError
from dpbench.workloads.base import Batch, examples_in, parts_of

Gradients = Mapping[str, Tensor]
"""The gradient of each trained parameter, by its name."""

CLIPS = ("flat", "per layer")
"""What a trainer's label ``clips`` may say: ``flat``, an example's whole gradient to C; ``per
layer``, that of each of n parameters to C/√n."""

NEGLIGIBLE = 1e-6
"""Of the largest gradient: a parameter with less has only rounding, such as the bias of keys."""


@dataclass(frozen=True)
class Examples:
    """The gradients of the examples of a batch, one at a time, each ``[B, …]`` float32."""

    gradients: Gradients

    def chosen(self, kept: slice) -> Examples:
        """Some of them."""
        return Examples({name: gradient[kept] for name, gradient in self.gradients.items()})

    @classmethod
    def joined(cls, batches: Sequence[Examples]) -> Examples:
        """Those of several batches as if of one."""
        names = batches[0].gradients
        return cls({name: torch.cat([each.gradients[name] for each in batches]) for name in names})

    @classmethod
    def of(
        cls, model: nn.Module, batch: Batch, losses: Callable[[nn.Module, Batch], Tensor]
    ) -> Examples:
        """By one backward for each example; ``losses`` gives ``[1]`` for a batch of one."""
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        each = []
        for example in parts_of(batch, examples_in(batch)):
            loss = losses(model, example).sum()
            found = torch.autograd.grad(
                loss, [*trained.values()], allow_unused=True, materialize_grads=True
            )
            each.append([gradient.float() for gradient in found])
        stacked = map(torch.stack, zip(*each, strict=True))
        return cls(dict(zip(trained, stacked, strict=True)))

    @cached_property
    def norms(self) -> Tensor:
        """Of each example's gradient of each parameter, ``[B, parameters]`` float64."""
        each = [g.double().reshape(len(g), -1) for g in self._each]
        return torch.stack([torch.linalg.vector_norm(g, dim=1) for g in each], dim=1)

    @cached_property
    def sizes(self) -> dict[str, float]:
        """The norm of each parameter's gradient if no example is clipped."""
        unclipped = self.mean(torch.ones_like(self.norms))
        return {name: float(gradient.norm()) for name, gradient in unclipped.items()}

    @cached_property
    def norms_off(self) -> float:
        """By how much of it PyTorch's own float32 norm of a gradient is off, at most.

        On a CPU it adds up millions of squares one by one: 2e-5 of 2.4 million elements.
        """
        rounded = torch.stack([g.reshape(len(g), -1).norm(2, dim=1) for g in self._each], dim=1)
        return float((rounded - self.norms).abs().div(self.norms).nan_to_num(posinf=0.0).max())

    @property
    def _each(self) -> Sequence[Tensor]:
        return [*self.gradients.values()]

    def factors(self, clips: str, threshold: float, added: float = 1e-6) -> Tensor:
        """What gradients are multiplied by, ``[B, parameters]``; Opacus adds 1e-6 to norms."""
        if clips == "per layer":
            norms, threshold = self.norms, threshold / len(self.gradients) ** 0.5
        else:
            norms = self.norms.norm(dim=1, keepdim=True)
        factors: Tensor = (threshold / (norms + added)).clamp(max=1.0)
        return factors.expand_as(self.norms)

    def by_batch(self, threshold: float, parts: int) -> Tensor:
        """The factors of those who clip the mean of each micro-batch, and no example's gradient."""
        means = [g.double().reshape(parts, len(g) // parts, -1).mean(1) for g in self._each]
        norms = torch.cat(means, dim=1).norm(dim=1)
        of_parts: Tensor = (threshold / norms).clamp(max=1.0)
        each = of_parts.repeat_interleave(len(self.norms) // parts)
        return each[:, None].expand_as(self.norms)

    def mean(self, factors: Tensor) -> Gradients:
        """The mean over examples of their gradients, each times its factor."""
        return {name: self.mean_of(name, factors) for name in self.gradients}

    def mean_of(self, name: str, factors: Tensor) -> Tensor:
        """That of one parameter."""
        of_examples = factors[:, [*self.gradients].index(name)] / len(factors)
        gradients = self.gradients[name]
        mean: Tensor = torch.tensordot(of_examples.to(gradients.dtype), gradients, 1)
        return mean.double()

    def known(self, clips: str, threshold: float, parts: int) -> dict[str, Tensor]:
        """What a mean of gradients may be, in words, what it should be first; and its factors."""
        [other] = {*CLIPS} - {clips}
        return {
            f"the mean of gradients clipped {clips}": self.factors(clips, threshold),
            "the mean of gradients that are not clipped": torch.ones_like(self.norms),
            f"the mean of gradients clipped {other}": self.factors(other, threshold),
            "the batch's gradient, clipped as one": self.by_batch(threshold, 1),
            "the mean of micro-batches' gradients, clipped": self.by_batch(threshold, parts),
        }

    def explained(self, name: str, seen: Tensor, known: Mapping[str, Tensor], near: float) -> str:
        """Which of the known a parameter's wrong gradient is, or how many times; empty if none."""
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
    """One threshold that half of the norms exceed, one that all do, and one that none does."""
    norms = torch.cat([examples.norms for examples in batches])
    share = norms.shape[1] ** 0.5
    if clips == "flat":
        norms, share = norms.norm(dim=1), 1.0
    largest = float(norms.max())
    if not 0 < largest < math.inf:
        raise ConfigurationError(
            f"no gradient to verify: the largest norm of an example's is {largest}"
        )
    norms = norms[norms > NEGLIGIBLE * largest]
    return float(norms.median()) * share, float(norms.min()) / 2 * share, 10 * largest * share


def distances(seen: Gradients, wanted: Gradients, sizes: Mapping[str, float]) -> dict[str, float]:
    """How far each parameter's gradient is off, as a part of its norm.

    Of a parameter that no loss depends on, as a part of 0.01 of the largest unclipped gradient:
    1e-5 of that is rounding.
    """
    largest = max(sizes.values())
    found = {}
    for name, gradient in wanted.items():
        depends = sizes[name] >= NEGLIGIBLE * largest
        size = float(gradient.norm()) if depends else 0.01 * largest
        far = float((seen[name] - gradient).norm()) / size
        found[name] = math.inf if math.isnan(far) else far
    return found
