"""What a private step shows of itself, and the steps of Opacus's optimizers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from dpbench.verify.reference import Threshold
from dpbench.verify.repeated_calls import TOLERANCE, NotChecked, hook_owners, keep

SIGMAS = ("noise_multiplier", "_adjusted_noise_multiplier")
"""Attributes of Opacus's optimizers that hold σ."""


class PrivateStep(Protocol):
    """A step that hands private gradients over to an ordinary optimizer.

    The gradient is the sum of the examples' clipped gradients and of noise with the standard
    deviation σC, divided by ``divisor``. An optimizer other than Opacus's offers its steps by a
    method ``private_step``, which is called when the step begins.

    Attributes:
        inner: the optimizer to which gradients are handed over.
        parameters: the parameters that are trained.
        sigma: σ, the multiplier of the noise of the gradients.
        threshold: the clipping threshold C, or a list of one threshold for each parameter, whose
            norm is C.
        mean: whether the loss is a mean over examples, not a sum.
        batch_size: the expected number of examples of each accumulated batch, by which a sum is
            divided; 1 if sums are not divided.
        divisor: the number by which the sum of this step is divided.
    """

    inner: Optimizer
    parameters: Sequence[nn.Parameter]
    sigma: float
    threshold: Threshold
    mean: bool
    batch_size: int
    divisor: int

    def lower(self, wanted: Threshold, modules: Sequence[nn.Module]) -> Threshold | None:
        """Lower the threshold of later steps wherever it is kept, also by the hooks of modules.

        Returns:
            The threshold before; None if it is not above ``wanted``.
        """

    def without_noise(self, step: Callable[[], Any], seed: int) -> list[Tensor] | None:
        """Return the gradients that a step with σ = 0 would hand over, and undo the step.

        Args:
            step: takes the step.
            seed: seeds the random numbers of the step that is undone.

        Returns:
            One gradient for each parameter; None if the step only accumulates gradients.
        """


class OpacusStep(PrivateStep):
    """A step of an optimizer of Opacus, which may be of a derived class."""

    def __init__(self, outer: Any) -> None:
        self.outer, self.inner, self.parameters = outer, outer.original_optimizer, [*outer.params]
        self.sigma = float(getattr(outer, SIGMAS[1], outer.noise_multiplier))
        if self.sigma and (of_count := getattr(outer, "unclipped_num_std", 0)):
            # Adaptive clipping spends part of the privacy budget on a count of unclipped
            # gradients, so the gradients' noise is larger (https://arxiv.org/abs/1905.03871).
            self.sigma = (self.sigma**-2 - (2 * of_count) ** -2) ** -0.5
        self.threshold = self._threshold()
        self.mean = outer.loss_reduction == "mean"
        self.batch_size = outer.expected_batch_size if self.mean else 1
        self.divisor = self.batch_size * (outer.accumulated_iterations if self.mean else 1)

    def _threshold(self) -> Threshold:
        each = getattr(self.outer, "max_grad_norms", None)
        return float(self.outer.max_grad_norm) if each is None else [*map(float, each)]

    def lower(self, wanted: Threshold, modules: Sequence[nn.Module]) -> Threshold | None:
        """See `PrivateStep.lower`."""
        now = torch.tensor(before := self._threshold())
        if now.ndim != torch.tensor(wanted).ndim or not (now > torch.tensor(wanted)).any():
            return None
        lowered = torch.minimum(now, torch.tensor(wanted))
        if lowered.ndim:
            self.outer.max_grad_norms = lowered.tolist()
        # Ghost clipping's hooks have a threshold of their own, which should be the optimizer's.
        owners = [owner for module in modules for owner in hook_owners(module)]
        for each in (self.outer, *(o for o in owners if hasattr(o, "max_grad_norm"))):
            each.max_grad_norm = float(each.max_grad_norm) * float(lowered.norm() / now.norm())
        return before

    def without_noise(self, step: Callable[[], Any], seed: int) -> list[Tensor] | None:
        """See `PrivateStep.without_noise`."""

        def stop(optimizer: Any, args: Any, options: Any) -> None:
            if optimizer is self.inner:
                raise _HandedOver

        devices = {p.device for p in self.parameters if p.device.type == "cuda"}
        with ExitStack() as undo, torch.random.fork_rng(devices):
            undo.callback(random.setstate, random.getstate())
            keep(undo, [self.outer.__dict__, *self.parameters], set())
            torch.manual_seed(seed)
            for name in SIGMAS:
                if hasattr(self.outer, name):
                    setattr(self.outer, name, 0.0)
            if getattr(self.outer.step_hook, "__module__", "").startswith("opacus."):
                self.outer.step_hook = None  # it counts the step's privacy
            undo.callback(register_optimizer_step_pre_hook(stop).remove)
            try:
                if not step():
                    return None
            except _HandedOver:
                pass
            except Exception as error:
                raise NotChecked(f"a step cannot be taken without noise: {error}") from error
            return [gradient_of(p).clone() for p in self.parameters]


def handed_without_noise(
    private: PrivateStep, step: Callable[[], Any], number: int
) -> list[Tensor] | None:
    """Take a step without noise two or three times, and return the gradients if they agree.

    Steps with an odd ``number`` are taken once more, so that code which counts its own calls does
    not always meet the same count.
    """
    seeds = range(number, number + 2 + number % 2)
    first, *others = [private.without_noise(step, seed) for seed in seeds]
    for other in others:
        for a, b in zip(first or (), other or (), strict=True):
            if not (a - b).norm() <= TOLERANCE * a.norm():
                raise NotChecked("a step with σ = 0 is still random")
    return first


def gradient_of(parameter: Tensor) -> Tensor:
    """Return a parameter's gradient, or zeros if it has none."""
    grad = parameter.grad
    return torch.zeros_like(parameter) if grad is None else grad.detach()


class _HandedOver(Exception):
    """Ends a step without noise, as soon as the inner optimizer would step."""
