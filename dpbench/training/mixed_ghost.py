"""Mixed ghost clipping: each layer's norms the cheaper way of two.

Of Bu, Mao and Xu, "Scalable and Efficient Training of Large Convolutional Neural Networks with
Differential Privacy" (2022), https://arxiv.org/abs/2205.10683. The norm of a layer with T positions
and a weight of D × p comes from two products T × T (ghost norm) where these are smaller than the
per-sample gradient, 2 T² < p D, else from that gradient, which is not kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.utils.tensor_utils import unfold2d
from torch import Tensor, nn

from dpbench.training.ghost_lean import (
    GhostLeanTrainer,
    LeanGhostModule,
    Norms,
    NormSampler,
    linear_norms,
    sampled_norms,
)
from dpbench.training.norm_bounds import (
    cheaper_squared_norms,
    products_are_smaller,
)
from dpbench.training.per_layer import as_computed


def convolution_norms(
    layer: nn.Conv1d | nn.Conv2d, activations: list[Tensor], backprops: Tensor
) -> Norms:
    """Of a convolution, which is a linear layer of the patches that it sees."""
    positions = backprops[0, 0].numel()
    if layer.groups > 1 or not products_are_smaller(positions, layer.weight.numel()):
        return sampled_norms(layer, activations, backprops)
    x = as_computed(activations[0], backprops)
    return linear_norms(layer, [patches(layer, x).mT], backprops.flatten(2).mT)


def patches(layer: nn.Conv1d | nn.Conv2d, x: Tensor) -> Tensor:
    """What a convolution multiplies its weight with at each position, ``[B, D, T]``."""
    flat = isinstance(layer, nn.Conv1d)  # is a row of pixels
    unfolded: Tensor = unfold2d(
        x.unsqueeze(2) if flat else x,
        kernel_size=(1, *layer.kernel_size)[-2:],
        padding=layer.padding if isinstance(layer.padding, str) else (0, *layer.padding)[-2:],
        stride=(1, *layer.stride)[-2:],
        dilation=(1, *layer.dilation)[-2:],
    )
    return unfolded


class MixedGhostModule(LeanGhostModule):
    """Opacus's, with the cheaper norms of linear and convolutional layers."""

    NORM_SAMPLERS: ClassVar[Mapping[type, NormSampler]] = {
        **LeanGhostModule.NORM_SAMPLERS,
        nn.Linear: partial(linear_norms, squared_norms=cheaper_squared_norms),
        nn.Conv1d: convolution_norms,
        nn.Conv2d: convolution_norms,
    }


class MixedGhostTrainer(GhostLeanTrainer):
    """`GhostLeanTrainer` with each layer's norms the cheaper way; arguments as `TrainerBase`.

    Layers other than linear, convolutional and embedding ones have small gradients of examples,
    whose norms are taken as Opacus takes them.
    """

    def lean_module(self) -> type[GradSampleModuleFastGradientClipping]:
        return MixedGhostModule
