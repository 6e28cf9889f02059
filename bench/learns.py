"""Train one model on scikit-learn's digits in four ways, and compare what they learn.

    python bench/learns.py > docs/results/learns.txt

The ways are `dpbench.make_private`, Opacus, a loop over the examples in plain PyTorch, and training
without privacy. The private ways have the same ε, and therefore the same noise, threshold and
probability with which an example is in a batch. The table has the accuracy on the examples of the
test over the seeds, and of a step with a full batch: bytes and peak of memory, which are counted,
and time, which is measured on this machine. The last line says whether the means of the private
ways are as close as chance allows.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import combinations, islice

import torch
from opacus import PrivacyEngine
from opacus.accountants.utils import get_noise_multiplier
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpbench import make_private, observe
from dpbench.private import StepLosses

SEEDS, BATCH, STEPS, TESTED = 20, 64, 220, 360
EPSILON, DELTA, NORM, RATE = 3.0, 1e-4, 1.0, 0.5
TIMED = 20
"""Number of steps of which the median is the time."""

NEAR = 3.0
"""Largest difference of two means, in standard errors, that counts as chance."""

Step = Callable[[list[Tensor]], object]


class Way:
    """One way to train: a step, and the batches that it expects.

    Args:
        model: the model, which is trained.
        train: the examples.
        sigma: the noise multiplier.
    """

    def __init__(self, model: nn.Module, train: TensorDataset, sigma: float) -> None:
        self.model, self.train, self.sigma = model, train, sigma
        self.optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        self.loader = DataLoader(train, batch_size=BATCH, shuffle=True)
        self.prepare()

    def prepare(self) -> None:
        """Make the model private, if this way does."""

    def batches(self) -> Iterator[list[Tensor]]:
        """Yield batches without end."""
        while True:
            yield from self.loader

    def step(self, batch: list[Tensor]) -> object:
        """Take a step."""
        losses(self.model, batch).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return None

    def full_step(self, batch: list[Tensor]) -> object:
        """Take a step with a batch that was not sampled."""
        return self.step(batch)


class ByFused(Way):
    """`dpbench.make_private`."""

    def prepare(self) -> None:
        self.private = make_private(
            self.model,
            self.optimizer,
            self.train,
            batch_size=BATCH,
            max_grad_norm=NORM,
            noise_multiplier=self.sigma,
        )
        self.loader = self.private.loader

    def step(self, batch: list[Tensor]) -> object:
        return self.private.step(batch, losses)

    def full_step(self, batch: list[Tensor]) -> object:
        # `private.step` takes only batches that its loader has drawn.
        self.private.trainer.workload = StepLosses(losses)
        with self.private._working():
            return self.private.trainer.train_step(batch)


class ByOpacus(Way):
    """Opacus's flat clipping, with hooks."""

    def prepare(self) -> None:
        self.model, self.optimizer, self.loader = PrivacyEngine().make_private(
            module=self.model,
            optimizer=self.optimizer,
            data_loader=self.loader,
            noise_multiplier=self.sigma,
            max_grad_norm=NORM,
        )


class ByExamples(Way):
    """A loop over the examples, which uses nothing of dpbench or Opacus."""

    def batches(self) -> Iterator[list[Tensor]]:
        while True:
            chosen = torch.rand(len(self.train)) < BATCH / len(self.train)
            yield [each[chosen] for each in self.train.tensors]

    def step(self, batch: list[Tensor]) -> object:
        parameters = [*self.model.parameters()]
        sums = [torch.zeros_like(p) for p in parameters]
        for i in range(len(batch[0])):
            loss = losses(self.model, [each[i : i + 1] for each in batch]).sum()
            gradients = torch.autograd.grad(loss, parameters)
            norm = torch.stack([g.norm() for g in gradients]).norm()
            for total, gradient in zip(sums, gradients, strict=True):
                total += gradient * (NORM / norm).clamp(max=1)
        for p, total in zip(parameters, sums, strict=True):
            p.grad = (total + self.sigma * NORM * torch.randn_like(p)) / BATCH
        self.optimizer.step()
        return None


WAYS = {
    "without privacy": Way,
    "make_private": ByFused,
    "Opacus": ByOpacus,
    "loop over examples": ByExamples,
}


def network() -> nn.Module:
    """Return the model, for images of 8 × 8 pixels and 10 classes."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def losses(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return a loss for each example."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def digits() -> tuple[TensorDataset, list[Tensor]]:
    """Return the examples for training, and images and labels of the test."""
    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(found.images, dtype=torch.float32)[order, None] / 16
    labels = torch.tensor(found.target)[order]
    return TensorDataset(images[TESTED:], labels[TESTED:]), [images[:TESTED], labels[:TESTED]]


def accuracy(way: Way, test: list[Tensor]) -> float:
    """Train, and return the accuracy in percent."""
    for batch in islice(way.batches(), STEPS):
        way.step(batch)
    with torch.no_grad():
        right = way.model(test[0]).argmax(1) == test[1]
    return 100 * float(right.float().mean())


def cost(way: Way, batch: list[Tensor]) -> tuple[float, float, float]:
    """Return a step's logical bytes, the counted peak of its memory in bytes, and its seconds."""
    with observe("logical", skip=2, steps=1) as seen:
        for _ in range(3):
            with seen.step():
                way.full_step(batch)
    times = []
    for _ in range(TIMED):
        start = time.perf_counter()
        way.full_step(batch)
        times.append(time.perf_counter() - start)
    counted = [seen.report.value(name) for name in ("logical_bytes", "peak_memory_bytes")]
    return *counted, statistics.median(times)


def largest_difference(found: dict[str, list[float]]) -> str:
    """Return a sentence about the two private ways whose means differ most."""
    apart = {}
    for a, b in combinations([name for name in found if name != "without privacy"], 2):
        error = math.hypot(*(statistics.stdev(found[n]) / SEEDS**0.5 for n in (a, b)))
        apart[a, b] = abs(statistics.mean(found[a]) - statistics.mean(found[b])) / error
    (a, b), most = max(apart.items(), key=lambda each: each[1])
    return (
        f"The private ways {'agree' if most <= NEAR else 'DIFFER'}: the means of {a} and {b} are "
        f"{most:.1f} standard errors apart, and no two are further apart."
    )


def main() -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # the model is too small for several
    train, test = digits()
    sigma = get_noise_multiplier(
        target_epsilon=EPSILON,
        target_delta=DELTA,
        sample_rate=BATCH / len(train),
        steps=STEPS,
        accountant="prv",
    )
    full = [each[:BATCH] for each in train.tensors]
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    for seed in range(SEEDS):
        for name, kind in WAYS.items():
            torch.manual_seed(seed)
            found[name].append(accuracy(kind(network(), train, sigma), test))
    costs = {name: cost(kind(network(), train, sigma), full) for name, kind in WAYS.items()}
    steps = f"{STEPS} steps of {BATCH} examples, {SEEDS} seeds"
    print(f"ε {EPSILON:g} at δ {DELTA:g}, σ {sigma:.3f}, {steps}")
    print(f"{'':20}{'accuracy, %':>15}{'bytes':>9}{'memory':>9}{'time':>9}")
    plain = costs["without privacy"]
    for name, each in found.items():
        ratios = [a / b for a, b in zip(costs[name], plain, strict=True)]
        shown = "".join(f"{f'× {ratio:.2f}':>9}" for ratio in ratios)
        print(f"{name:20}{statistics.mean(each):8.1f} ± {statistics.stdev(each):.1f} {shown}")
    print(largest_difference(found))


if __name__ == "__main__":
    main()
