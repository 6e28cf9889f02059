"""Observes one step of a trainer: the gradient that its optimizer receives, and the movement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from dpbench.training.base import Batch, TrainerBase
from dpbench.training.parallel import gathered

RATE = 2.0**30
"""Learning rate of the checked steps. With SGD, the update is computed as (value before the step -
value after the step) / `RATE`. The rate is so large that rounding the new value hardly changes this
result."""

Parameters = Mapping[str, nn.Parameter]


class Update:
    """One step of a trainer, and what an optimizer received in it.

    Attributes:
        optimizer: the optimizer that stepped: ``plain_optimizer``, or else another optimizer with
            trained parameters. It is None if none stepped, or if it stepped with a closure.
        received: the gradients that this optimizer received, by parameter.
        rates: the learning rate of each parameter in this optimizer, or else in
            ``plain_optimizer`` before the step.
    """

    def __init__(self, trainer: TrainerBase, trained: Parameters, batch: Batch) -> None:
        """Take the step."""
        self.trainer, self.trained = trainer, trained
        self.optimizer: Optimizer | None = None
        self.received: dict[str, Tensor] = {}
        groups = groups_by_name(trainer.plain_optimizer, trained)
        self.rates = {name: float(group["lr"]) for name, group in groups.items()}
        # The hook is global: trainers may step differently if the optimizer itself has hooks.
        hook = register_optimizer_step_pre_hook(self._record)
        try:
            trainer.train_step(batch)
        finally:
            hook.remove()

    def _record(self, stepping: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        groups = groups_by_name(stepping, self.trained)
        # A closure would compute gradients only after this hook.
        closure = len(args) > 1 or options.get("closure") is not None
        capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        if not groups or closure or capturing:
            return
        if stepping is not self.optimizer:
            if self.optimizer is self.trainer.plain_optimizer:
                return
            zeros = {name: torch.zeros_like(each) for name, each in values_of(self.trained).items()}
            self.optimizer, self.received = stepping, zeros
        for name, group in groups.items():
            self.rates[name] = float(group["lr"])
            if (gradient := self.trained[name].grad) is not None:
                self.received[name] += gathered(gradient).double()


def groups_by_name(optimizer: Optimizer, trained: Parameters) -> dict[str, dict[str, Any]]:
    """Return the parameter group of each trained parameter that an optimizer has."""
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    return {name: groups[id(p)] for name, p in trained.items() if id(p) in groups}


def state_of(optimizer: Optimizer, trained: Parameters) -> dict[str, Tensor]:
    """Return the tensors that an optimizer keeps for trained parameters, by a description."""
    return {
        f"{key} of {name}": gathered(value.detach())
        for name, p in trained.items()
        for key, value in optimizer.state.get(p, {}).items()
        if isinstance(value, Tensor)
    }


def zero_averages(optimizer: Optimizer) -> None:
    """Set the moving averages of gradients to zero."""
    for state in optimizer.state.values():
        if (average := _average_in(state)) is not None:
            average.zero_()


def _average_in(state: Mapping[str, Any]) -> Tensor | None:
    average: Tensor | None = state.get("exp_avg", state.get("momentum_buffer"))
    return average


def gradients_from_averages(optimizer: Optimizer, trained: Parameters) -> dict[str, Tensor]:
    """Compute the gradients of one step from an optimizer's moving averages that began at zero.

    Return an empty dict if the optimizer has no such averages, or if its options, such as coupled
    weight decay, do not allow the computation.
    """
    groups = groups_by_name(optimizer, trained)
    found = {}
    for name, parameter in trained.items():
        average, group = _average_in(optimizer.state.get(parameter, {})), groups.get(name, {})
        decays = group.get("weight_decay") and not group.get("decoupled_weight_decay")
        if average is None or decays or group.get("dampening") or group.get("maximize"):
            return {}
        found[name] = gathered(average).double() / (1 - group.get("betas", (0.0,))[0])
    return found


def values_of(parameters: Parameters) -> dict[str, Tensor]:
    """Return whole parameters in float64, gathered from the ranks' shards."""
    return {name: gathered(p.detach()).double() for name, p in parameters.items()}


def local_shard(whole: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return this rank's shard of a value, or the whole value of an unsharded parameter."""
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements)
