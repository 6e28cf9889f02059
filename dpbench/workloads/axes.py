"""What the axes of a case change in a model, whatever the workload.

Activation checkpointing: what a block computed is not kept, but computed again in backward. In
PyTorch's reentrant way, for every trainer: a block runs without autograd first, when Opacus's hooks
do not listen, and once with it in backward. In the other way (``use_reentrant=False``) the hooks
hear each layer twice in forward and once in backward, and Opacus fails.

Which parameters are trained: all, those with certain names, or adapters of low rank. These are
those of Hu et al., "LoRA" (2021), https://arxiv.org/abs/2106.09685: beside each linear layer, which
is frozen, two narrow ones.
"""

from __future__ import annotations

import warnings
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpbench.core.errors import ConfigurationError
from dpbench.core.model_size import lora_rank
from dpbench.workloads.base import Workload


def checkpoint_blocks(workload: Workload, model: nn.Module) -> None:
    """Let each of the workload's blocks run again in backward."""
    for block in list(workload.blocks(model)):
        block.forward = partial(_again_in_backward, block.forward)


def _again_in_backward(forward: Any, first: Tensor, *others: Any, **options: Any) -> Any:
    """A block whose first argument, the activations ``[B, …]``, came from the block before."""
    if not first.requires_grad:  # what is before is frozen: else nothing here would be trained
        first = first.detach().requires_grad_()
    return checkpoint(partial(forward, **options), first, *others, use_reentrant=True)


class LowRank(nn.Module):
    """A linear layer and its adapter, which adds nothing at first."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)
        self.to(layer.weight.device, layer.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        adapted: Tensor = self.layer(x) + self.up(self.down(x))
        return adapted


def choose_trainable(model: nn.Module, trainable: str) -> None:
    """Freeze what is not trained, and add adapters if they are."""
    if trainable == "all":
        return
    if rank := lora_rank(trainable):
        trained = _with_adapters(model, rank)
    else:
        trained = [p for name, p in model.named_parameters() if fnmatchcase(name, trainable)]
    if not trained:
        what = "linear layer" if rank else f"parameter like {trainable}"
        example = next((name for name, _ in model.named_parameters()), "nothing")
        raise ConfigurationError(
            f"trainable {trainable}: the model has no {what}; it has {example}"
        )
    model.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)


def _with_adapters(model: nn.Module, rank: int) -> list[Tensor]:
    """Give linear layers adapters, but not one whose weights PyTorch's attention reads itself."""
    weights: list[Tensor] = []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and isinstance(parent, nn.MultiheadAttention):
                warnings.warn(f"lora: no adapter for {name} of MultiheadAttention", stacklevel=3)
            elif isinstance(child, nn.Linear):
                adapter = LowRank(child, rank)
                setattr(parent, name, adapter)
                weights += [adapter.down.weight, adapter.up.weight]
    return weights
