"""Wrong trainers; each differs from `faulty.Looped` in a line or two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpbench import Batch
from tests.verify import faulty
from tests.verify.faulty import Gradients, Looped

normal = torch.randn_like


class Own(Looped):
    """The right trainer, with state that wrong ones use."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.number, self.kept, self.seed = 0, dict[Any, Any](), int(torch.randint(2**60, ()))
        self.spare = torch.Generator().manual_seed(self.seed)

    def train_step(self, batch: Batch) -> Tensor:
        self.number += 1
        return super().train_step(batch)

    def own(self) -> Tensor:
        """64 normal numbers, new in each step."""
        return torch.randn(64, generator=self.spare)


Noise = Callable[[Any, Tensor], Tensor]
Clip = Callable[[Any, Gradients], Gradients]


def noisy(name: str, noise: Noise) -> type[Own]:
    """A class of trainers with this noise."""
    return type(name, (Own,), {"noise": noise})


def clipping(name: str, clip: Clip) -> type[Own]:
    """A class of trainers with this clipping."""
    return type(name, (Own,), {"clip": clip})


def norm_of(gradients: Gradients) -> Tensor:
    return torch.stack([g.norm() for g in gradients.values()]).norm()


def scaled(gradients: Gradients, factor: Any) -> Gradients:
    return {name: g * factor for name, g in gradients.items()}


def right(trainer: Any, gradients: Gradients) -> Gradients:
    return Looped.clip(trainer, gradients)


def twice(noise: Tensor, other: Callable[[Tensor], Tensor]) -> Tensor:
    """Noise whose second half is a function of the first."""
    flat = noise.flatten()
    half = flat[: len(flat) // 2]
    return torch.cat([half, other(half), flat[2 * len(half) :]]).view_as(noise)


def again(trainer: Any, p: Tensor, key: Any) -> Tensor:
    """Noise that is drawn once for each parameter and key."""
    return trainer.kept.setdefault((key, p), normal(p))


def from_seed(p: Tensor, seed: int) -> Tensor:
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))


def trimmed(p: Tensor, most: float) -> Tensor:
    noise = normal(p)
    return torch.where(noise.abs() > most, normal(p).clamp(-most, most), noise)


NOISE: Mapping[str, Noise] = {
    "SecondHalfAgain": lambda t, p: twice(normal(p), lambda half: half),
    "SecondHalfMoved": lambda t, p: twice(normal(p), lambda half: half.roll(7)),
    "SecondHalfMixed": lambda t, p: twice(normal(p), lambda h: 0.6 * h + 0.8 * normal(h)),
    "TwoInTurn": lambda t, p: again(t, p, t.number % 2),
    "ThreeInTurn": lambda t, p: again(t, p, t.number % 3),
    "SevenInTurn": lambda t, p: again(t, p, t.number % 7),
    "FiftyInTurn": lambda t, p: again(t, p, t.number % 50),
    "FirstForEver": lambda t, p: again(t, p, 0),
    "MovedFirst": lambda t, p: again(t, p, 0).flatten().roll(t.number).view_as(p),
    "MixedWithLast": lambda t, p: 0.8 * normal(p) + 0.6 * again(t, p, 0),
    "SeedOfStep": lambda t, p: from_seed(p, 1000 * t.number + p.numel() + p.dim()),
    "SeedOfEightBits": lambda t, p: from_seed(p, int(torch.randint(256, ()))),
    "SeedOfShape": lambda t, p: from_seed(p, t.seed + 1000 * t.number + p.numel()),
    "SeedOfValues": lambda t, p: from_seed(p, int(p.detach().abs().sum() * 1e6)),
    "OneRow": lambda t, p: normal(p[:1]).expand_as(p),
    "OneColumn": lambda t, p: normal(p[..., :1]).expand_as(p),
    "EverySixtyFour": lambda t, p: t.own().repeat(-(-p.numel() // 64))[: p.numel()].view_as(p),
    "OneNumber": lambda t, p: torch.randn(()).expand_as(p),
    "FourSigmaCut": lambda t, p: trimmed(p, 4.0),
    "ThreeSigmaCut": lambda t, p: normal(p).clamp(-3, 3),
    "Uniform": lambda t, p: (torch.rand_like(p) - 0.5) * 12**0.5,
    "Laplace": lambda t, p: torch.distributions.Laplace(0.0, 0.5**0.5).sample(p.shape),
    "Signs": lambda t, p: normal(p).sign(),
    "RarelyLarge": lambda t, p: torch.where(torch.rand_like(p) < 1e-3, 6.0, normal(p)),
    "SumOfTwelve": lambda t, p: torch.rand(12, *p.shape).sum(0) - 6,
    "Coarse": lambda t, p: (normal(p) * 4).round() / 4,
    "OffCentre": lambda t, p: normal(p) + 0.05,
    "PositiveOnly": lambda t, p: normal(p).abs(),
    "SigmaRounded": lambda t, p: (
        normal(p) * round(t.noise_multiplier) / t.noise_multiplier
        if t.noise_multiplier
        else normal(p)
    ),
    "SigmaAtMostOne": lambda t, p: normal(p) * min(1, 1 / max(t.noise_multiplier, 1e-9)),
    "SigmaSquared": lambda t, p: normal(p) * t.noise_multiplier,
    "ThresholdAtMostOne": lambda t, p: normal(p) * min(1, 1 / t.max_grad_norm),
    "ByRootOfBatch": lambda t, p: normal(p) * t.batch_size**0.5 / 2,
    "ByParts": lambda t, p: normal(p) * t.micro_batches**0.5,
    "OnePercentLess": lambda t, p: normal(p) * 0.99,
    "SmallHaveNone": lambda t, p: normal(p) * (p.numel() > 100),
    "LargestHasNone": lambda t, p: normal(p) * (p is not max(t.trained.values(), key=Tensor.numel)),
    "OnlyFirstStep": lambda t, p: normal(p) * (t.number == 1),
    "EndsAfterHundred": lambda t, p: normal(p) * (t.number <= 100),
    "FirstStepWithout": lambda t, p: normal(p) * (t.number > 1),
}

CLIP: Mapping[str, Clip] = {
    "NormIsNaNSoUnclipped": lambda t, g: scaled(
        g, t.max_grad_norm / norm_of(g) if norm_of(g) > t.max_grad_norm else 1.0
    ),
    "NaNIsNoNorm": lambda t, g: scaled(
        g, (t.max_grad_norm / norm_of(g).nan_to_num(0, 0, 0)).clamp(max=1.0)
    ),
    "WholeUnclippedWithNoise": lambda t, g: (
        g if t.micro_batches == 1 and t.noise_multiplier > 1e-9 else right(t, g)
    ),
    "WholeUnclipped": lambda t, g: g if t.micro_batches == 1 else right(t, g),
    "PartsUnclipped": lambda t, g: right(t, g) if t.micro_batches == 1 else g,
    "UnclippedWithNoise": lambda t, g: g if t.noise_multiplier > 1e-9 else right(t, g),
    "UnclippedFromHalfSigma": lambda t, g: g if t.noise_multiplier > 0.04 else right(t, g),
    "ThrownAwayWithNoise": lambda t, g: scaled(right(t, g), t.noise_multiplier < 1e-3),
    "EachTenthStepUnclipped": lambda t, g: right(t, g) if t.number % 10 else g,
    "FirstStepsClipped": lambda t, g: right(t, g) if t.number <= 8 else g,
    "TwiceTheThreshold": lambda t, g: scaled(g, (2 * t.max_grad_norm / norm_of(g)).clamp(max=1.0)),
    "AlwaysToTheThreshold": lambda t, g: scaled(g, t.max_grad_norm / norm_of(g)),
    "BySquare": lambda t, g: scaled(g, (t.max_grad_norm / norm_of(g) ** 2).clamp(max=1.0)),
    "ByLargestElement": lambda t, g: scaled(
        g, (t.max_grad_norm / max(each.abs().max() for each in g.values())).clamp(max=1.0)
    ),
    "EachElement": lambda t, g: {
        n: x.clamp(-t.max_grad_norm, t.max_grad_norm) for n, x in g.items()
    },
    "WithoutLastParameter": lambda t, g: scaled(
        g, (t.max_grad_norm / norm_of(dict([*g.items()][:-1]))).clamp(max=1.0)
    ),
}


class LargestNormForThreshold(Own):
    """The deviation follows the largest clipped norm, not C."""

    def train_step(self, batch: Batch) -> Tensor:
        self.deviation = 0.0
        return super().train_step(batch)

    def clip(self, gradients: Gradients) -> Gradients:
        clipped = super().clip(gradients)
        here = self.noise_multiplier * float(norm_of(clipped))
        self.deviation = max(self.deviation, here)
        return clipped


class LastPartUnclipped(Own):
    def clipped_sum(self, part: Batch, losses: list[Tensor]) -> Gradients:
        self.part = getattr(self, "part", 0) + 1
        return super().clipped_sum(part, losses)

    def clip(self, gradients: Gradients) -> Gradients:
        last = self.micro_batches > 1 and self.part % self.micro_batches == 0
        return gradients if last else super().clip(gradients)


class MiddlePartUnclipped(LastPartUnclipped):
    def clip(self, gradients: Gradients) -> Gradients:
        middle = self.part % self.micro_batches > 1
        return gradients if middle else Looped.clip(self, gradients)


class KeepsData(Own):
    """Keeps the mean loss in a buffer, without noise."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        model.register_buffer("loss", torch.zeros(()))

    def train_step(self, batch: Batch) -> Tensor:
        loss = super().train_step(batch)
        self.model.loss.mul_(0.9).add_(loss, alpha=0.1)  # type: ignore[operator, union-attr]
        return loss


class NoiseOfTheLoss(Own):
    """The seed of the noise is the loss."""

    def clipped_sum(self, part: Batch, losses: list[Tensor]) -> Gradients:
        total = super().clipped_sum(part, losses)
        torch.manual_seed(int(losses[0] * 1e6))
        return total


OWN = [
    LargestNormForThreshold,
    LastPartUnclipped,
    MiddlePartUnclipped,
    KeepsData,
    NoiseOfTheLoss,
    faulty.MeanOfParts,
    faulty.WrongBatchSize,
    faulty.AccumulatesForEver,
    faulty.ByBatch,
    faulty.NoiseTwice,
]

ALL: dict[str, Callable[..., Any]] = {
    **{name: noisy(name, noise) for name, noise in NOISE.items()},
    **{name: clipping(name, clip) for name, clip in CLIP.items()},
    **{each.__name__: each for each in OWN},
}
globals().update(ALL)  # a case names them
