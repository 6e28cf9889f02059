"""Detects changes of a model that its trainer does not support, such as a replaced layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dpbench.core.errors import ConfigurationError


class ModelSnapshot:
    """A record of the layers and parameters that a model has when its trainer is made.

    A trainer makes lists, rules and buffers for these layers and parameters. If the model changed
    later, the trainer could silently compute wrong gradients.

    Args:
        model: the model.
        in_place: whether parameters must also stay in the same memory.
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
        """Raise if the model has changed. The error names the change."""
        anew = "make a new trainer afterwards"
        for name, parts, own, part in self._parts:
            if parts.get(own) is not part:
                raise refusal(name, "replaced", f"load_state_dict without assign, or {anew}")
        for name, parameter, trained, place in self._parameters:
            if parameter.requires_grad is not trained:
                what = "frozen" if trained else "unfrozen"
                raise refusal(f"parameter {name}", what, f"do this before making it, or {anew}")
            if place is not None and memory_of(parameter) != place:
                how = "change it in place (parameter.copy_(values) under torch.no_grad())"
                raise refusal(f"parameter {name}", "moved to other memory", f"{how}, or {anew}")


def refusal(name: str, what: str, remedy: str) -> ConfigurationError:
    """Return an error that says what happened to a part of the model, and what would work."""
    return ConfigurationError(
        f"{name} was {what} after the trainer was made, and the trainer does not support this "
        f"change: {remedy}"
    )


def memory_of(tensor: Tensor) -> int:
    """Return a number that identifies a tensor's storage, even if the tensor has no data.

    For a DTensor, the number identifies the storage of the local shard. For an empty tensor or
    shard, the number is 0, because FSDP2 allocates an empty shard's memory only in the first step.
    """
    local: Any = tensor.detach()
    if isinstance(local, DTensor):
        local = local.to_local()
    storage: int = local.untyped_storage()._cdata
    return storage if local.numel() else 0
