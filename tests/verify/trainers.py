"""Trainers that loop over examples: right ones, and wrong ones that differ in a line or two."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils import _pytree as pytree

from dpbench import Batch, FusedTrainer, StandardTrainer, TrainerBase, Workload
from dpbench.training.base import mean_of
from dpbench.training.correlated_noise import NOISES
from dpbench.training.norms import PRODUCTS
from dpbench.training.per_layer import LinearRule, Saved
from dpbench.workloads.base import examples_in, parts_of
from tests.verify.over_ranks import Small

Gradients = dict[str, Tensor]
normal = torch.randn_like


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


class Own(Looped):
    """The right trainer with a number of the step, state, and functions around the step."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.number, self.part, self.kept = 0, 0, dict[Any, Any]()
        self.seed = int(torch.randint(2**60, ()))
        self.spare = torch.Generator().manual_seed(self.seed)
        self.raw: Gradients = {}
        self.prepare()

    def prepare(self) -> None:
        """Runs once."""

    def before(self) -> None:
        """Runs before each step."""

    def after(self, loss: Tensor) -> None:
        """Runs after each step."""

    def batch(self, batch: Batch) -> Batch:
        """Replaces the batch."""
        return batch

    def train_step(self, batch: Batch) -> Tensor:
        self.number, self.raw = self.number + 1, {}
        with torch.no_grad():
            self.before()
        loss = super().train_step(self.batch(batch))
        with torch.no_grad():
            self.after(loss)
        return loss

    def clip(self, gradients: Gradients) -> Gradients:
        self.raw = {n: g + self.raw.get(n, 0) for n, g in gradients.items()}
        return self.clipped(gradients)

    def clipped(self, gradients: Gradients) -> Gradients:
        return right(self, gradients)

    def clipped_sum(self, part: Batch, losses: list[Tensor]) -> Gradients:
        total = self.summed(super().clipped_sum(part, losses))
        self.part += 1
        return total

    def summed(self, gradients: Gradients) -> Gradients:
        """Replaces the sum of a micro-batch, of number ``part``."""
        return gradients

    def own(self) -> Tensor:
        """64 normal numbers, new in each step."""
        return torch.randn(64, generator=self.spare)

    @property
    def group(self) -> dict[str, Any]:
        return self.plain_optimizer.param_groups[0]

    def buffer(self, name: str, size: int = 1) -> Tensor:
        """A buffer of the model, registered when it is first used."""
        if not hasattr(self.model, name):
            self.model.register_buffer(name, torch.zeros(size))
        found: Tensor = getattr(self.model, name)
        return found


class BySelf(Own):
    """Moves parameters without its optimizer."""

    def train_step(self, batch: Batch) -> Tensor:
        step, self.plain_optimizer.step = self.plain_optimizer.step, lambda: self.move()
        try:
            return super().train_step(batch)
        finally:
            self.plain_optimizer.step = step

    def move(self) -> None:
        """Runs in place of the optimizer's step."""


def norm_of(gradients: Gradients) -> Tensor:
    return torch.stack([g.norm() for g in gradients.values()]).norm()


def scaled(gradients: Gradients, factor: Any) -> Gradients:
    return {name: g * factor for name, g in gradients.items()}


def right(trainer: Any, gradients: Gradients) -> Gradients:
    return Looped.clip(trainer, gradients)


def to_threshold(t: Any, g: Gradients, norm: Tensor) -> Gradients:
    return scaled(g, (t.max_grad_norm / norm).clamp(max=1.0))


def sigma(trainer: Any) -> float:
    found: float = trainer.noise_multiplier
    return found


def is_bias(trainer: Any, parameter: Tensor) -> bool:
    """True for one of the biases, or for a linear layer's only one."""
    names = {n for n, p in trainer.trained.items() if p is parameter}
    return bool(names & {"norm.bias", "0.bias"})


# --- noise ----------------------------------------------------------------------------------------


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


def weaker(share: float, when: Callable[[Any], bool]) -> Callable[..., Tensor]:
    return lambda t, p: normal(p) * (share if when(t) else 1.0)


def rounded(digits: int) -> Callable[..., Tensor]:
    return lambda t, p: (
        normal(p)
        * (
            round(t.noise_multiplier, digits) / t.noise_multiplier
            if t.noise_multiplier > 1e-9
            else 1
        )
    )


def rows_read(t: Any, p: Tensor) -> Tensor:
    """Noise for rows with a gradient only, as with sparse gradients."""
    raw = next(x for n, x in t.raw.items() if t.trained[n] is p)
    return normal(p) * raw.reshape(len(raw), -1).any(1).reshape(-1, *[1] * (p.dim() - 1))


def of_time(t: Any, p: Tensor) -> Tensor:
    """The generator is seeded by the second in which the trainer is made."""
    t.kept.setdefault("generator", torch.Generator().manual_seed(int(time.time())))
    return torch.randn(p.shape, generator=t.kept["generator"])


def as_dtype(dtype: torch.dtype) -> Callable[[Any, Tensor], Tensor]:
    return lambda t, p: normal(p.to(dtype)).to(p.dtype)


def four_draws(t: Any, p: Tensor) -> Tensor:
    """As Opacus's secure mode, against holes in the range of floats."""
    return sum((normal(p) for _ in range(4)), torch.zeros_like(p)) / 2


def drawn_ahead(t: Any, p: Tensor) -> Tensor:
    """The next step's noise is drawn in the step before."""
    noise: Tensor = t.kept.get(p, normal(p))
    t.kept[p] = normal(p)
    return noise


def of_one_vector(t: Any, p: Tensor) -> Tensor:
    sizes = [each.numel() for each in t.trained.values()]
    if t.kept.get("step") != t.number:
        t.kept.update(step=t.number, parts=[*torch.randn(sum(sizes)).split(sizes)])
    noise: Tensor = t.kept["parts"].pop(0)
    return noise.view_as(p)


# --- clipping -------------------------------------------------------------------------------------


def share_of_each(t: Any, g: Gradients) -> Gradients:
    """Clips each parameter to C by itself."""
    return {n: x * (t.max_grad_norm / x.norm()).clamp(max=1.0) for n, x in g.items()}


def clipped_if(when: Callable[[Any], bool], other: Callable[..., Gradients]) -> Any:
    return lambda t, g: other(t, g) if when(t) else right(t, g)


def unclipped(_: Any, g: Gradients) -> Gradients:
    return g


def by_last_norm(t: Any, g: Gradients) -> Gradients:
    """The norm is cached from the example before."""
    norm, t.kept["norm"] = t.kept.get("norm", norm_of(g)), norm_of(g)
    return scaled(g, (t.max_grad_norm / norm).clamp(max=1.0))


def by_first_norm(t: Any, g: Gradients) -> Gradients:
    """Factors of the first batch are used for ever, as from a captured graph."""
    factors = t.kept.setdefault("factors", [])
    if t.number <= 3:
        factors.append((t.max_grad_norm / norm_of(g)).clamp(max=1.0))
        return scaled(g, factors[-1])
    t.kept["i"] = t.kept.get("i", -1) + 1
    return scaled(g, factors[t.kept["i"] % len(factors)])


def norm_of_16_bits(t: Any, g: Gradients) -> Gradients:
    return to_threshold(t, g, norm_of({n: x.bfloat16() for n, x in g.items()}).float())


def norm_of_rows(t: Any, g: Gradients) -> Gradients:
    """The tied weight counts as two parameters: as rows that are read, and as rows that are not."""
    tied = {n: x for n, x in g.items() if n == "embedding.weight"}
    used = {n: x * (x.norm(dim=1, keepdim=True) > x.norm(dim=1).mean()) for n, x in tied.items()}
    rest = {n + "2": tied[n] - x for n, x in used.items()}
    halves = {n: x.norm() + rest[n + "2"].norm() for n, x in used.items()}
    return to_threshold(t, g, norm_of({**g, **halves}))


def norm_of_first_part(t: Any, g: Gradients) -> Gradients:
    """Each later micro-batch has the norms of the first, whose tensor is reused."""
    if t.kept.get("step") != t.number:
        t.kept.update(step=t.number, norms=[], i=0)
    size = max(t.batch_size // t.micro_batches, 1)
    if len(t.kept["norms"]) < size:
        t.kept["norms"].append(norm_of(g))
        return right(t, g)
    t.kept["i"] += 1
    return to_threshold(t, g, t.kept["norms"][(t.kept["i"] - 1) % size])


def without_biases(t: Any, g: Gradients) -> Gradients:
    return to_threshold(t, g, norm_of({n: x for n, x in g.items() if x.dim() > 1}))


def scaled_loss(t: Any, g: Gradients) -> Gradients:
    """Clips the gradients of a loss that is scaled for 16 bits."""
    return scaled(right(t, scaled(g, 2.0**10)), 2.0**-10)


def own_momentum(t: Any, g: Gradients) -> Gradients:
    """Each example's gradient is added to momentum that is then clipped with it."""
    total = {n: x + 0.1 * t.kept.get(n, 0) for n, x in g.items()}
    t.kept.update(g)
    return right(t, total)


# --- what surrounds the step ----------------------------------------------------------------------


def move_by_raw(t: Any, _: Any) -> None:
    for n, p in t.trained.items():
        p.sub_(t.group["lr"] * t.raw[n] / t.batch_size)


def second_moment(t: Any, _: Any) -> None:
    """The second moment is made of raw gradients."""
    for n, p in t.trained.items():
        t.plain_optimizer.state[p]["exp_avg_sq"].copy_(t.raw[n].square())


def clean_master(t: Any, _: Any) -> None:
    """Parameters are overwritten by weights of its own, which get no noise."""
    for n, p in t.trained.items():
        p.copy_(t.kept[n] - t.group["lr"] * t.raw[n] / norm_of(t.raw))


def keep_start(t: Any) -> None:
    t.kept.update({n: p.clone() for n, p in t.trained.items()})


def stats(t: Any, loss: Tensor) -> None:
    buffer = t.buffer("stats", 2)
    buffer[0], buffer[1] = norm_of(t.trained), loss


def raw_average(t: Any, _: Any) -> None:
    first = next(iter(t.raw.values())).flatten()
    t.buffer("average", len(first)).lerp_(first, 0.1)


def each(k: int, do: Callable[[Any, Tensor], None]) -> Callable[[Any, Tensor], None]:
    return lambda t, loss: do(t, loss) if t.number % k == 0 else None


def save(name: str) -> Callable[[Any, Tensor], None]:
    return lambda t, loss: t.buffer(name).copy_(loss) and None


def add(t: Any, loss: Tensor) -> None:
    t.buffer("total").add_(loss)


def replace_buffer(t: Any, loss: Tensor) -> None:
    t.buffer("loss")
    t.model.loss = loss.reshape(1)


def largest_norm(t: Any, _: Any) -> None:
    t.buffer("largest").copy_(norm_of(t.raw))


def decay(t: Any, *_: Any) -> None:
    for p in t.trained.values():
        p.mul_(1 - 1e-4 * t.group["lr"])


def clamp(t: Any, _: Any) -> None:
    for p in t.trained.values():
        p.clamp_(-0.5, 0.5)


def average(t: Any, _: Any) -> None:
    first = next(iter(t.trained.values())).flatten()
    t.buffer("average", len(first)).lerp_(first, 0.1)


def look_ahead(t: Any, _: Any) -> None:
    for n, p in t.trained.items():
        p.lerp_(t.kept[n], 0.5)


def warm_up(t: Any) -> None:
    rate = t.kept.setdefault("rate", t.group["lr"])
    t.group["lr"] = rate * min(1, t.number / 10)


def from_zero(t: Any) -> None:
    rate = t.kept.setdefault("rate", t.group["lr"])
    t.group["lr"] = rate * (t.number - 1) / 10


def cosine(t: Any, _: Any) -> None:
    if "schedule" not in t.kept:
        t.kept["schedule"] = torch.optim.lr_scheduler.ExponentialLR(t.plain_optimizer, 0.99)
    t.kept["schedule"].step()


def move_master(t: Any) -> None:
    with torch.no_grad():
        for n, p in t.trained.items():
            t.kept[n] -= t.group["lr"] * p.grad
            p.copy_(t.kept[n])


def move_plainly(t: Any) -> None:
    with torch.no_grad():
        for p in t.trained.values():
            p.sub_(t.group["lr"] * p.grad)


def move_by_sums(t: Any) -> None:
    """Never resets its sums."""
    with torch.no_grad():
        for n, p in t.trained.items():
            t.kept[n] = t.kept.get(n, 0) + p.grad
            p.sub_(t.group["lr"] * t.kept[n])


def own_adam(t: Any) -> None:
    t.plain_optimizer = torch.optim.Adam(t.trained.values(), lr=t.group["lr"])


def mask(t: Any) -> None:
    t.model.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))


def count(t: Any, _: Any) -> None:
    t.buffer("count").add_(1)


def adapt(t: Any, _: Any) -> None:
    """The threshold follows the norms, without noise."""
    t.max_grad_norm *= 0.9 if float(norm_of(t.raw)) < 4 * t.max_grad_norm else 1.1


def stale(t: Any, batch: Batch) -> Batch:
    """The third step is captured, with a batch that nobody copies to."""
    return t.kept.setdefault("batch", batch.clone()) if t.number >= 2 else batch


def stale_layer(t: Any, batch: Batch) -> Batch:
    """Captured after 11 warm-up steps, with half of a batch."""
    if t.number < 11:
        return batch
    first = t.kept.setdefault("batch", batch)
    return (batch[0], first[1]) if isinstance(batch, tuple) else first


def shadow(t: Any, _: Any) -> None:
    """An average of parameters that moved by the raw gradient."""
    for i, (n, p) in enumerate(t.trained.items()):
        clean = p + t.group["lr"] * (p.grad - t.raw[n] / t.batch_size)
        t.buffer(f"shadow{i}", p.numel()).lerp_(clean.flatten(), 0.1)


def noise_after(t: Any) -> None:
    """Noise is subtracted from parameters, not added to gradients."""
    with torch.no_grad():
        for p in t.trained.values():
            p.sub_(t.group["lr"] * p.grad)
            p.sub_(t.group["lr"] * t.noise_multiplier * t.max_grad_norm * normal(p) / t.batch_size)


def shuffled(t: Any, batch: Batch) -> Batch:
    order = torch.randperm(len(batch[0] if isinstance(batch, tuple) else batch))
    return tuple(b[order] for b in batch) if isinstance(batch, tuple) else batch[order]


def norm_of_update(t: Any, _: Any) -> None:
    t.buffer("of_update").copy_(norm_of({n: p.grad for n, p in t.trained.items()}))


def signs(t: Any, _: Any) -> None:
    first = next(iter(t.trained.values())).grad.flatten()
    t.buffer("signs", len(first)).copy_(first.sign())


def accumulated(t: Any, total: Gradients) -> Gradients:
    """Never resets its sums of gradients."""
    t.kept = {n: g + t.kept.get(n, 0) for n, g in total.items()}
    return t.kept  # type: ignore[no-any-return]


def of_the_loss(t: Any, total: Gradients) -> Gradients:
    """The seed of the noise is made of the gradients."""
    torch.manual_seed(int(norm_of(total) * 1e6))
    return total


def by_sampled(t: Any, batch: Batch) -> Batch:
    """Takes the mean over the examples that were sampled."""
    t.divisor = examples_in(batch) or t.batch_size
    return batch


def per_layer(t: Any, g: Gradients) -> Gradients:
    share = t.max_grad_norm / len(g) ** 0.5
    return {n: x * (share / x.norm()).clamp(max=1.0) for n, x in g.items()}


def adapters_unclipped(t: Any, g: Gradients) -> Gradients:
    """Opacus #820: gradients of low-rank adapters are not clipped."""
    return right(t, g) | {n: x for n, x in g.items() if n.endswith("up.weight")}


def thaw(t: Any) -> None:
    for parameter in t.model.parameters():
        parameter.mul_(1 if parameter.requires_grad else 0.999)


def with_closure(closure: Any) -> Callable[[Any], None]:
    def prepare(t: Any) -> None:
        step = t.plain_optimizer.step
        t.plain_optimizer.step = lambda: step(closure=closure)

    return prepare


# --- classes --------------------------------------------------------------------------------------


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


class SkipsEmpty(Looped):
    """Does not add noise where a batch is empty, which tells that it was."""

    def train_step(self, batch: Batch) -> Tensor:
        return super().train_step(batch) if examples_in(batch) else torch.zeros(())


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


class ByBatch(Looped):
    """Clips the micro-batch's gradient, not per-sample gradients."""

    def clip(self, gradients: Gradients) -> Gradients:
        return gradients

    def clipped_sum(self, part: Batch, losses: list[Tensor]) -> Gradients:
        total = super().clipped_sum(part, losses)
        size = examples_in(part)
        mean = {name: g / size for name, g in total.items()}
        return {name: g * size for name, g in super().clip(mean).items()}


class SeedsTorch(Looped):
    """Seeds PyTorch, so that runs can be compared."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        torch.manual_seed(0)
        super().__init__(model, **options)


class SeedByDefault(FusedTrainer):
    """Takes seed 0 if it is given none."""

    def __init__(self, model: nn.Module, *, seed: int | None = None, **options: Any) -> None:
        super().__init__(model, seed=seed or 0, **options)


class Banded(Looped):
    """A right trainer whose noise is correlated over steps."""

    noises = NOISES

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.drawn: list[Gradients] = []

    def train_step(self, batch: Batch) -> Tensor:
        self.drawn.insert(0, {name: self.draw(p) for name, p in self.trained.items()})
        return super().train_step(batch)

    def draw(self, parameter: Tensor) -> Tensor:
        return normal(parameter)

    def used(self, weights: tuple[float, ...]) -> tuple[float, ...]:
        """Replaces the weights of the noise of this step, the step before, and so on."""
        return weights

    def noise(self, parameter: Tensor) -> Tensor:
        name = next(name for name, p in self.trained.items() if p is parameter)
        weighted = zip(self.used(self.noise_weights), self.drawn, strict=False)
        total = torch.zeros_like(parameter)
        return sum((weight * drawn[name] for weight, drawn in weighted), total)


class OwnOptimizer(Looped):
    """Updates parameters without its optimizer."""

    def train_step(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            for parameter in self.trained.values():
                parameter.add_(1)
        return mean_of([self.mean_loss(self.model, batch).detach()])


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


class SparseNorm(Own):
    """The norm of an embedding's gradient is that of its entries, before equal rows are summed."""

    def clipped_sum(self, part: Batch, losses: list[Tensor]) -> Gradients:
        total = {name: torch.zeros_like(p) for name, p in self.trained.items()}
        first, rows = next(iter(self.trained)), list[Tensor]()

        def keep(layer: Any, inputs: Any, out: Tensor) -> None:
            out.register_hook(rows.append)

        layer: Any = self.model.embedding
        hook = layer.register_forward_hook(keep)
        for example in part.split(1):
            whole = self.gradients(example, losses)
            for n, x in to_threshold(self, whole, norm_of({**whole, first: rows[-1]})).items():
                total[n] += x
        hook.remove()
        return total

    def gradients(self, example: Batch, losses: list[Tensor]) -> Gradients:
        loss = self.example_losses(self.model, example).mean()
        losses.append(loss.detach())
        found = torch.autograd.grad(loss, [*self.trained.values()])
        return dict(zip(self.trained, found, strict=True))


class LossSummed(Own):
    """Gradients are those of a loss that is twice the workload's."""

    def example_losses(self, model: Any, batch: Batch) -> Tensor:
        return 2 * super().example_losses(model, batch)


class ByVmap(Own):
    """Per-sample gradients by functorch, of one micro-batch at a time."""

    def clipped_sum(self, part: Batch, losses: list[Tensor]) -> Gradients:
        def loss_of(trained: Gradients, example: Any) -> Tensor:
            one = pytree.tree_map(lambda x: x[None], example)
            call = lambda *a, **k: functional_call(self.model, trained, a, k)  # noqa: E731
            return self.example_losses(call, one).mean()

        detached = {n: p.detach() for n, p in self.trained.items()}
        each = vmap(grad(loss_of), in_dims=(None, 0))(detached, part)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
        factors = (self.max_grad_norm / norms).clamp(max=1.0)
        losses.append(torch.zeros(()))
        return {n: torch.tensordot(factors, g, 1) for n, g in each.items()}


class AccumulatesInGrad(Own):
    """Sums and noise are added to ``.grad`` in place, which is set to zero after the step."""

    def train_step(self, batch: Batch) -> Tensor:
        losses: list[Tensor] = []
        for p in self.trained.values():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        for _, part in self.parts(batch):
            for name, gradient in self.clipped_sum(part, losses).items():
                self.trained[name].grad += gradient
        for p in self.trained.values():
            assert p.grad is not None
            p.grad.add_(normal(p), alpha=self.deviation).div_(self.batch_size)
        self.plain_optimizer.step()
        self.plain_optimizer.zero_grad(set_to_none=False)
        return mean_of(losses)


class Tied(Small):
    """The head has the embedding's weight."""

    def model(self) -> nn.Module:
        model: Any = super().model()
        model.head.weight = model.embedding.weight
        return model  # type: ignore[no-any-return]


class Remembers(Workload):
    """A normalization that keeps a moving average of its inputs."""

    def model(self) -> nn.Module:
        norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
        return nn.Sequential(nn.Conv1d(3, 4, 3), norm, nn.Conv1d(4, 2, 3))

    def batches(self, batch_size: int) -> Iterator[Batch]:
        while True:
            yield torch.randn(batch_size, 3, 9)

    def losses(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        losses: Tensor = model(batch).sin().flatten(1).sum(1)
        return losses


class Mixes(Workload):
    """A frozen batch norm in training mode, over ``length`` values of each example."""

    def __init__(self, *, length: int = 5) -> None:
        self.length = length

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4, affine=False), nn.Flatten())

    def batches(self, batch_size: int) -> Iterator[Batch]:
        while True:
            yield torch.randn(batch_size, 3, self.length)

    def losses(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        losses: Tensor = model(batch).sin().flatten(1).sum(1)
        return losses


class OfOneForward(Looped):
    """Per-sample gradients of the losses of one forward, whose layers may mix examples."""

    def clipped_sum(self, part: Batch, losses: list[Tensor]) -> Gradients:
        total = {name: torch.zeros_like(p) for name, p in self.trained.items()}
        parameters = [*self.trained.values()]
        for loss in (each := self.example_losses(self.model, part)):
            found = torch.autograd.grad(loss, parameters, retain_graph=True)
            for name, gradient in self.clip(dict(zip(self.trained, found, strict=True))).items():
                total[name] += gradient
        losses.append(each.detach().mean())
        return total


class ByBackward(Looped):
    """Backward also leaves gradients in layers that the trainer does not know."""

    def clipped_sum(self, part: Batch, losses: list[Tensor]) -> Gradients:
        total = {name: torch.zeros_like(p) for name, p in self.trained.items()}
        for example in parts_of(part, [1] * examples_in(part)):
            loss = self.example_losses(self.model, example).mean()
            loss.backward()
            losses.append(loss.detach())
            found = {name: p.grad for name, p in self.trained.items()}
            for name, gradient in self.clip(found).items():  # type: ignore[arg-type]
                total[name] += gradient
            for parameter in self.trained.values():
                parameter.grad = None
        return total


class SumsInFloat32(Looped):
    """Adds noise to sums in float32, and rounds the mean."""

    def train_step(self, batch: Batch) -> Tensor:
        self.wide = {name: torch.zeros(p.shape) for name, p in self.trained.items()}
        losses: list[Tensor] = []
        for _, part in self.parts(batch):
            self.clipped_sum(part, losses)
        for name, parameter in self.trained.items():
            noisy = self.wide[name] + self.deviation * torch.randn(parameter.shape)
            parameter.grad = self.mean(noisy).to(parameter.dtype)
        self.plain_optimizer.step()
        return mean_of(losses)

    def clip(self, gradients: Gradients) -> Gradients:
        for name, gradient in super().clip({n: g.float() for n, g in gradients.items()}).items():
            self.wide[name] += gradient
        return gradients


class RefusesNaN(Looped):
    """Raises an error for gradients that are not finite."""

    def clip(self, gradients: Gradients) -> Gradients:
        if not all(bool(g.isfinite().all()) for g in gradients.values()):
            raise FloatingPointError("a gradient is not finite")
        return super().clip(gradients)


class LeavesNaNOut(Looped):
    """Leaves out examples whose gradient is not finite."""

    def clip(self, gradients: Gradients) -> Gradients:
        finite = all(bool(g.isfinite().all()) for g in gradients.values())
        zeros = {name: torch.zeros_like(g) for name, g in gradients.items()}
        return super().clip(gradients) if finite else zeros


class MeanOfNoisyParameters(Looped):
    """Keeps a buffer that is computed from private parameters only."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        first = next(iter(self.trained.values()))
        model.register_buffer("average", first.detach().clone())

    def train_step(self, batch: Batch) -> Tensor:
        loss = super().train_step(batch)
        average: Any = self.model.average
        average.lerp_(next(iter(self.trained.values())).detach(), 0.1)
        return loss


class Penalty(OnlyFloat32):
    """The loss contains the gradient of the model with respect to the example."""

    def losses(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        given = batch.clone().requires_grad_()
        returned = model(given).tanh().sum(1)
        (slope,) = torch.autograd.grad(returned.sum(), given, create_graph=True)
        return returned + (slope.norm(dim=1) - 1).square()


class ByHand(OnlyFloat32):
    """Uses a layer's weight without calling the layer; if ``unused``, does not use it at all."""

    def __init__(self, *, unused: bool = False) -> None:
        self.unused = unused

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 6))

    def losses(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        first, second = getattr(model, "_module", model)
        hidden = first(batch).tanh()
        return (hidden if self.unused else hidden @ second.weight.T + second.bias).sum(1)


NOISE: Mapping[str, tuple[str, Callable[[Any, Tensor], Tensor]]] = {
    "HalfTheNoise": ("deviation: head.weight: 0.5", lambda t, p: normal(p) / 2),
    "OnePercentLess": ("240 steps", lambda t, p: normal(p) * 0.99),
    "TwiceOfOne": ("deviation: norm.bias: 2", lambda t, p: normal(p) * (1 + is_bias(t, p))),
    "OneHasNone": ("norm.bias: no noise", lambda t, p: normal(p) * (1 - is_bias(t, p))),
    "SmallHaveNone": ("no noise", lambda t, p: normal(p) * (p.numel() > 100)),
    "LargestHasNone": ("inner.weight: no noise", lambda t, p: normal(p) * (p.numel() < 4096)),
    "RowsRead": ("deviation", rows_read),
    "FirstStepWithout": ("deviation", lambda t, p: normal(p) * (t.number > 1)),
    "FifthWeak": ("deviation", weaker(0.7, lambda t: t.number == 5)),
    "HundredthWeak": ("240 steps: deviation", weaker(0.2, lambda t: t.number % 100 == 50)),
    "SmallWeakInOne": (
        "240 steps",
        lambda t, p: normal(p) * (0.2 if t.number == 77 and p.dim() == 1 else 1),
    ),
    "EndsAfterHundred": ("240 steps", lambda t, p: normal(p) * (t.number <= 100)),
    "Fades": ("deviation", lambda t, p: normal(p) * 0.99**t.number),
    "SigmaRounded": ("deviation", rounded(0)),
    "SigmaOfTwoDecimals": ("deviation", rounded(2)),
    "SigmaAtMostOne": ("no noise", lambda t, p: normal(p) * min(1, 1 / max(sigma(t), 1e-9))),
    "SigmaSquared": ("deviation", lambda t, p: normal(p) * sigma(t)),
    "WithoutThreshold": ("deviation", lambda t, p: normal(p) / t.max_grad_norm),
    "ThresholdTwice": ("deviation", lambda t, p: normal(p) * t.max_grad_norm),
    "ThresholdAtMostOne": ("deviation", lambda t, p: normal(p) * min(1, 1 / t.max_grad_norm)),
    "ByRootOfBatch": ("deviation", lambda t, p: normal(p) * t.batch_size**0.5 / 2),
    "ByParts": ("deviation", lambda t, p: normal(p) / t.micro_batches),
    "Uniform": ("distribution", lambda t, p: (torch.rand_like(p) - 0.5) * 12**0.5),
    "Laplace": (
        "distribution",
        lambda t, p: torch.distributions.Laplace(0.0, 0.5**0.5).sample(p.shape),
    ),
    "Signs": ("distribution", lambda t, p: normal(p).sign()),
    "PositiveOnly": ("distribution", lambda t, p: normal(p).abs()),
    "OffCentre": ("distribution", lambda t, p: normal(p) + 0.05),
    "RarelyLarge": ("", lambda t, p: torch.where(torch.rand_like(p) < 1e-3, 6.0, normal(p))),
    "SumOfTwelve": ("240 steps: distribution", lambda t, p: torch.rand(12, *p.shape).sum(0) - 6),
    "FourSigmaCut": ("240 steps: distribution", lambda t, p: trimmed(p, 4.0)),
    "ThreeSigmaCut": ("", lambda t, p: normal(p).clamp(-3, 3)),
    "Coarse": ("distribution", lambda t, p: (normal(p) * 4).round() / 4),
    "OfHalf": ("values", as_dtype(torch.half)),
    "OfBfloat16": ("values", as_dtype(torch.bfloat16)),
    "OneNumber": ("", lambda t, p: torch.randn(()).expand_as(p)),
    "OneRow": (
        "elements: embedding.weight: the noise repeats after 64 elements",
        lambda t, p: normal(p[:1]).expand_as(p),
    ),
    "OneColumn": ("elements", lambda t, p: normal(p[..., :1]).expand_as(p)),
    "EverySixtyFour": (
        "elements",
        lambda t, p: t.own().repeat(-(-p.numel() // 64))[: p.numel()].view_as(p),
    ),
    "SecondHalfAgain": ("elements", lambda t, p: twice(normal(p), lambda half: half)),
    "SecondHalfMoved": ("elements", lambda t, p: twice(normal(p), lambda half: half.roll(7))),
    "SecondHalfMixed": (
        "elements",
        lambda t, p: twice(normal(p), lambda half: 0.6 * half + 0.8 * normal(half)),
    ),
    "SeedOfShape": (
        "runs: norm.bias: its noise in step 1",
        lambda t, p: from_seed(p, t.seed + 1000 * t.number + p.numel()),
    ),
    "SeedOfStep": ("runs", lambda t, p: from_seed(p, 1000 * t.number + p.numel() + p.dim())),
    "SeedOfEightBits": ("runs", lambda t, p: from_seed(p, int(torch.randint(256, ())))),
    "SeedOfValues": ("runs", lambda t, p: from_seed(p, int(p.detach().abs().sum() * 1e6))),
    "SeedOfTime": ("runs", of_time),
    "FirstForEver": ("runs: embedding.weight: its noise in step 2", lambda t, p: again(t, p, 0)),
    "MovedFirst": ("elements", lambda t, p: again(t, p, 0).flatten().roll(t.number).view_as(p)),
    "TwoInTurn": ("runs", lambda t, p: again(t, p, t.number % 2)),
    "FiftyInTurn": ("240 steps", lambda t, p: again(t, p, t.number % 50)),
    "MixedWithLast": ("runs", lambda t, p: 0.8 * normal(p) + 0.6 * again(t, p, 0)),
}
"""Noise in place of normal numbers, with the check that fails."""

CLIPPED: Mapping[str, tuple[str, Callable[[Any, Gradients], Gradients]]] = {
    "Unclipped": ("the mean of gradients that are not clipped", unclipped),
    "NotFinite": ("not finite", lambda t, g: scaled(g, torch.inf)),
    "NormIsNaNSoUnclipped": (
        "norms not finite",
        lambda t, g: scaled(g, c / n if (n := norm_of(g)) > (c := t.max_grad_norm) else 1.0),
    ),
    "NaNIsNoNorm": (
        "norms not finite",
        lambda t, g: to_threshold(t, g, norm_of(g).nan_to_num(0, 0, 0)),
    ),
    "WholeUnclippedWithNoise": (
        "noise: deviation",
        clipped_if(lambda t: t.micro_batches == 1 and sigma(t) > 1e-9, unclipped),
    ),
    "WholeUnclipped": ("not clipped", clipped_if(lambda t: t.micro_batches == 1, unclipped)),
    "PartsUnclipped": ("in 2 parts", clipped_if(lambda t: t.micro_batches > 1, unclipped)),
    "UnclippedWithNoise": ("deviation", clipped_if(lambda t: sigma(t) > 1e-9, unclipped)),
    "UnclippedWithoutNoise": ("not clipped", clipped_if(lambda t: not sigma(t), unclipped)),
    "ThrownAwayWithNoise": (
        "noise beside gradients",
        lambda t, g: scaled(right(t, g), sigma(t) < 1e-3),
    ),
    "FirstStepsClipped": ("240 steps", clipped_if(lambda t: t.number > 8, unclipped)),
    "UnclippedWarmUp": ("gradient", clipped_if(lambda t: t.number == 1, unclipped)),
    "EachToThreshold": ("gradient", share_of_each),
    "EachFromThird": ("from step 3 on", clipped_if(lambda t: t.number > 2, share_of_each)),
    "EachFromFiftieth": ("gradient: 240 steps", clipped_if(lambda t: t.number > 49, share_of_each)),
    "NormOfLast": ("gradient", by_last_norm),
    "NormOfFirstPart": ("gradient", norm_of_first_part),
    "FactorsCaptured": ("gradient", by_first_norm),
    "ThresholdGrows": ("gradient", lambda t, g: to_threshold(t, g, norm_of(g) / 1.01**t.number)),
    "TwiceTheThreshold": (
        "2 times the mean of gradients clipped flat",
        lambda t, g: to_threshold(t, g, norm_of(g) / 2),
    ),
    "AlwaysToTheThreshold": ("half clipped", lambda t, g: scaled(g, t.max_grad_norm / norm_of(g))),
    "BySquare": ("gradient", lambda t, g: to_threshold(t, g, norm_of(g) ** 2)),
    "ByLargestElement": (
        "gradient",
        lambda t, g: to_threshold(t, g, torch.stack([x.abs().max() for x in g.values()]).max()),
    ),
    "EachElement": (
        "gradient",
        lambda t, g: {n: x.clamp(-t.max_grad_norm, t.max_grad_norm) for n, x in g.items()},
    ),
    "WithoutLastParameter": (
        "gradient",
        lambda t, g: to_threshold(t, g, norm_of(dict([*g.items()][:-1]))),
    ),
    "WithoutBiases": ("gradient", without_biases),
    "LastPartUnclipped": (
        "gradient in 2 parts",
        clipped_if(lambda t: t.part % t.micro_batches == t.micro_batches - 1 > 0, unclipped),
    ),
    "MiddlePartUnclipped": (
        "gradient of 3 in 3 parts, all clipped",
        clipped_if(lambda t: 0 < t.part % t.micro_batches < t.micro_batches - 1, unclipped),
    ),
    "NormOf16Bits": ("gradient", norm_of_16_bits),
    "ScaledLoss": ("gradient", scaled_loss),
    "OwnMomentum": ("gradient", own_momentum),
}
"""Clipping in place of the right one, with the check that fails."""

AFTER: Mapping[str, tuple[str, Callable[[Any, Tensor], None]]] = {
    "ThresholdAdapts": ("gradient", adapt),
    "MovesByRaw": ("buffers hold no data", move_by_raw),
    "MovesByRawEachFifth": ("buffers hold no data: 60 steps", each(5, move_by_raw)),
    "Stats": ("buffers hold no data: stats", stats),
    "SavesLoss": ("buffers hold no data", save("loss")),
    "SavesLossEachTenth": ("buffers hold no data: 60 steps", each(10, save("loss"))),
    "AddsLosses": ("buffers hold no data", add),
    "ReplacesBuffer": ("buffers hold no data", replace_buffer),
    "LargestNorm": ("buffers hold no data", largest_norm),
    "RawAverage": ("buffers hold no data", raw_average),
    "Shadow": ("buffers hold no data", shadow),
}
"""What happens after the step, with the check that fails."""

OF_THE_MODULE = torch.Generator().manual_seed(0)
ADAMW, POISSON = {"optimizer": "adamw"}, {"sampling": "poisson"}
TIED, REMEMBERS = ({"workload": f"{__name__}:{name}"} for name in ("Tied", "Remembers"))
OTHERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "MovesByRawAndDecays": ("", {"after": move_by_raw, "before": decay}),
    "CleanMaster": ("", {"prepare": keep_start, "after": clean_master}),
    "SumsNeverReset": ("gradient", {"move": move_by_sums}),
    "SecondMomentRaw": ("exp_avg_sq of", {"after": second_moment, "axes": ADAMW}),
    "OwnAdamSecondMomentRaw": ("", {"prepare": own_adam, "after": second_moment}),
    "TiedTwice": ("gradient", {"clipped": norm_of_rows, "axes": TIED}),
    "RunningMean": ("buffers hold no data", {"axes": REMEMBERS}),
    "StaleBatch": ("gradient", {"batch": stale}),
    "StaleLayer": ("gradient: 240 steps", {"batch": stale_layer}),
    "MeanOfParts": (  # Opacus #683
        "0.5 times the mean of gradients clipped flat",
        {"summed": lambda t, g: scaled(g, 1 / t.micro_batches)},
    ),
    "AccumulatesForEver": ("from step 2 on, off by", {"summed": accumulated}),
    "NoiseOfTheLoss": ("noise", {"summed": of_the_loss}),
    "NoiseTwice": (
        "noise: deviation: head.weight: 2.",
        {"summed": lambda t, g: {n: x + t.deviation * normal(x) for n, x in g.items()}},
    ),
    "WrongBatchSize": (
        "2 times the mean of gradients clipped flat",
        {"prepare": lambda t: setattr(t, "divisor", t.batch_size // 2)},
    ),
    "LeavesOneOut": (
        "head.weight: does not move",
        {"prepare": lambda t: t.trained.pop("head.weight"), "axes": ADAMW},
    ),
    "DividesBySampled": (
        "4 times the mean of gradients clipped flat",
        {"batch": by_sampled, "axes": POISSON},
    ),
    "ByLayerCalledFlat": ("the mean of gradients clipped per layer", {"clipped": per_layer}),
}
"""Other members in place of the right ones, with the check that fails."""

CLASSES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "LargestNormForThreshold": ("noise: deviation", {}),
    "SparseNorm": ("gradient", {}),
    "LossSummed": ("gradient", {}),
    "SkipsEmpty": ("noise: deviation: embedding.weight: no noise", POISSON),
    "GhostThatDiffers": ("inner.weight: off by 0.", {}),
    "SeedsTorch": ("its noise in step 1 (σ = 10000, C = 0.7 in 2 parts) correlates with that", {}),
    "SeedByDefault": (
        "its noise in step 1 (σ = 10000, C = 0.7 in 2 parts) correlates with that",
        {},
    ),
    "ByBatch": ("the mean of micro-batches' gradients, clipped", {}),
    "OfOneForward": ("alone and", {"workload": f"{__name__}:Mixes"}),
    "ByBackward": ("layer added later: a batch moves parameters by", {}),
}
"""Classes of wrong trainers with the axes of a case, and the check that fails."""

TABLES = (NOISE, CLIPPED, AFTER, OTHERS, CLASSES)
WRONG = {name: fails for table in TABLES for name, (fails, _) in table.items()}
RIGHT: Mapping[str, dict[str, Any]] = {
    "Master": {"prepare": keep_start, "move": move_master},
    "MovesItself": {"move": move_plainly},
    "WarmUp": {"before": warm_up},
    "WarmUpFromZero": {"before": from_zero},
    "WarmUpMomentum": {"before": warm_up, "axes": {"optimizer": "momentum"}},
    "Schedule": {"after": cosine},
    "ScheduleAdamW": {"after": cosine, "axes": ADAMW},
    "DecayBefore": {"before": decay},
    "DecayAfter": {"after": decay},
    "DecayAdamW": {"after": decay, "axes": ADAMW},
    "Clamps": {"after": clamp},
    "LooksAhead": {"prepare": keep_start, "after": each(5, look_ahead)},
    "OwnAdam": {"prepare": own_adam},
    "MovingAverage": {"after": average},
    "Mask": {"prepare": mask},
    "Counts": {"after": count},
    "TiedRight": {"axes": TIED},
    "NoiseAfter": {"move": noise_after, "noise": lambda t, p: torch.zeros_like(p)},
    "FourDraws": {"noise": four_draws},
    "DrawnAhead": {"noise": drawn_ahead},
    "OfOneVector": {"noise": of_one_vector},
    "NoiseOfDouble": {"noise": as_dtype(torch.double)},
    "Shuffled": {"batch": shuffled},
    "NormOfUpdate": {"after": norm_of_update},
    "SignsOfUpdate": {"after": signs},
    "ByLayer": {"clipped": per_layer, "labels": {"clips": "per layer"}},
    "WithoutClosure": {"prepare": with_closure(None)},
    "WithClosure": {"prepare": with_closure(lambda: torch.zeros(()))},
}
"""Members in place of those of `Own`, with which it is right still."""

BANDED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "BandDropped": (
        "runs: all parameters: its noise in step 4",
        {"used": lambda t, w: w[:-1]},
    ),
    "IndependentCalledBanded": ("in step 2", {"used": lambda t, w: w[:1]}),
    "WeightsShifted": ("in step 2", {"used": lambda t, w: (w[0], 0.0, *w[1:])}),
    "OneSeedForAllSteps": ("in step 2", {"draw": lambda t, p: from_seed(p, len(p))}),
    "BandedWithoutSensitivity": (
        "noise: deviation: embedding.weight: 0.7",
        {"used": lambda t, w: tuple(weight / w[0] for weight in w)},
    ),
}
"""Members in place of those of `Banded`, with the check that fails."""

MEMBERS: dict[str, dict[str, Any]] = {
    **{name: {"noise": noise} for name, (_, noise) in NOISE.items()},
    **{name: {"clipped": clipped} for name, (_, clipped) in CLIPPED.items()},
    **{name: {"after": after} for name, (_, after) in AFTER.items()},
    **{name: members for name, (_, members) in OTHERS.items()},
    **{name: {"base": Banded, **members} for name, (_, members) in BANDED.items()},
    **RIGHT,
    "AdaptersUnclipped": {"clipped": adapters_unclipped},
    "TrainsWhatIsFrozen": {"before": thaw},
    "NoiseOfProcesses": {"noise": lambda t, p: torch.randn(p.shape, generator=OF_THE_MODULE)},
    "SaysNothing": {"labels": {"clips": "per block"}},
}
AXES = {name: members.pop("axes", {}) for name, members in MEMBERS.items()}
AXES |= {name: axes for name, (_, axes) in CLASSES.items()}
for _name, _members in MEMBERS.items():  # a case names them
    _base = _members.pop("base", BySelf if "move" in _members else Own)
    globals()[_name] = type(_name, (_base,), _members)
