"""Whether a model is still the one that a trainer was made for."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dpbench.core.errors import ConfigurationError


class ModelSnapshot:
    """The layers and parameters of a model, as a trainer found them.

    A trainer's lists, rules and buffers are made for these layers and parameters. If the model
    changed later, they would silently be wrong.

    Args:
        model: the model now.
        in_place: whether parameters must also keep their memory.
    """

    def __init__(self, model: nn.Module, *, in_place: bool = False) -> None:
        self._parts: list[tuple[str, dict[str, object], str, object]] = []
        self._parameters: list[tuple[str, Tensor, bool, int | None]] = []
        for path, layer in model.named_modules():
            before = f"{path}." if path else ""
            for kind, own in (("layer", layer._modules), ("parameter", layer._parameters)):
                parts: dict[str, object] = {**own}
                self._parts += [(f"{kind} {before}{n}", own, n, part) for n, part in parts.items()]
            for name, parameter in layer.named_parameters(before[:-1], recurse=False):
                place = memory_of(parameter) if in_place else None
                self._parameters.append((name, parameter, parameter.requires_grad, place))

    def check(self) -> None:
        """Refuse a changed model; the error names the change."""
        anew = "make a new trainer afterwards"
        for name, parts, own, part in self._parts:
            if parts.get(own) is not part:
                raise refusal(name, "replaced", f"load_state_dict without assign, or {anew}")
        for name, parameter, trained, place in self._parameters:
            if parameter.requires_grad is not trained:
                what = "frozen" if trained else "thawed"
                raise refusal(f"parameter {name}", what, f"do so before, or {anew}")
            if place is not None and memory_of(parameter) != place:
                how = "change it in place (parameter.copy_(values) under torch.no_grad())"
                raise refusal(f"parameter {name}", "given other memory", f"{how}, or {anew}")


def refusal(name: str, what: str, remedy: str) -> ConfigurationError:
    """The error for a part of a model that has changed."""
    return ConfigurationError(
        f"{name} was {what} after the trainer was made, which trains what it found then: {remedy}"
    )


def memory_of(tensor: Tensor) -> int:
    """The identity of a tensor's storage, also without data; of a DTensor, of the local shard.

    It ignores shards without rows, to which FSDP2 gives memory in the first step.
    """
    local: Any = tensor.detach()
    if isinstance(local, DTensor):
        local = local.to_local()
    storage: int = local.untyped_storage()._cdata
    return storage if local.numel() else 0
