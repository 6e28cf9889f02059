"""Adds noise to gradients and takes the optimizer's step, in one pass over flat buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpbench.training.gradient_sums import Buffer, one_buffer
from dpbench.training.noisy_updates import Numbers, noisy_update

MERGED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Optimizers that `MergedUpdate` supports. Subclasses of these optimizers are not supported."""

UNSUPPORTED_OPTIONS = ("amsgrad", "capturable", "differentiable")
"""Options of the optimizers in `MERGED` that `MergedUpdate` does not support if they are on."""


def groups_of(optimizer: torch.optim.Optimizer) -> dict[Tensor, int]:
    """Return for each parameter the index of its group in the optimizer."""
    groups = enumerate(optimizer.param_groups)
    return {parameter: number for number, group in groups for parameter in group["params"]}


def why_not(optimizer: torch.optim.Optimizer) -> str:
    """Return why a merged update cannot replace the optimizer's step, or '' if it can."""
    name = type(optimizer).__name__
    if type(optimizer) not in MERGED:
        return f"{name} has no merged step"
    # A learning rate scheduler replaces `step` only to count its calls.
    if "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return f"the step of {name} was replaced"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"the step of {name} has hooks"
    for group in optimizer.param_groups:
        for option in UNSUPPORTED_OPTIONS:
            if group.get(option):
                return f"{name} has {option}=True"
        numbers = group["lr"], group["weight_decay"], *group.get("betas", ())
        if any(isinstance(each, Tensor) for each in numbers):
            return f"an option of {name} is a tensor, not a number"
    return ""


class Update(NamedTuple):
    """The update of one buffer. The attributes are arguments of `noisy_update`."""

    flat: Tensor
    moments: Sequence[Tensor]
    rule: str
    numbers: Numbers

    def __call__(self, gradient: Tensor, seed: Tensor, weights: Tensor | None = None) -> None:
        noisy_update(self.flat, self.moments, gradient, seed, self.rule, self.numbers, weights)


class MergedUpdate:
    """The step of an optimizer, in the same pass that adds the noise.

    Parameters and moving averages become views of flat buffers. The moving averages stay in
    ``optimizer.state``, so that they can be saved and loaded. Between merged steps, the optimizer's
    own ``step`` may also be called. Learning rates and other options are read in each step.

    Args:
        sharing: the parameters of each gradient buffer.
    """

    def __init__(self, sharing: Sequence[Sequence[Tensor]]) -> None:
        self._sharing = sharing
        self.flats = [flatten_parameters(each) for each in sharing]
        self._moments: dict[tuple[int, str], Buffer] = {}
        # For each parameter: the tensor that counts its steps, and this tensor's version and value.
        self._counts: dict[Tensor, tuple[Tensor, int, float]] = {}

    def updates(
        self, optimizer: torch.optim.Optimizer, deviation: float, examples: int
    ) -> list[Update] | str:
        """Return the next step's update of each buffer, or why the step cannot be merged.

        Args:
            optimizer: the optimizer. For Adam and AdamW, the count of steps is increased.
            deviation: standard deviation of the noise that this step draws.
            examples: number by which the sum of gradients is divided.
        """
        if why := why_not(optimizer):
            return why
        number_of = groups_of(optimizer)
        groups: list[Mapping[str, Any]] = []
        for parameters in self._sharing:
            numbers = {number_of.get(parameter, -1) for parameter in parameters}
            if len(numbers) > 1 or -1 in numbers:
                return "parameters were moved to other parameter groups"
            groups.append(optimizer.param_groups[numbers.pop()])
        adam = not isinstance(optimizer, torch.optim.SGD)
        if adam:
            taken = [self._steps_taken(optimizer, parameters) for parameters in self._sharing]
        else:
            taken = [self._has_momentum(optimizer, *each) for each in enumerate(groups)]
        if None in taken:
            return "parameters of one group have taken different numbers of steps"
        made = []
        for number, (group, before) in enumerate(zip(groups, taken, strict=True)):
            scale = (-1 if group["maximize"] else 1) / examples
            update_rule = adam_numbers if adam else sgd_numbers
            rule, keys, scalars = update_rule(group, Numbers(deviation, scale), float(before or 0))
            moments = [self._flat_state(optimizer, number, key) for key in keys]
            made.append(Update(self.flats[number], moments, rule, scalars))
        if adam:
            self._count_step(optimizer, groups)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers read this
        return made

    def _flat_state(self, optimizer: torch.optim.Optimizer, number: int, key: str) -> Tensor:
        """Return a flat buffer with the moving averages of one ``key``, such as ``exp_avg``."""
        if (number, key) not in self._moments:
            self._moments[number, key] = one_buffer(self._sharing[number])
            self._moments[number, key].flat.zero_()
        flat, places, _ = self._moments[number, key]
        for parameter, place in places.items():
            state = optimizer.state[parameter]
            value = state.get(key)
            if value is place:
                continue
            if value is None:
                place.zero_()
            else:  # a loaded checkpoint, or the optimizer's own step, has set it
                place.copy_(value)
            state[key] = place
        return flat

    def _has_momentum(
        self, optimizer: torch.optim.Optimizer, number: int, group: Mapping[str, Any]
    ) -> float | None:
        """Return 1 if any parameter of a buffer has momentum in the optimizer's state, otherwise 0.

        Return None if only some parameters have it, and the group has both momentum and dampening.
        """
        states = (optimizer.state.get(p, {}) for p in self._sharing[number])
        has = {state.get("momentum_buffer") is not None for state in states}
        alike = len(has) == 1 or not group["momentum"] or not group["dampening"]
        return float(True in has) if alike else None

    def _steps_taken(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]
    ) -> float | None:
        """Return how many steps the parameters have taken; None if their numbers differ."""
        numbers = set()
        for parameter in parameters:
            step: Any = optimizer.state.get(parameter, {}).get("step")
            known: Any
            known, version, count = self._counts.get(parameter, (None, 0, 0.0))
            if step is None:
                count = 0.0
            elif step is not known or step._version != version:
                count = float(step)  # a loaded checkpoint, or the optimizer's own step, has set it
                self._counts[parameter] = step, step._version, count
            numbers.add(count)
        return numbers.pop() if len(numbers) == 1 else None

    def _count_step(
        self, optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]
    ) -> None:
        for parameters, group in zip(self._sharing, groups, strict=True):
            for parameter in parameters:
                state = optimizer.state[parameter]
                if "step" not in state:
                    device = parameter.device if group["fused"] else "cpu"
                    state["step"] = torch.zeros((), device=device)
                    self._counts[parameter] = state["step"], 0, 0.0
        torch._foreach_add_([step for step, _, _ in self._counts.values()], 1)
        for parameter, (step, _, count) in self._counts.items():
            self._counts[parameter] = step, step._version, count + 1


UpdateRule = tuple[str, Sequence[str], Numbers]
"""A rule of `noisy_update`, the keys of its moving averages in the optimizer's state, and the
scalars of the update."""


def sgd_numbers(group: Mapping[str, Any], noise: Numbers, has_momentum: float) -> UpdateRule:
    """Return the update of ``torch.optim.SGD``, which applies no dampening in its first step."""
    numbers = noise._replace(rate=group["lr"], decay=group["weight_decay"])
    if not group["momentum"]:
        return "plain", (), numbers
    added = 1 - group["dampening"] * has_momentum
    numbers = numbers._replace(first_kept=group["momentum"], first_added=added)
    return "nesterov" if group["nesterov"] else "momentum", ("momentum_buffer",), numbers


def adam_numbers(group: Mapping[str, Any], noise: Numbers, taken: float) -> UpdateRule:
    """Return the update of ``torch.optim.Adam`` and ``AdamW`` after ``taken`` earlier steps."""
    (beta1, beta2), rate, decay = group["betas"], group["lr"], group["weight_decay"]
    decoupled = group["decoupled_weight_decay"]
    numbers = noise._replace(
        rate=rate / (1 - beta1 ** (taken + 1)),
        decay=0.0 if decoupled else decay,
        kept=1 - rate * decay if decoupled else 1.0,
        first_kept=beta1,
        first_added=1 - beta1,
        second_kept=beta2,
        second_added=1 - beta2,
        correction=(1 - beta2 ** (taken + 1)) ** -0.5,
        eps=group["eps"],
    )
    return "adam", ("exp_avg", "exp_avg_sq"), numbers


def flatten_parameters(parameters: Sequence[Tensor]) -> Tensor:
    """Copy parameters into a new buffer, make them views of the buffer, and return the buffer."""
    flat, places, _ = one_buffer(parameters)
    for parameter, place in places.items():
        place.copy_(parameter.data)
        parameter.data = place
    return flat
