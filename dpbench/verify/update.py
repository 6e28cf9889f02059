"""Observes one step of a trainer: the gradient that its optimizer receives, and the movement."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from dpbench.core.errors import ConfigurationError
from dpbench.training.base import Batch, TrainerBase
from dpbench.training.parallel import gathered
from dpbench.verify.reference import Gradients

RATE = 2.0**30
"""Learning rate of the checked steps. The movement of parameters is divided by `RATE`. The rate is
so large that rounding the new values hardly changes this result."""

Parameters = Mapping[str, nn.Parameter]


class Update:
    """One observed step of a trainer.

    Attributes:
        optimizer: the optimizer that stepped: ``plain_optimizer``, or else another optimizer with
            trained parameters. It is None if none stepped, or if it stepped with a closure.
        received: the gradients that this optimizer received, by parameter.
        moved: how this optimizer moved the parameters: value before its step - value after.
    """

    def __init__(self, trainer: TrainerBase, trained: Parameters) -> None:
        self.trainer, self.trained = trainer, trained
        self.names = {id(p): name for name, p in trained.items()}
        self.optimizer: Optimizer | None = None
        self.received: dict[str, Tensor] = {}
        self.moved: dict[str, Tensor] = {}
        self._before: dict[str, Tensor] = {}

    def take(self, batch: Batch) -> None:
        """Take the step."""
        # Hooks are global: trainers may step differently if the optimizer itself has hooks.
        with _removed(register_optimizer_step_pre_hook(self._begin)):  # noqa: SIM117
            with _removed(register_optimizer_step_post_hook(self._end)):
                self.trainer.train_step(batch)

    def _begin(self, stepping: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        own = {
            name: (p, group)
            for group in stepping.param_groups
            for p in group["params"]
            if (name := self.names.get(id(p)))
        }
        closure = len(args) > 1 or options.get("closure") is not None
        capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        if not own or closure or capturing:
            return
        if stepping is not self.optimizer:
            if self.optimizer is self.trainer.plain_optimizer:
                return
            self.optimizer, self.received, self.moved = stepping, {}, {}
        for name, (p, group) in own.items():
            if p.grad is None:
                continue
            gradient = gathered(p.grad).double()
            self.received[name] = self.received.get(name, 0) + gradient
            if is_plain_sgd(stepping, group):
                self.moved[name] = self.moved.get(name, 0) + float(group["lr"]) * gradient
            else:
                self._before[name] = gathered(p.detach()).double()

    def _end(self, stepping: Any, *_: Any) -> None:
        if stepping is self.optimizer:
            for name, before in self._before.items():
                change = before - gathered(self.trained[name].detach()).double()
                self.moved[name] = self.moved.get(name, 0) + change
            self._before = {}


@contextmanager
def _removed(hook: Any) -> Iterator[None]:
    try:
        yield
    finally:
        hook.remove()


def is_plain_sgd(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Return whether an optimizer subtracts learning rate × gradient, and does nothing else."""
    more = ("momentum", "dampening", "weight_decay", "nesterov", "maximize")
    return type(optimizer) is torch.optim.SGD and not any(group[each] for each in more)


def groups_by_name(optimizer: Optimizer, trained: Parameters) -> dict[str, dict[str, Any]]:
    """Return the parameter group of each trained parameter that an optimizer has."""
    names = {id(p): name for name, p in trained.items()}
    return {
        names[id(p)]: group
        for group in optimizer.param_groups
        for p in group["params"]
        if id(p) in names
    }


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


class OptimizerCopy:
    """A copy of a trainer's optimizer and parameters, made before a step.

    If a trainer merges the update with the noise, noisy gradients never exist in memory, and no
    optimizer steps. The copy shows how the optimizer would have moved the parameters.
    """

    def __init__(self, trainer: TrainerBase, trained: Parameters) -> None:
        self.trainer, self.trained = trainer, trained
        self.copy = copy.deepcopy(trainer.plain_optimizer)
        names = {id(p): name for name, p in trained.items()}
        originals = (p for group in trainer.plain_optimizer.param_groups for p in group["params"])
        copies = (p for group in self.copy.param_groups for p in group["params"])
        self.copies = {names[id(p)]: q for p, q in zip(originals, copies, strict=True)}

    def gradients(self) -> Gradients:
        """Return the gradients of the step, computed from the optimizer's moving averages.

        What moves parameters otherwise than the copy moves them is added, divided by `RATE`, except
        differences by rounding.
        """
        gradients = gradients_from_averages(self.trainer.plain_optimizer, self.trained)
        if not gradients:
            raise ConfigurationError(
                f"{type(self.trainer).__name__} does not call plain_optimizer.step() without a "
                "closure, so verify can check it only with --optimizer sgd"
            )
        before = values_of(self.copies)
        for name, p in self.copies.items():
            p.grad = local_shard(gradients[name].to(p.dtype), p)
        self.copy.step()
        for name, expected in values_of(self.copies).items():
            moved = (expected - before[name]).abs()
            eps = torch.finfo(self.trained[name].dtype).eps
            rounding = 4 * eps * (expected.abs() + moved) + 1e-5 * moved
            beside = expected - gathered(self.trained[name].detach()).double()
            gradients[name] += torch.where(beside.abs() <= rounding, 0.0, beside) / RATE
        return gradients


def values_of(parameters: Parameters) -> dict[str, Tensor]:
    """Return whole parameters in float64, gathered from the ranks' shards."""
    return {name: gathered(p.detach()).double() for name, p in parameters.items()}


def local_shard(whole: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return this rank's shard of a value, or the whole value of an unsharded parameter."""
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements)
