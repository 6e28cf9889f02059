"""Workloads with residual networks, which classify images.

The networks follow He et al., "Deep Residual Learning for Image Recognition" (2015),
https://arxiv.org/abs/1512.03385, with two differences. All norm layers are group norms, because
Opacus refuses batch norms. A bottleneck block has its stride in the 3×3 convolution. No operator
works in place, because in-place operators fail with Opacus's hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpbench.core.case import positive
from dpbench.core.errors import unknown
from dpbench.workloads.base import Batch, Workload

GROUPS = 32

DEPTHS = {18: (1, (2, 2, 2, 2)), 34: (1, (3, 4, 6, 3)), 50: (4, (3, 4, 6, 3))}
"""For each depth of a network: a block's output channels divided by its width, and the number of
blocks in each stage. The quotient is 4 for bottlenecks, and 1 for other blocks."""


def conv_norm(channels: int, to: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Build a convolution without bias, followed by a group norm."""
    conv = nn.Conv2d(channels, to, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(conv, nn.GroupNorm(GROUPS, to))


class Block(nn.Module):
    """A residual block: two 3×3 convolutions or a bottleneck, and a shortcut around them.

    A bottleneck is a 3×3 convolution between two 1×1 convolutions.
    """

    def __init__(self, channels: int, width: int, expansion: int, stride: int) -> None:
        super().__init__()
        out = width * expansion
        if expansion == 1:
            parts = [conv_norm(channels, width, 3, stride), nn.ReLU(), conv_norm(width, out, 3)]
        else:
            parts = [conv_norm(channels, width, 1), nn.ReLU()]
            parts += [conv_norm(width, width, 3, stride), nn.ReLU(), conv_norm(width, out, 1)]
        same = channels == out and stride == 1
        self.path = nn.Sequential(*parts)
        self.shortcut = nn.Identity() if same else conv_norm(channels, out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.path(x) + self.shortcut(x))


class ResNet(Workload):
    """Classification of random images by a residual network.

    Args:
        depth: the number of layers, a key of `DEPTHS`.
        image_size: height and width of images, in pixels.
        classes: the number of classes.
    """

    def __init__(self, *, depth: int = 50, image_size: int = 224, classes: int = 1000) -> None:
        if depth not in DEPTHS:
            raise unknown("depth", depth, map(str, DEPTHS))
        self.depth = depth
        self.image_size, self.classes = (
            positive("image_size", image_size),
            positive("classes", classes),
        )

    def model(self) -> nn.Module:
        expansion, stages = DEPTHS[self.depth]
        layers = [conv_norm(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
        channels = 64
        for stage, blocks in enumerate(stages):
            width = 64 * 2**stage
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(Block(channels, width, expansion, stride))
                channels = width * expansion
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, self.classes)]
        return nn.Sequential(*layers, *head)

    def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
        return [layer for layer in model.children() if isinstance(layer, Block)]

    def batches(self, batch_size: int) -> Iterable[Batch]:
        return random_images(batch_size, (3, self.image_size, self.image_size), self.classes)

    def losses(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def random_images(batch_size: int, shape: tuple[int, ...], classes: int) -> Iterable[Batch]:
    """Yield batches without end: images of normal noise, and a random class for each image."""
    while True:
        yield torch.randn(batch_size, *shape), torch.randint(classes, (batch_size,))
