"""Compares what a script's private steps hand over to ordinary optimizers with what they should.

A private step is taken with σ = 0, undone, and taken as it is. Without noise, the gradient that
reaches the inner optimizer is the mean of clipped gradients, computed with a loop over the examples
(`examples_of_pass`). The difference of the two gradients is the noise. For the next steps, the
threshold is lowered until norms exceed it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from dpbench.training.clipped_sums import as_gradient
from dpbench.training.fused import FusedTrainer
from dpbench.verify.noise import Draw
from dpbench.verify.reference import (
    TOLERANCE,
    TOLERANCE_16_BIT,
    Call,
    Examples,
    Gradients,
    NotChecked,
    Threshold,
    distances,
    examples_of_pass,
    hook_owners,
    restore_later,
)

LOWERED = 0.25
"""The threshold is lowered to this share of the median norm, so that clipping shows."""

KNOWN_SEED = 2**32
"""PyTorch itself seeds with 64 random bits. A smaller seed has been set by the script."""

SIGMAS = ("noise_multiplier", "_adjusted_noise_multiplier")
"""Attributes of Opacus's optimizers that hold σ."""


class PrivateStep:
    """A step of an optimizer of Opacus, which hands private gradients over to another optimizer.

    The gradient is the sum of the examples' clipped gradients and of noise with the standard
    deviation σC, divided by ``divisor``.

    Attributes:
        outer: Opacus's optimizer, which may be of a derived class.
        inner: the optimizer to which gradients are handed over.
        parameters: the parameters that are trained, by name.
        sigma: σ, the multiplier of the noise of the gradients.
        threshold: the clipping threshold C, or a list of one threshold for each parameter, whose
            norm is C.
        mean: whether the loss is a mean over examples, not a sum.
        batch_size: the expected number of examples of each accumulated batch, by which a sum is
            divided; 1 if sums are not divided.
        divisor: the number by which the sum of this step is divided.
        known_seed: the seed of the noise, if the script has set it.
        is_empty: whether the step is known to have no examples, and no calls of modules.
    """

    is_empty = False

    def __init__(self, outer: Any, names: Mapping[int, str]) -> None:
        """Observe a step of ``outer``. ``names`` has the names of parameters by their ids."""
        self.outer, self.inner = outer, outer.original_optimizer
        self.parameters: dict[str, nn.Parameter] = {
            names.get(id(p), f"parameter {i}"): p for i, p in enumerate(outer.params)
        }
        self.sigma = float(getattr(outer, SIGMAS[1], outer.noise_multiplier))
        if self.sigma and (of_count := getattr(outer, "unclipped_num_std", 0)):
            # Adaptive clipping spends part of the privacy budget on a count of unclipped
            # gradients, so the gradients' noise is larger (https://arxiv.org/abs/1905.03871).
            self.sigma = (self.sigma**-2 - (2 * of_count) ** -2) ** -0.5
        self.threshold = self._threshold()
        self.mean = outer.loss_reduction == "mean"
        self.batch_size = outer.expected_batch_size if self.mean else 1
        self.divisor = self.batch_size * (outer.accumulated_iterations if self.mean else 1)
        seed = torch.initial_seed()
        self.known_seed = seed if seed < KNOWN_SEED else None

    def _threshold(self) -> Threshold:
        each = getattr(self.outer, "max_grad_norms", None)
        return float(self.outer.max_grad_norm) if each is None else [*map(float, each)]

    def lower(self, wanted: Threshold, modules: Sequence[nn.Module]) -> Threshold | None:
        """Lower the threshold of later steps wherever it is kept, also by the hooks of modules.

        Returns:
            The threshold before; None if it is not above ``wanted``.
        """
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

    def handed(self, step: Callable[[], Any], number: int) -> Gradients | None:
        """Return the gradients that the step would hand over with σ = 0.

        The step is taken and undone two or three times, which must agree. Steps with an odd
        ``number`` are taken once more, so that code which counts its own calls does not always meet
        the same count.

        Args:
            step: takes the step.
            number: the number of steps before.

        Returns:
            The gradients; None if the step only accumulates gradients.
        """
        seeds = range(number, number + 2 + number % 2)
        first, *others = [self._without_noise(step, seed) for seed in seeds]
        for other in others:
            for name, a in (first or {}).items():
                if not (a - (other or {})[name]).norm() <= TOLERANCE * a.norm():
                    raise NotChecked("a step with σ = 0 is still random")
        return first

    def _without_noise(self, step: Callable[[], Any], seed: int) -> Gradients | None:
        def stop(optimizer: Any, args: Any, options: Any) -> None:
            if optimizer is self.inner:
                raise _HandedOver

        devices = {p.device for p in self.parameters.values() if p.device.type == "cuda"}
        with ExitStack() as undo, torch.random.fork_rng(devices):
            undo.callback(random.setstate, random.getstate())
            restore_later(undo, [self.outer.__dict__, *self.parameters.values()], set())
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
            return {name: gradient_of(p).clone() for name, p in self.parameters.items()}


class FusedStep(PrivateStep):
    """An update of a `FusedTrainer`, such as that of `make_private`, with the same attributes.

    The trainer's sums are its own word for the gradients without noise. So they are compared with
    the loop over the examples, and what is added to them with noise. For this, noise must be added
    before the optimizer's step.
    """

    def __init__(self, trainer: FusedTrainer, names: Mapping[int, str]) -> None:
        trainer.separate_noise()
        self.outer, self.inner = trainer, trainer.plain_optimizer
        self.parameters = {
            names.get(id(p), f"parameter {i}"): p for i, p in enumerate(trainer.trained)
        }
        self.sigma, self.threshold = trainer.noise_multiplier, float(trainer.max_grad_norm)
        self.mean = trainer.loss_scale != 1
        self.batch_size = self.divisor = trainer.joint_batch_size
        self.known_seed = trainer.seed
        self.is_empty = not sum(trainer.sizes)

    def lower(self, wanted: Threshold, modules: Sequence[nn.Module]) -> Threshold | None:
        before = float(self.outer.max_grad_norm)
        if isinstance(wanted, list) or not before > wanted:
            return None
        self.outer.max_grad_norm = wanted
        return before

    def handed(self, step: Callable[[], Any], number: int) -> Gradients:
        """Return the trainer's sums, which ``step`` returns, divided as the update divides them."""
        if self.outer.parallel != "none" or len(self.outer.noise_weights) > 1:
            raise NotChecked("steps of several ranks, or with correlated noise, are not compared")
        names = {id(p): name for name, p in self.parameters.items()}
        return {
            names[id(p)]: as_gradient(piece, p) / self.divisor
            for each in step()
            for p, piece in zip(each.parameters, each.views(each.wait()), strict=True)
        }


class _HandedOver(Exception):
    """Ends a step without noise, as soon as the inner optimizer would step."""


class PrivateSteps:
    """Compares what private steps hand over with a loop over the examples, and collects the noise.

    Attributes:
        latest: the latest private step, by the id of its inner optimizer.
        handed: gradients without noise that are to be handed over, by the same id.
        errors: the largest error of each compared step, its parameter and its tolerance.
        wrong: parameters, by a description of the error.
        reasons: reasons why steps could not be compared.
        clips: descriptions of the clipping.
        has_clipped: whether a norm exceeded the threshold in a compared step.
        draws: the noise, by the parameters' names.
        noiseless: steps with σ = 0.
        used: the script's σ and C, and the number B that divides sums, of each step.
    """

    def __init__(self) -> None:
        self.latest: dict[int, PrivateStep] = {}
        self.handed: dict[int, Gradients] = {}
        self.errors: list[tuple[float, str, float]] = []
        self.wrong: dict[str, dict[str, None]] = {}
        self.reasons: dict[str, None] = {}
        self.clips: dict[str, None] = {}
        self.has_clipped = False
        self.draws: dict[tuple[str, ...], list[Draw]] = {}
        self.noiseless: set[int] = set()
        self.used: list[tuple[float, float, float]] = []
        self._accumulated: dict[int, list[list[Call]]] = {}  # calls of a step that is under way
        self._lowered: dict[int, Threshold] = {}  # thresholds at which norms are clipped
        self._own: dict[int, Threshold] = {}  # the script's thresholds that have been lowered

    def begin(
        self, private: PrivateStep, calls: list[Call], step: Callable[[], Any], number: int
    ) -> None:
        """Compare the gradients that a step would hand over without noise.

        Args:
            private: the step.
            calls: the calls since the step before whose gradients the step uses.
            step: takes the step, see `PrivateStep.handed`.
            number: the number of steps before.
        """
        key = id(private.inner)
        self.latest[key], self.handed[key] = private, {}
        self._accumulated.setdefault(key, []).append(calls)
        try:
            gradients = private.handed(step, number)
            if gradients is None:  # the step only accumulates gradients
                del self.handed[key]
            else:
                self.handed[key] = gradients
                self._compare(private, self._accumulated.pop(key))
        except NotChecked as reason:
            self.reasons[str(reason)] = None

    def lower(self, modules: Sequence[nn.Module]) -> None:
        """Lower thresholds for the next step, so that clipping shows."""
        for key, wanted in self._lowered.items():
            if before := self.latest[key].lower(wanted, modules):
                self._own.setdefault(key, before)

    def _compare(self, private: PrivateStep, accumulated: Sequence[Sequence[Call]]) -> None:
        """Compare a step's gradients without noise with those of a loop over the examples."""
        key = id(private.inner)
        passes = [
            [call for call in calls if call.backward == number]
            for calls in accumulated
            for number in sorted({call.backward for call in calls})
        ]
        if not passes and not private.is_empty:
            raise NotChecked("no loss of a module's outputs trains the optimizer's parameters")
        trained = private.parameters
        groups = [examples_of_pass(each, trained, mean=private.mean) for each in passes or [[]]]
        last_passes = len({call.backward for call in accumulated[-1]}) or 1
        divisor = private.batch_size * (last_passes if private.mean else 1)
        examples = replace(Examples.joined(groups), expected=divisor)
        if len(examples.norms) and not any(examples.sizes.values()):
            raise NotChecked("no loss depends on the optimizer's parameters")
        seen = {name: each.double() for name, each in self.handed[key].items()}
        tried: list[Any] = []
        for threshold in (private.threshold, self._own.get(key, private.threshold)):
            how = "per layer" if isinstance(threshold, list) else "flat"
            known = examples.candidate_means(how, threshold, 1)
            correct, factors = next(iter(known.items()))
            if len(groups) > 1:
                in_last = len(groups[-1].norms)
                only = factors * (len(factors) / (in_last or 1))
                only[: len(only) - in_last] = 0
                known[f"the mean over only the last of {len(groups)} backward passes"] = only
            far = distances(seen, examples.mean(factors), examples.sizes)
            clips = bool((factors < 1 - TOLERANCE).any())
            if not tried or clips:  # code of the script may keep its own threshold
                tried.append((max(far.values()), len(tried), threshold, known, far, clips))
        _, _, private.threshold, known, far, clips = min(tried)
        self.has_clipped |= clips
        if len(examples.norms):
            self._lowered.setdefault(key, _quarter(examples, private.threshold))
        how = "clipped per layer"
        if not isinstance(private.threshold, list):
            how = f"clipped to {private.threshold:.4g}"
        self.clips[how + " (lowered for this check)" * (key in self._own)] = None
        calls = [call for each in passes for call in each]
        tolerance = TOLERANCE_16_BIT if any(call.is_16_bit for call in calls) else TOLERANCE
        worst = max(far, key=far.__getitem__)
        self.errors.append((far[worst], worst, tolerance))
        for call in calls:
            if call.misread:
                self.wrong[call.misread] = dict.fromkeys(far)
        for name in (name for name, distance in far.items() if distance > tolerance):
            what = examples.diagnose(name, seen[name], known, 10 * tolerance) or f"not {correct}"
            self.wrong.setdefault(what, {})[name] = None

    def collect(self, inner: Optimizer, number: int) -> None:
        """Keep the noise of a step, from the gradients that the inner optimizer receives.

        ``number`` is the number of steps before.
        """
        private, clipped = self.latest[id(inner)], self.handed.pop(id(inner))
        own = float(torch.tensor(self._own.get(id(inner), private.threshold)).norm())
        self.used.append((private.sigma, own, private.divisor))
        deviation = private.sigma * float(torch.tensor(private.threshold).norm()) / private.divisor
        if not deviation:
            self.noiseless.add(number)
        if not (deviation and clipped):
            return
        noise, rounding, largest = dict[str, Tensor](), 0.0, 0.0
        for name, before in clipped.items():
            received = gradient_of(private.parameters[name])
            noise[name] = ((received.double() - before) / deviation).flatten()
            rounding += (torch.finfo(received.dtype).eps * float(received.norm())) ** 2
            largest = max(largest, float(before.abs().max()))
        run = f"optimizer {[*self.latest].index(id(inner)) + 1}"
        # Beside smaller gradients, float32 rounds noise as if it were alone.
        slack = 2 * rounding**0.5 / deviation if largest > deviation else 0.0
        draw = Draw.beside(clipped, run, number + 1, noise, slack)
        self.draws.setdefault(tuple(noise), []).append(draw)


def gradient_of(parameter: Tensor) -> Tensor:
    """Return a parameter's gradient, or zeros if it has none."""
    grad = parameter.grad
    return torch.zeros_like(parameter) if grad is None else grad.detach()


def _quarter(examples: Examples, threshold: Threshold) -> Threshold:
    """Return `LOWERED` times the median norm, for each parameter if the threshold is a list."""
    if isinstance(threshold, list):
        each: list[float] = (LOWERED * examples.norms.median(dim=0).values).tolist()
        return [a or b for a, b in zip(each, threshold, strict=True)]
    return LOWERED * float(examples.norms.norm(dim=1).median()) or threshold
