"""Workloads of a single layer, like the ``benchmarks/`` in Opacus's repository."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from opacus.layers import DPGRU, DPLSTM, DPRNN
from torch import Tensor, nn

from dpbench.core.case import positive
from dpbench.core.errors import ConfigurationError, unknown
from dpbench.workloads.base import Batch, Workload
from dpbench.workloads.transformer import OpacusSelfAttention

GROUPS = 16


LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    "linear": lambda width, vocabulary: nn.Linear(width, width),
    "conv": lambda width, vocabulary: nn.Conv1d(width, width, 3, padding=1),
    "layernorm": lambda width, vocabulary: nn.LayerNorm(width),
    "groupnorm": lambda width, vocabulary: nn.GroupNorm(GROUPS, width),
    "instancenorm": lambda width, vocabulary: nn.InstanceNorm1d(width, affine=True),
    "embedding": lambda width, vocabulary: nn.Embedding(vocabulary, width),
    "mha": lambda width, vocabulary: OpacusSelfAttention(width, heads=max(width // 64, 1)),
    "rnn": lambda width, vocabulary: DPRNN(width, width, batch_first=True),
    "lstm": lambda width, vocabulary: DPLSTM(width, width, batch_first=True),
    "gru": lambda width, vocabulary: DPGRU(width, width, batch_first=True),
}
"""Functions that build a layer from width and vocabulary. Opacus refuses PyTorch's attention and
recurrent layers. So attention and recurrent layers are Opacus's layers, for all trainers."""

CHANNELS_FIRST = ("conv", "groupnorm", "instancenorm")

WITHOUT_POSITIONS = ("linear", "layernorm", "groupnorm", "embedding")
"""Layers that accept ``length=0``: examples without a dimension for positions. Other layers would
take a batch of such examples for one example."""


class Layer(Workload):
    """A single layer. The loss of an example is the mean square of the layer's output.

    Args:
        layer: a key of `LAYERS`.
        width: the number of input and output features. Attention has one head for each 64 features,
            and at least one head.
        length: the number of positions in an example; layers in `WITHOUT_POSITIONS` accept 0.
        vocabulary: the number of rows of an embedding; other layers ignore it.
    """

    def __init__(
        self, *, layer: str = "linear", width: int = 512, length: int = 128, vocabulary: int = 20000
    ) -> None:
        if layer not in LAYERS:
            raise unknown("layer", layer, LAYERS)
        if length < (layer not in WITHOUT_POSITIONS):
            raise ConfigurationError(
                f"layer {layer} cannot have length {length}; choose a larger length"
            )
        self.layer, self.length = layer, length
        self.width, self.vocabulary = positive("width", width), positive("vocabulary", vocabulary)

    def model(self) -> nn.Module:
        return LAYERS[self.layer](self.width, self.vocabulary)

    def batches(self, batch_size: int) -> Iterable[Batch]:
        positions = (self.length,) if self.length else ()
        shape: tuple[int, ...] = (*positions, self.width)
        if self.layer in CHANNELS_FIRST:
            shape = shape[::-1]
        while True:
            if self.layer == "embedding":
                yield torch.randint(self.vocabulary, (batch_size, *positions))
            else:
                yield torch.randn(batch_size, *shape)

    def losses(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        output = model(batch)
        output = output[0] if isinstance(output, tuple) else output  # without states
        losses: Tensor = output.reshape(len(output), -1).square().mean(dim=1)
        return losses
