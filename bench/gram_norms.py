"""What the norms of the trainer fused take on a GPU, by its kernel in several forms and by cuBLAS.

Norms of all linear layers of a model, from random activations and gradients; captured in a CUDA
graph, as the trainer does. How far they are from float64 is of one layer of each shape. The choice
among the ways is `TILINGS` in dpbench/training/kernels.py.

    python bench/gram_norms.py [--tokens 256 --tokens 1024]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from itertools import product
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from dpbench.child.build import pick_device
from dpbench.child.step import alone
from dpbench.core.model_size import MODEL_SIZES, ModelSize
from dpbench.training import kernels
from dpbench.training.ghost_norms import squared_norms_of_alike

WAYS = {
    torch.float32: [
        (64, 32, 4, 3),
        (64, 32, 4, 4),
        (64, 64, 4, 3),
        (128, 32, 8, 3),
        (128, 64, 8, 2),
    ],
    torch.bfloat16: [(128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 3), (128, 32, 8, 4)],
}
"""Tilings that are tried, by type."""

Layers = list[tuple[list[Tensor], list[Tensor]]]


def layers(
    size: ModelSize, examples: int, tokens: int, dtype: torch.dtype, device: torch.device
) -> Layers:
    """Activations and gradients of a transformer's linear layers, those of a shape together."""
    wide = size.hidden
    shapes = [
        (4 * size.layers, wide, wide),
        (size.layers, wide, 4 * wide),
        (size.layers, 4 * wide, wide),
        (1, wide, size.vocabulary),
    ]

    def made(number: int, width: int) -> list[Tensor]:
        shape = (examples, tokens, width)
        return [torch.randn(shape, dtype=dtype, device=device) for _ in range(number)]

    return [(made(number, width), made(number, height)) for number, width, height in shapes]


def error(group: Layers) -> tuple[float, float]:
    """The largest relative distance from float64, of the first layer of each shape.

    Of squared norms, and of what clips: their upper bounds.
    """
    worst = bound = 0.0
    for (x, *_), (g, *_) in group:
        exact = sum_of_squares(x.double(), g.double())
        norms = kernels.gram_norms([x], [g], True)[0, 0].double()
        worst = max(worst, float((norms / exact - 1).abs().max()))
        bounds = squared_norms_of_alike([x], [g], True)[0].double()
        assert (bounds >= exact).all(), "an upper bound is too small"
        bound = max(bound, float((bounds / exact - 1).max()))
    return worst, bound


def sum_of_squares(x: Tensor, g: Tensor) -> Tensor:
    """What the norms should be, of one layer with a bias."""
    return ((x @ x.mT + 1) * (g @ g.mT)).sum((1, 2))


def milliseconds(group: Layers, device: torch.device, seconds: float) -> float:
    """Of the norms of all layers, the median of some replays."""

    def norms() -> None:
        for xs, gs in group:
            kernels.gram_norms(xs, gs, True)

    run: Callable[[], object] = norms
    if device.type == "cuda":
        norms()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            norms()
        run = graph.replay
    timer = Timer("run()", globals={"run": run})
    return float(timer.blocked_autorange(min_run_time=seconds).median) * 1e3


def rows(
    size: ModelSize, examples: int, tokens: list[int], device: torch.device, seconds: float = 0.5
) -> Iterator[list[object]]:
    """The table: each way for each length and type, first PyTorch's products."""
    for length, (dtype, tilings) in product(tokens, WAYS.items()):
        group = layers(size, examples, length, dtype, device)
        chosen = kernels.TILINGS[dtype]
        for way in ("products", *tilings) if device.type == "cuda" else ("products",):
            with patch.object(kernels, "TILINGS", {} if way == "products" else {dtype: way}):
                took = milliseconds(group, device, seconds)
                yield [length, dtype, way, took, *error(group), "chosen" if way == chosen else ""]
        del group  # before the next is made


def main() -> int:
    """Time and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, action="append")
    parser.add_argument("--model-size", default="1b", choices=MODEL_SIZES)
    parser.add_argument("--batch-size", type=int, default=8)
    options = parser.parse_args()
    size, tokens = MODEL_SIZES[options.model_size], options.tokens or [256, 1024]
    device = pick_device("auto")
    torch.backends.cuda.matmul.allow_tf32 = False
    with alone(device, "gram_norms"):
        print("tokens, type, (tile, step, warps, stages), ms, error, bound")
        for row in rows(size, options.batch_size, tokens, device):
            print(*row, sep="  ", flush=True)  # a form may take long to compile
    return 0


if __name__ == "__main__":
    sys.exit(main())
