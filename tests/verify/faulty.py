"""A right private trainer, which loops over examples, and trainers with faults that users had."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from dpbench import Batch, FusedTrainer, StandardTrainer, TrainerBase, Workload
from dpbench.training.base import mean_of
from dpbench.training.correlated_noise import NOISES
from dpbench.training.norms import PRODUCTS
from dpbench.training.per_layer import LinearRule, Saved
from dpbench.workloads.base import examples_in, parts_of

Gradients = dict[str, Tensor]


def is_empty(batch: Batch) -> bool:
    return not examples_in(batch)


class Looped(TrainerBase):
    """A right trainer: clips one example at a time."""

    labels: Mapping[str, str] = MappingProxyType({"clips": "flat"})

    def __init__(self, model: nn.Module, *, batch_size: int, **options: Any) -> None:
        super().__init__(model, batch_size=batch_size, **options)
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.divisor = batch_size
        self.deviation = self.noise_multiplier * self.max_grad_norm

    def train_step(self, batch: Batch) -> Tensor:
        sums = {name: torch.zeros_like(p) for name, p in self.trained.items()}
        losses = []
        for _, part in self.parts(batch):
            for name, gradient in self.clipped_sum(part, losses).items():
                sums[name] += gradient
        for name, parameter in self.trained.items():
            noise = self.noise(parameter)
            parameter.grad = self.mean(sums[name] + self.deviation * noise)
        self.plain_optimizer.step()
        return mean_of(losses)

    def clipped_sum(self, part: Batch, losses: list[Tensor]) -> Gradients:
        total = {name: torch.zeros_like(p) for name, p in self.trained.items()}
        for example in parts_of(part, [1] * examples_in(part)):
            loss = self.example_losses(self.model, example).mean()
            found = torch.autograd.grad(loss, [*self.trained.values()])
            losses.append(loss.detach())
            for name, gradient in self.clip(dict(zip(self.trained, found, strict=True))).items():
                total[name] += gradient
        return total

    def clip(self, gradients: Gradients) -> Gradients:
        norm = torch.stack([g.norm() for g in gradients.values()]).norm()
        factor = (self.max_grad_norm / norm).clamp(max=1.0)
        return {name: g * factor for name, g in gradients.items()}

    def noise(self, parameter: Tensor) -> Tensor:
        return torch.randn_like(parameter)

    def mean(self, noisy_sum: Tensor) -> Tensor:
        return noisy_sum / self.divisor


class SkipsEmpty(Looped):
    """Does not add noise where a batch is empty, which tells that it was."""

    def train_step(self, batch: Batch) -> Tensor:
        return torch.zeros(()) if is_empty(batch) else super().train_step(batch)


class DividesBySampled(Looped):
    """Takes the mean over the examples that were sampled."""

    def train_step(self, batch: Batch) -> Tensor:
        self.divisor = examples_in(batch) or self.batch_size
        return super().train_step(batch)


class WithoutClosure(Looped):
    """A right trainer that calls ``step(closure=None)``."""

    def __init__(self, model: nn.Module, *, batch_size: int, **options: Any) -> None:
        super().__init__(model, batch_size=batch_size, **options)
        step = self.plain_optimizer.step
        self.plain_optimizer.step = lambda: step(closure=None)


class AdaptersUnclipped(Looped):
    """Opacus #820: gradients of low-rank adapters are not clipped."""

    def clip(self, gradients: Gradients) -> Gradients:
        clipped = super().clip(gradients)
        return {n: gradients[n] if n.endswith("up.weight") else g for n, g in clipped.items()}


class GhostThatDiffers(FusedTrainer):
    """Opacus #692: ghost norms differ from per-sample norms; here they sum the norms of tokens."""

    known_ways = (PRODUCTS,)

    def squared_norms(self, seen: dict[nn.Module, Saved]) -> list[Tensor]:
        linear = {layer: calls for layer, calls in seen.items() if isinstance(layer, nn.Linear)}
        norms = super().squared_norms({n: calls for n, calls in seen.items() if n not in linear})
        for layer, calls in linear.items():
            x, g = LinearRule(layer, "").joined(calls)
            norms.append((x.square().sum(2) * g.square().sum(2)).sum(1))
        return norms


class MeanOfParts(Looped):
    """Opacus #683: the gradients of micro-batches are averaged, not summed."""

    def clipped_sum(self, part: Batch, losses: list[Tensor]) -> Gradients:
        total = super().clipped_sum(part, losses)
        return {name: g / self.micro_batches for name, g in total.items()}


class AccumulatesForEver(Looped):
    """Never resets its sums of gradients."""

    def train_step(self, batch: Batch) -> Tensor:
        return super().train_step(batch)

    def clipped_sum(self, part: Batch, losses: list[Tensor]) -> Gradients:
        total = super().clipped_sum(part, losses)
        self.kept = {
            n: g + getattr(self, "kept", total)[n] * hasattr(self, "kept") for n, g in total.items()
        }
        return self.kept


class WrongBatchSize(Looped):
    """Divides by half the batch size."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.divisor = self.batch_size // 2


class ByLayerCalledFlat(Looped):
    """Clips each parameter's gradient to C/√n, but its label says flat."""

    def clip(self, gradients: Gradients) -> Gradients:
        share = self.max_grad_norm / len(gradients) ** 0.5
        return {n: g * (share / g.norm()).clamp(max=1.0) for n, g in gradients.items()}


class ByLayer(ByLayerCalledFlat):
    """Clips each parameter's gradient to C/√n, as its label says."""

    labels = MappingProxyType({"clips": "per layer"})


class ByBatch(Looped):
    """Clips the micro-batch's gradient, not per-sample gradients."""

    def clip(self, gradients: Gradients) -> Gradients:
        return gradients

    def clipped_sum(self, part: Batch, losses: list[Tensor]) -> Gradients:
        total = super().clipped_sum(part, losses)
        size = examples_in(part)
        mean = {name: g / size for name, g in total.items()}
        return {name: g * size for name, g in super().clip(mean).items()}


class LeavesOneOut(Looped):
    """Never updates one parameter."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        del self.trained["head.weight"]


class TrainsWhatIsFrozen(Looped):
    def train_step(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1 if parameter.requires_grad else 0.999)
        return super().train_step(batch)


class NotFinite(Looped):
    def clip(self, gradients: Gradients) -> Gradients:
        return {name: g / 0 for name, g in gradients.items()}


class NoiseTwice(Looped):
    """Adds noise for each micro-batch."""

    def clipped_sum(self, part: Batch, losses: list[Tensor]) -> Gradients:
        total = super().clipped_sum(part, losses)
        return {n: g + self.deviation * torch.randn_like(g) for n, g in total.items()}


class HalfTheNoise(Looped):
    def noise(self, parameter: Tensor) -> Tensor:
        return torch.randn_like(parameter) / 2


class OneParameterWithoutNoise(Looped):
    def noise(self, parameter: Tensor) -> Tensor:
        return super().noise(parameter) * (parameter is not self.trained["final_norm.bias"])


class UniformNoise(Looped):
    """Noise has the right deviation, but is uniform."""

    def noise(self, parameter: Tensor) -> Tensor:
        return (torch.rand_like(parameter) - 0.5) * 12**0.5


class NoiseOfRows(Looped):
    """All rows get the same noise."""

    def noise(self, parameter: Tensor) -> Tensor:
        return torch.randn_like(parameter[:1]).expand_as(parameter)


class NoiseOfParameters(Looped):
    """Reseeds the generator for each parameter."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.seed = int(torch.randint(2**60, ()))

    def train_step(self, batch: Batch) -> Tensor:
        self.seed += 1
        return super().train_step(batch)

    def noise(self, parameter: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(parameter.shape, generator=generator)


class NoiseOfSteps(NoiseOfParameters):
    """Reseeds the generator in each step."""

    def train_step(self, batch: Batch) -> Tensor:
        self.generator = torch.Generator().manual_seed(self.seed)
        return Looped.train_step(self, batch)

    def noise(self, parameter: Tensor) -> Tensor:
        return torch.randn(parameter.shape, generator=self.generator)


class NoiseOfRuns(NoiseOfSteps):
    """The seed is a constant."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.seed = 1

    def train_step(self, batch: Batch) -> Tensor:
        self.seed += 1
        return super().train_step(batch)


OF_THE_MODULE = torch.Generator().manual_seed(0)


class NoiseOfProcesses(Looped):
    """The generator is a module constant, the same in each process."""

    def noise(self, parameter: Tensor) -> Tensor:
        return torch.randn(parameter.shape, generator=OF_THE_MODULE)


class Banded(Looped):
    """A right trainer whose noise is correlated over steps."""

    noises = NOISES

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.drawn: list[Gradients] = []
        self.used = self.noise_weights

    def train_step(self, batch: Batch) -> Tensor:
        self.drawn.insert(0, {name: self.draw(p) for name, p in self.trained.items()})
        return super().train_step(batch)

    def draw(self, parameter: Tensor) -> Tensor:
        return torch.randn_like(parameter)

    def noise(self, parameter: Tensor) -> Tensor:
        name = next(name for name, p in self.trained.items() if p is parameter)
        weighted = zip(self.used, self.drawn, strict=False)
        total = torch.zeros_like(parameter)
        return sum((weight * drawn[name] for weight, drawn in weighted), total)


class IndependentCalledBanded(Banded):
    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.used = self.noise_weights[:1]


class BandDropped(Banded):
    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.used = self.noise_weights[:-1]


class WeightsShifted(Banded):
    """Each earlier noise gets the weight of the one before it."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        newest, *others = self.noise_weights
        self.used = (newest, 0.0, *others)


class OneSeedForAllSteps(Banded):
    def draw(self, parameter: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(len(parameter))
        return torch.randn(parameter.shape, generator=generator)


class BandedWithoutSensitivity(Banded):
    """The newest noise has the weight 1, whatever the sensitivity."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.used = tuple(weight / self.noise_weights[0] for weight in self.noise_weights)


class NoiseWithoutThreshold(Looped):
    """Noise has the deviation σ/B, without C."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.deviation = self.noise_multiplier


class NoiseTwiceOfOne(Looped):
    def noise(self, parameter: Tensor) -> Tensor:
        again = torch.randn_like(parameter) * (parameter is self.trained["final_norm.bias"])
        return super().noise(parameter) + again


class ClipsWithoutNoise(Looped):
    """Clips only if σ is 0."""

    def clip(self, gradients: Gradients) -> Gradients:
        return gradients if self.noise_multiplier else super().clip(gradients)


class NoiseInstead(Looped):
    """Noise replaces the gradient."""

    def clipped_sum(self, part: Batch, losses: list[Tensor]) -> Gradients:
        total = super().clipped_sum(part, losses)
        return {name: g * (self.noise_multiplier == 0) for name, g in total.items()}


class OwnOptimizer(Looped):
    """Updates parameters without its optimizer."""

    def train_step(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            for parameter in self.trained.values():
                parameter.add_(1)
        return mean_of([self.mean_loss(self.model, batch).detach()])


class SaysNothing(Looped):
    """Its label says that it clips per block, which verify does not know."""

    labels = MappingProxyType({"clips": "per block"})


class Unlabelled(StandardTrainer):
    """The standard trainer under another name."""


class OnlyFloat32(Workload):
    """A model that casts its input to float32."""

    def model(self) -> nn.Module:
        return nn.Linear(4, 6)

    def batches(self, batch_size: int) -> Iterator[Batch]:
        while True:
            yield torch.randn(batch_size, 4)

    def losses(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        return (3 * model(batch.float())).sin().sum(1)


class Random(OnlyFloat32):
    """The loss is random."""

    def losses(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        return model(batch.to(next(model.parameters()).dtype)).sum(1) * torch.rand(len(batch))
