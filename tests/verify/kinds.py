"""More wrong trainers, with mistakes that people make, and more right ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpbench import Batch, Workload
from dpbench.training.base import mean_of
from tests.verify.faulty import Gradients
from tests.verify.later import BySelf, Own, normal
from tests.verify.over_ranks import Small
from tests.verify.wrong import norm_of, right, scaled


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


class OfBatch(Own):
    """A trainer that may replace the batch."""

    def batch(self, batch: Batch) -> Batch:
        return batch

    def train_step(self, batch: Batch) -> Tensor:
        return super().train_step(self.batch(batch))


def to_threshold(t: Any, g: Gradients, norm: Tensor) -> Gradients:
    return scaled(g, (t.max_grad_norm / norm).clamp(max=1.0))


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


def own_momentum(t: Any, g: Gradients) -> Gradients:
    """Each example's gradient is added to momentum that is then clipped with it."""
    total = {n: x + 0.1 * t.kept.get(n, 0) for n, x in g.items()}
    t.kept.update(g)
    return right(t, total)


def shadow(t: Any, _: Any) -> None:
    """An average of parameters that moved by the raw gradient."""
    for i, (n, p) in enumerate(t.trained.items()):
        clean = p + t.group["lr"] * (p.grad - t.raw[n] / t.batch_size)
        t.buffer(f"shadow{i}", p.numel()).lerp_(clean.flatten(), 0.1)


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


# --- right --------------------------------------------------------------------------------------


def noise_after(t: Any) -> None:
    """Noise is subtracted from parameters, not added to gradients."""
    with torch.no_grad():
        for p in t.trained.values():
            p.sub_(t.group["lr"] * p.grad)
            p.sub_(t.group["lr"] * t.noise_multiplier * t.max_grad_norm * normal(p) / t.batch_size)


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


def shuffled(t: Any, batch: Batch) -> Batch:
    order = torch.randperm(len(batch[0] if isinstance(batch, tuple) else batch))
    return tuple(b[order] for b in batch) if isinstance(batch, tuple) else batch[order]


def norm_of_update(t: Any, _: Any) -> None:
    t.buffer("of_update").copy_(norm_of({n: p.grad for n, p in t.trained.items()}))


def signs(t: Any, _: Any) -> None:
    first = next(iter(t.trained.values())).grad.flatten()
    t.buffer("signs", len(first)).copy_(first.sign())


class ByVmap(Own):
    """Per-sample gradients by functorch, of one micro-batch at a time."""

    def clipped_sum(self, part: Batch, losses: list[Tensor]) -> Gradients:
        from torch.func import functional_call, grad, vmap

        def loss_of(trained: Gradients, example: Any) -> Tensor:
            one = torch.utils._pytree.tree_map(lambda x: x[None], example)
            call = lambda *a, **k: functional_call(self.model, trained, a, k)  # noqa: E731
            return self.example_losses(call, one).mean()

        detached = {n: p.detach() for n, p in self.trained.items()}
        each = vmap(grad(loss_of), in_dims=(None, 0))(detached, part)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
        factors = (self.max_grad_norm / norms).clamp(max=1.0)
        losses.append(torch.zeros(()))
        return {n: torch.tensordot(factors, g, 1) for n, g in each.items()}


class WithClosure(Own):
    """The optimizer gets a closure that returns the loss."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        step = self.plain_optimizer.step
        self.plain_optimizer.step = lambda: step(lambda: torch.zeros(()))


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


TIED = {"workload": f"{__name__}:Tied"}
WRONG: Mapping[str, dict[str, Any]] = {
    "NormOf16Bits": {"clipped": norm_of_16_bits},
    "TiedTwice": {"clipped": norm_of_rows, "axes": TIED},
    "NormOfFirstPart": {"clipped": norm_of_first_part},
    "WithoutBiases": {"clipped": without_biases},
    "ScaledLoss": {"clipped": scaled_loss},
    "ThresholdAdapts": {"after": adapt},
    "StaleBatch": {"base": OfBatch, "batch": stale},
    "StaleLayer": {"base": OfBatch, "batch": stale_layer},
    "OwnMomentum": {"clipped": own_momentum},
    "Shadow": {"after": shadow},
    "RowsRead": {"noise": rows_read},
    "OfTime": {"noise": of_time},
    "NoiseOfHalf": {"noise": as_dtype(torch.half)},
    "NoiseOfBfloat16": {"noise": as_dtype(torch.bfloat16)},
    "ThresholdTwice": {"noise": lambda t, p: normal(p) * t.max_grad_norm},
    "RunningMean": {"axes": {"workload": f"{__name__}:Remembers"}},
    "SparseNorm": {"base": SparseNorm},
    "LossSummed": {"base": LossSummed},
    "NoiseByPart": {"noise": lambda t, p: normal(p) / t.micro_batches},
}
RIGHT: Mapping[str, dict[str, Any]] = {
    "TiedRight": {"axes": TIED},
    "NoiseAfter": {"base": BySelf, "move": noise_after, "noise": lambda t, p: torch.zeros_like(p)},
    "FourDraws": {"noise": four_draws},
    "DrawnAhead": {"noise": drawn_ahead},
    "OfOneVector": {"noise": of_one_vector},
    "NoiseOfDouble": {"noise": as_dtype(torch.double)},
    "Shuffled": {"base": OfBatch, "batch": shuffled},
    "NormOfUpdate": {"after": norm_of_update},
    "Signs": {"after": signs},
    "ByVmap": {"base": ByVmap},
    "WithClosure": {"base": WithClosure},
    "AccumulatesInGrad": {"base": AccumulatesInGrad},
}
ALL: dict[str, dict[str, Any]] = {**WRONG, **RIGHT}
for _name, _made in ALL.items():  # a case names them
    _members = {k: v for k, v in _made.items() if k not in ("axes", "base")}
    globals()[_name] = type(_name, (_made.get("base", Own),), _members)
