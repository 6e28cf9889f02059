"""Which parameters are trained: all, those with certain names, or adapters of low rank.

The adapters are those of Hu et al., "LoRA" (2021), https://arxiv.org/abs/2106.09685: beside each
linear layer, which is frozen, two narrow ones.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import Tensor, nn

from dpbench.case import lora_rank
from dpbench.errors import ConfigurationError


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
    found: list[Tensor] = []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                adapter = LowRank(child, rank)
                setattr(parent, name, adapter)
                found += [adapter.down.weight, adapter.up.weight]
    return found
