"""Changes a model as a case requests: activation checkpointing and trainable parameters.

Activation checkpointing recomputes the activations of a block in backward. All trainers use
PyTorch's reentrant checkpoints. In forward, such a checkpoint runs a block without autograd, and
Opacus's hooks do nothing. In backward, the checkpoint runs the block again, with autograd. With
``use_reentrant=False``, Opacus fails, because Opacus's hooks run twice for the forward of a layer
and once for the backward.

A case trains all parameters, the parameters whose name matches a pattern, or low-rank adapters. An
adapter is a pair of narrow layers whose output is added to the output of a frozen linear layer (Hu
et al., "LoRA", 2021, https://arxiv.org/abs/2106.09685).
"""

from __future__ import annotations

import warnings
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpbench.core.case import lora_rank
from dpbench.core.errors import ConfigurationError
from dpbench.workloads.base import Workload


def checkpoint_blocks(workload: Workload, model: nn.Module) -> None:
    """Make backward recompute the activations of each block of the workload."""
    for block in list(workload.blocks(model)):
        block.forward = partial(_checkpointed, block.forward)


def _checkpointed(forward: Any, first: Tensor, *others: Any, **options: Any) -> Any:
    """Run the ``forward`` of a block under a checkpoint. ``first`` has the input activations."""
    if not first.requires_grad:  # otherwise, a block after frozen layers has no gradients
        first = first.detach().requires_grad_()
    return checkpoint(partial(forward, **options), first, *others, use_reentrant=True)


class LowRank(nn.Module):
    """A linear layer with a low-rank adapter, whose output is zero before training."""

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
    """Freeze the parameters that a case does not train, and add adapters for ``lora:RANK``."""
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
            f"trainable {trainable}: the model has no {what}; its first parameter is {example}"
        )
    model.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)


def _with_adapters(model: nn.Module, rank: int) -> list[Tensor]:
    """Add adapters to linear layers and return the weights of the adapters.

    The linear layer in PyTorch's ``MultiheadAttention`` gets no adapter, because the attention
    reads the weights of this layer without calling the layer.
    """
    weights: list[Tensor] = []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and isinstance(parent, nn.MultiheadAttention):
                warnings.warn(f"lora: {name} of MultiheadAttention has no adapter", stacklevel=3)
            elif isinstance(child, nn.Linear):
                adapter = LowRank(child, rank)
                setattr(parent, name, adapter)
                weights += [adapter.down.weight, adapter.up.weight]
    return weights
