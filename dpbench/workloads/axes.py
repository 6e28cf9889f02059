"""Changes of a model that a case asks for, for any workload.

Activation checkpointing recomputes the activations of a block in backward. All trainers use
PyTorch's reentrant variant: it runs a block first without autograd, where Opacus's hooks are
silent, and again with autograd in backward. With ``use_reentrant=False`` hooks would see each layer
twice in forward and once in backward, and Opacus fails.

A case trains all parameters, those whose name matches a pattern, or low-rank adapters: two narrow
layers beside each frozen linear layer (Hu et al., "LoRA", 2021, https://arxiv.org/abs/2106.09685).
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
    """Recompute each of the workload's blocks in backward."""
    for block in list(workload.blocks(model)):
        block.forward = partial(_checkpointed, block.forward)


def _checkpointed(forward: Any, first: Tensor, *others: Any, **options: Any) -> Any:
    """Run a block under a checkpoint; ``first`` is the activations ``[B, …]`` of the one before."""
    if not first.requires_grad:  # a block after frozen layers would not train otherwise
        first = first.detach().requires_grad_()
    return checkpoint(partial(forward, **options), first, *others, use_reentrant=True)


class LowRank(nn.Module):
    """A linear layer and its adapter, which is zero at first."""

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
    """Freeze all parameters but those that ``trainable`` selects or adds."""
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
    """Add adapters to linear layers, except to those whose weights PyTorch's attention reads."""
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
