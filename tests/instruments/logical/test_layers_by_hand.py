"""Bytes of whole layers, compared with sums by hand: forward, and the requested gradients.

A layer with one operator reads its input and parameters and writes its output. Its backward reads
the output's gradient, and only the tensors that the requested gradients need.
Sizes are in elements of four bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpbench.instruments.logical.counter import RealTensorCounter, without_data
from dpbench.instruments.logical.recorder import freeze_existing_objects
from dpbench.training.phases import observed_step
from tests.instruments.logical.test_rules import E, Moved, cost, moved

IMAGES = (2, 6, 8, 8)
ROWS = (3, 5, 6)


class Kept(NamedTuple):
    """Statistics of a norm: saved for backward, and running ones."""

    batch: int = 0
    running: int = 0


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Kept | None]] = {
    "conv1d": (lambda: nn.Conv1d(6, 4, 3), (2, 6, 9), None),
    "conv2d": (lambda: nn.Conv2d(6, 4, 3, stride=2, padding=1), IMAGES, None),
    "conv2d without bias": (lambda: nn.Conv2d(6, 4, 3, bias=False), IMAGES, None),
    "conv2d in groups": (lambda: nn.Conv2d(6, 12, 3, groups=3), IMAGES, None),
    "conv2d by channel": (lambda: nn.Conv2d(6, 6, 3, groups=6, dilation=2), IMAGES, None),
    "conv3d": (lambda: nn.Conv3d(6, 4, 2), (2, 6, 5, 4, 3), None),
    "transposed conv1d": (lambda: nn.ConvTranspose1d(6, 4, 3), (2, 6, 9), None),
    "transposed conv2d": (lambda: nn.ConvTranspose2d(6, 4, 3, stride=2, bias=False), IMAGES, None),
    "transposed conv2d in groups": (lambda: nn.ConvTranspose2d(6, 4, 3, groups=2), IMAGES, None),
    "transposed conv3d": (lambda: nn.ConvTranspose3d(6, 4, 2), (2, 6, 5, 4, 3), None),
    "layer norm": (lambda: nn.LayerNorm(6), ROWS, Kept(2 * 15)),
    "layer norm without bias": (lambda: nn.LayerNorm(6, bias=False), ROWS, Kept(2 * 15)),
    "layer norm of two dimensions": (lambda: nn.LayerNorm((5, 6)), ROWS, Kept(2 * 3)),
    "group norm": (lambda: nn.GroupNorm(3, 6), IMAGES, Kept(2 * 2 * 3)),
    "rms norm": (lambda: nn.RMSNorm(6), ROWS, Kept(15)),
    "batch norm": (lambda: nn.BatchNorm2d(6), IMAGES, Kept(2 * 6, 2 * 6)),
    "batch norm of the batch alone": (
        lambda: nn.BatchNorm2d(6, track_running_stats=False),
        IMAGES,
        Kept(2 * 6),
    ),
}
STEPS = 8 / E
"""Bytes of a batch norm's step counter, one int64."""

ASKED = {"middle": (True, True), "first": (False, True), "frozen": (True, False)}
"""By position of a layer: whether its input needs a gradient, and whether its parameters do."""


def by_hand(layer: nn.Module, shape: tuple[int, ...], kept: Kept | None, where: str) -> list[Moved]:
    """Bytes of forward and backward of a layer with one operator."""
    asks_input, asks_weight = ASKED[where]
    output = layer(torch.zeros(shape))
    x, y = torch.Size(shape).numel(), output.numel()
    w, b = (p.numel() if p is not None else 0 for p in (layer.weight, getattr(layer, "bias", None)))
    batch, running = kept or Kept()
    steps = STEPS if running else 0
    forward = Moved(x + w + b + running + steps, y + batch + running + steps)
    reads_input = asks_weight or (kept and asks_input)  # not for a convolution's input gradient
    read = y + (x + batch if reads_input else 0) + (w if asks_input else 0)
    backward = Moved(read, (x if asks_input else 0) + (w + b if asks_weight else 0))
    return [Moved(int(E * move.read), int(E * move.write)) for move in (forward, backward)]


def counted(
    make: Callable[[], nn.Module], shape: tuple[int, ...], where: str, *, fake: bool = True
) -> list[Moved]:
    asks_input, asks_weight = ASKED[where]
    steps = []
    counting = without_data() if fake else RealTensorCounter()
    with freeze_existing_objects(), counting as counter:
        layer = make().requires_grad_(asks_weight)
        x = torch.zeros(shape, requires_grad=asks_input)
        with observed_step(counter):
            y = layer(x)
        steps.append(moved(counter))
        gradient = torch.zeros(y.shape)
        with observed_step(counter):
            y.backward(gradient)
        steps.append(moved(counter))
    return steps


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_moves_what_is_asked_for(name: str) -> None:
    make, shape, kept = LAYERS[name]
    for where in ASKED:
        assert counted(make, shape, where) == by_hand(make(), shape, kept, where), where


@pytest.mark.parametrize("name", ["conv2d in groups", "batch norm"])
def test_so_does_one_that_runs(name: str) -> None:
    make, shape, kept = LAYERS[name]
    for where in ASKED:
        assert counted(make, shape, where, fake=False) == by_hand(make(), shape, kept, where)


@pytest.mark.parametrize("name", ["conv2d", "transposed conv1d", "layer norm", "group norm"])
def test_a_bias_alone_is_made_of_the_outputs_gradient(name: str) -> None:
    make, shape, _ = LAYERS[name]
    with without_data() as counter:
        layer = make()
        layer.weight.requires_grad_(False)
        y = layer(torch.zeros(shape))
        gradient = torch.zeros(y.shape)
        with observed_step(counter):
            y.backward(gradient)
    assert moved(counter) == (E * y.numel(), E * layer.bias.numel())


@pytest.mark.parametrize("where", ASKED)
def test_a_batch_norm_in_evaluation_reads_the_running_statistics(where: str) -> None:
    x, c = torch.Size(IMAGES).numel(), 6
    forward, backward = counted(lambda: nn.BatchNorm2d(c).eval(), IMAGES, where)
    assert forward == (E * (x + 4 * c), E * x)
    assert (
        backward
        == {
            "middle": (
                E * (2 * x + 3 * c),
                E * (x + 2 * c),
            ),  # both gradients, weight and statistics
            "first": (E * (2 * x + 2 * c), E * 2 * c),
            "frozen": (E * (x + 2 * c), E * x),  # the input is only scaled: by weight and variance
        }[where]
    )


@pytest.mark.parametrize("asks_image", [False, True])
def test_sampling_writes_the_gradients_that_are_asked_for(asks_image: bool) -> None:
    image, grid = (2, 3, 4, 4), (2, 4, 4, 2)
    with without_data() as counter:
        sampled = torch.zeros(image, requires_grad=asks_image)
        y = F.grid_sample(sampled, torch.zeros(grid, requires_grad=True), align_corners=False)
        gradient = torch.zeros(y.shape)
        with observed_step(counter):
            y.backward(gradient)
    written = [grid, image][: 1 + asks_image]
    assert moved(counter, "grid_sampler_2d_backward") == (
        E * sum(map(math.prod, (y.shape, image, grid))),
        E * sum(map(math.prod, written)),
    )


@pytest.mark.parametrize(
    ("work", "shapes", "read"),
    [
        (lambda a, x, y: torch.addmm(a, x, y, beta=0), [(4, 5), (4, 3), (3, 5)], 27),
        (lambda a, x, y: torch.addmm(a, x, y, beta=1), [(4, 5), (4, 3), (3, 5)], 47),
        (lambda a, x, y: a.addmm_(x, y, beta=0), [(4, 5), (4, 3), (3, 5)], 27),
        (lambda a, x, y: torch.baddbmm(a, x, y, beta=0), [(1, 4, 5), (1, 4, 3), (1, 3, 5)], 27),
    ],
)
def test_what_counts_nothing_in_a_sum_is_not_read(
    work: Callable[..., Tensor], shapes: list[tuple[int, ...]], read: int
) -> None:
    assert cost(work, *shapes) == (E * read, E * 20)


@pytest.mark.parametrize(
    ("layer", "kept"),
    [
        (nn.AdaptiveMaxPool2d(2), 2),  # indices, int64
        (nn.ReflectionPad2d(1), 0),
        (nn.ReplicationPad2d(1), 0),
        (nn.AvgPool2d(2), 0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_backward_of_a_pool_or_a_padding_does_not_read_its_input(
    layer: nn.Module, kept: int
) -> None:
    x = math.prod(IMAGES)
    forward, backward = counted(lambda: layer, IMAGES, "middle")
    y = layer(torch.zeros(IMAGES)).numel()
    assert forward == (E * x, E * (y + kept * y))
    assert backward == (E * (y + kept * y), E * x)


def test_a_bag_of_embeddings_reads_a_row_for_each_index() -> None:
    bag, indices = nn.EmbeddingBag(100, 8, mode="sum"), torch.zeros(2, 3, dtype=torch.long)
    with without_data() as counter, observed_step(counter):
        bag(indices)
    assert moved(counter, "_embedding_bag").read == 8 * (6 + 2) + E * 6 * 8
