"""What ``dpbench exec`` costs a script outside the steps that it counts, where it waits for them.

``python bench/exec.py`` trains a convolutional network on MNIST's shapes and a GPT-2 of 12 layers,
on the CPU and on CUDA if there is one, in turns unwatched and watched as with --skip: blocks of
steps, the order within a pair alternating, by processor time on the CPU and by the clock on CUDA.
Prints the median of the pairs' ratios with its 95 % interval; pairs are taken until it lies on one
side of the bound. Exits with 1 if that is the wrong one, if pairs ran out before, or if a loss is
not what it is unwatched.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from dpbench.instruments.timing import TimingRecorder
from dpbench.process.step_finder import StepFinder
from dpbench.process.watched import watch

BOUND = 1.02
RESAMPLES = 2000
ROUND = 50  # pairs between looks at the interval


class Convolutions(nn.Module):
    """A classifier of 28 x 28 images."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1)),
            *(nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Flatten()),
            *(nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10)),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits, [B, 10]."""
        logits: Tensor = self.features(images)
        return logits


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.gelu, self.down = (
            *(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] to the same."""
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(self.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """GPT-2's layers, 12 of them."""

    def __init__(self, width: int, vocabulary: int = 1000) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width, width // 32) for _ in range(12)))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, [B, vocabulary, T]."""
        logits: Tensor = self.head(self.blocks(self.tokens(tokens)))
        return logits.transpose(1, 2)


class Training:
    """A loop as a script has it: loader, zero_grad, forward, loss, backward, step."""

    def __init__(self, name: str, device: str) -> None:
        torch.manual_seed(0)
        inputs, targets = torch.randn(640, 1, 28, 28), torch.randint(10, (640,))
        model: nn.Module = Convolutions()
        if name == "GPT-2":
            tokens = torch.randint(1000, (640, 65))
            inputs, targets, model = tokens[:, :-1], tokens[:, 1:], Gpt(64)
        self.device, self.model = device, model.to(device)
        self.data = TensorDataset(inputs.to(device), targets.to(device))
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.batch_size = 8 if name == "GPT-2" else 64

    def steps(self, count: int) -> Iterator[Tensor]:
        """Take steps, and hand out the loss of each."""
        taken = 0
        while taken < count:
            for inputs, targets in DataLoader(self.data, batch_size=self.batch_size):
                self.optimizer.zero_grad()
                loss = cross_entropy(self.model(inputs), targets)
                loss.backward()
                self.optimizer.step()
                yield loss
                taken += 1
                if taken == count:
                    return

    def seconds(self, count: int) -> float:
        """How long so many steps take."""
        clock = time.perf_counter if self.device == "cuda" else time.process_time
        start = clock()
        for _ in self.steps(count):
            pass
        if self.device == "cuda":
            torch.cuda.synchronize()
        return clock() - start


@contextmanager
def watched() -> Iterator[None]:
    """As before the first step that counts."""
    finder = StepFinder(TimingRecorder(1), skip=sys.maxsize)
    with ExitStack() as held:
        held.callback(finder.close)
        watch(finder)
        yield


def interval(values: list[float]) -> tuple[float, float]:
    """Between what 95 % of the medians of resampled values are."""
    draws = random.Random(0)
    medians = sorted(
        statistics.median(draws.choices(values, k=len(values))) for _ in range(RESAMPLES)
    )
    return medians[RESAMPLES * 25 // 1000], medians[RESAMPLES * 975 // 1000]


def last_loss(name: str, device: str, around: Callable[[], object]) -> float:
    """The loss of the 20th step from the same seed."""
    training = Training(name, device)
    with around():  # type: ignore[attr-defined]
        return [loss.item() for loss in training.steps(20)][-1]


def overhead(name: str, device: str, pairs: int, seconds: float) -> bool:
    """Print the line of one script; whether it holds."""
    training = Training(name, device)
    training.seconds(5)
    count = max(2, round(5 * seconds / training.seconds(5)))
    ratios: list[float] = []
    low, high = 0.0, 2.0
    while low <= BOUND < high and len(ratios) < pairs:
        taken = {}
        for is_watched in (len(ratios) % 2 == 0, len(ratios) % 2 == 1):
            with watched() if is_watched else nullcontext():
                taken[is_watched] = training.seconds(count) / count
        ratios.append(taken[True] / taken[False])
        if len(ratios) % ROUND == 0:
            low, high = interval(ratios)
    same = last_loss(name, device, watched) == last_loss(name, device, nullcontext)
    holds = "yes" if high <= BOUND else "NO" if low > BOUND else "undecided"
    print(
        f"{name:8} {device:5} {taken[False] * 1e3:8.3f} {statistics.median(ratios):8.4f} "
        f"{low:.4f} to {high:.4f} {len(ratios):6} {holds:>15}  {'yes' if same else 'NO'}",
        flush=True,
    )
    return high <= BOUND and same


def main() -> int:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=1000, help="at most")
    parser.add_argument("--seconds", type=float, default=0.08, help="of one block of steps")
    parser.add_argument("--only", default="", help="those whose name has this")
    options = parser.parse_args()
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_num_threads(1)
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    print(
        f"{'script':8} {'on':5} {'ms/step':>8} {'watched':>8} {'95 %':16} {'bound':>6}  same loss"
    )
    held = [
        overhead(name, device, options.pairs, options.seconds)
        for device in devices
        for name in ("MNIST", "GPT-2")
        if options.only in name
    ]
    return 0 if all(held) and held else 1


if __name__ == "__main__":
    sys.exit(main())
