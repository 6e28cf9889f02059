"""Checks the steps of a script against a loop over the examples of its batches.

While a step runs, the calls of the script's modules are recorded, with the gradients of the loss
with respect to the calls' outputs. When an optimizer begins to step, the gradients of its
parameters are compared with gradients of calls repeated for each example (`repeated_calls`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpbench.child.recorder import Calls
from dpbench.verify.check_result import FAILED, NOT_JUDGED, Check
from dpbench.verify.reference import NEGLIGIBLE, Examples, Gradients, distances
from dpbench.verify.repeated_calls import (
    TOLERANCE,
    TOLERANCE_16_BIT,
    Call,
    NotChecked,
    examples_of_pass,
    float_tensors,
    hook_owners,
)
from dpbench.verify.trained_model import without_dropout

DEVIATIONS = 6
"""Number of standard errors by which the measured deviation of noise may differ from σC."""

MOST_NAMES = 3
"""Largest number of parameters that one line of a message names."""

CORRECT = "the mean of the examples' clipped gradients"
STALE = "still has the gradient of the last step: nothing sets it to zero"
ASSUMPTIONS = (
    "assumed: the loss is a mean or sum over examples; the sampler draws at its stated rate"
)


@dataclass
class ParameterHistory:
    """Facts about one parameter of a called module that the steps so far have shown.

    Attributes:
        start: the value before the module's first call.
        trained: whether the parameter requires gradients.
        has_optimizer: whether an optimizer that steps contains the parameter.
        had_gradient: whether an optimizer stepped with a gradient other than zero.
        should_move: whether an optimizer stepped with a learning rate above 0 and a gradient that
            was larger than rounding errors.
        moved: whether the value differed from ``start`` at the end of a step.
    """

    start: Tensor
    trained: bool
    has_optimizer = had_gradient = should_move = moved = False


class StepChecks(Calls):
    """Records the calls of each step, and checks gradients with a loop over examples."""

    def __init__(self) -> None:
        self.steps = 0
        self.worst: list[tuple[float, str, float]] = []  # error, parameter, tolerance
        self.wrong: dict[str, dict[str, None]] = {}  # parameters, by a description of the error
        self.reasons: dict[str, None] = {}  # reasons why gradients could not be compared
        self.clips: dict[str, None] = {}  # descriptions of the clipping
        self.bypassed = ""  # class of an optimizer that steps in place of a private optimizer
        self.noise: list[tuple[float, float, int]] = []  # deviation, σC, elements
        self.known: dict[str, ParameterHistory] = {}
        # Parameters of an optimizer but of no called module, and whether each had a gradient:
        self.unowned: dict[int, tuple[Tensor, bool]] = {}
        self._models: dict[int, nn.Module] = {}
        self._calls: list[Call] = []
        self._passes = 0  # backward passes so far
        self._since = 0  # backward passes since the latest call of the private optimizer
        self._in_last_part = 0  # backward passes between that optimizer's latest two calls
        self._private: dict[int, Any] = {}  # Opacus's optimizers, by the optimizer they wrap
        self._threshold: float | list[float] = 0.0
        self._before: dict[int, Gradients] = {}  # gradients at each optimizer's last step

    # --- calls from the training loop ------------------------------------------------------------

    def forward(self, call: Any, module: Any, args: Any, options: Any) -> Any:
        if not torch.is_grad_enabled():
            return call(module, *args, **options)
        if id(module) not in self._models:
            self._models[id(module)] = without_dropout(module)
            for name, p in self.parameters().items():
                self.known.setdefault(name, ParameterHistory(p.detach().clone(), p.requires_grad))
        out = call(module, *args, **options)
        outputs = [each for each in float_tensors(out) if each.requires_grad]
        device = outputs[0].device.type if outputs else "cpu"
        autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        given = pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), (args, dict(options)))
        made = Call(module, given, outputs, autocast)
        for number, each in enumerate(outputs):
            each.register_hook(partial(self._record_gradient, made, number))
        self._calls.append(made)
        return out

    def _record_gradient(self, call: Call, number: int, gradient: Tensor) -> None:
        """Record the first gradient of an output, because ghost clipping runs backward twice."""
        call.backward = call.backward or self._passes
        if call.backward == self._passes and number not in call.gradients:
            call.gradients[number] = gradient.detach().clone()

    def backward(self) -> None:
        self._passes += 1
        self._since += 1

    def update(self, optimizer: Any, outer: Any) -> None:
        if hasattr(outer, "original_optimizer"):
            if id(outer.original_optimizer) not in self._private:
                self._private[id(outer.original_optimizer)] = outer
                outer.add_noise = partial(self._add_noise, outer, outer.add_noise)
            self._in_last_part, self._since = (
                self._since,
                0,
            )  # earlier backward passes belong to virtual steps
        if optimizer is not None:
            calls = self._calls
            # Keep calls without gradients, because a later loss may use their outputs.
            self._calls = [call for call in calls if not call.gradients]
            self._note_parameters(optimizer)
            try:
                self._compare(optimizer, self._private.get(id(optimizer)), calls)
            except NotChecked as reason:
                self.reasons[str(reason)] = None
            self._before[id(optimizer)] = {
                name: p.grad.to(torch.float64, copy=True)
                for name, p in self.parameters().items()
                if p.grad is not None
            }

    def _add_noise(self, private: Any, add_noise: Any) -> None:
        """Add noise, measure the noise, and remove it, so that the gradient can be compared."""
        threshold = float(private.max_grad_norm)
        self._threshold = getattr(private, "max_grad_norms", threshold)
        sigma = private.noise_multiplier
        if sigma and (of_count := getattr(private, "unclipped_num_std", 0)):
            # Adaptive clipping spends part of the privacy budget on a count of unclipped
            # gradients, so the gradients' noise is larger (https://arxiv.org/abs/1905.03871).
            sigma = (sigma**-2 - (2 * of_count) ** -2) ** -0.5
        expected = float(sigma * threshold)
        add_noise()
        noise = [(p.grad - p.summed_grad.view_as(p)).flatten().double() for p in private.params]
        if expected:
            drawn = torch.cat(noise)
            self.noise.append((float(drawn.square().mean().sqrt()), expected, len(drawn)))
        for p in private.params:
            p.grad = p.summed_grad.clone().view_as(p)

    def end_step(self) -> None:
        """Record which parameters have moved."""
        self.steps += 1
        self._calls = []
        for name, p in self.parameters().items():
            self.known[name].moved |= not torch.equal(p, self.known[name].start)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the modules that the loop has called so far, by name."""
        named: dict[str, nn.Parameter] = {}
        for number, module in enumerate(self._models.values()):
            for name, parameter in module.named_parameters():
                for wrapper in ("_module.", "module.", "_orig_mod."):
                    name = name.removeprefix(wrapper)
                if not any(parameter is each for each in named.values()):
                    named[f"module {number + 1}: {name}" if name in named else name] = parameter
        return named

    # --- an optimizer's step ---------------------------------------------------------------------

    def _note_parameters(self, optimizer: Any) -> None:
        """Record which parameters the optimizer has, and which of them have gradients."""
        names = {id(p): name for name, p in self.parameters().items()}
        norms = [
            (group, p, 0.0 if p.grad is None else float(p.grad.norm()))
            for group in optimizer.param_groups
            for p in group["params"]
        ]
        rounding = NEGLIGIBLE * max((norm for *_, norm in norms), default=0.0)
        for group, p, norm in norms:
            if known := self.known.get(names.get(id(p), "")):
                known.has_optimizer, known.had_gradient = True, known.had_gradient or norm > 0
                known.should_move |= norm > rounding and bool(group.get("lr", 1))
            else:
                self.unowned[id(p)] = p, norm > 0 or self.unowned.get(id(p), (p, False))[1]

    def _compare(self, optimizer: Any, private: Any, calls: Sequence[Call]) -> None:
        """Compare an optimizer's gradients with gradients from a loop over the examples."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        trained = {n: p for n, p in self.parameters().items() if id(p) in own and p.requires_grad}
        if private is None and any(hook_owners(call.module) for call in calls):
            self.bypassed = type(optimizer).__name__
        passes = sorted({call.backward for call in calls if call.gradients})
        if not (trained and passes):
            raise NotChecked("no loss of a module's outputs trains the optimizer's parameters")
        mean = private is None or private.loss_reduction == "mean"
        of_pass = ([c for c in calls if c.backward == n and c.gradients] for n in passes)
        groups = [examples_of_pass(each, trained, mean=mean) for each in of_pass]
        examples = Examples.joined(groups)
        if not any(examples.sizes.values()):
            raise NotChecked("no loss depends on the optimizer's parameters")
        seen = {n: (torch.zeros_like(p) if p.grad is None else p.grad) for n, p in trained.items()}
        total, scale, known = len(examples.norms), 1.0, dict[str, Tensor]()
        if private is None:  # expect the sum of the passes' mean gradients
            shares = [g.norms.new_full(g.norms.shape, total / len(g.norms)) for g in groups]
            wanted = examples.mean(torch.cat(shares))
            scale = _scale(seen, wanted)
            seen = {name: each.double() / (scale or 1) for name, each in seen.items()}
            clips = "not clipped by example" + " but as a batch" * (abs(scale - 1) > TOLERANCE)
        else:
            known = _candidate_factors(examples, self._threshold, [len(g.norms) for g in groups])
            wanted = examples.mean(known[CORRECT])
            divisor = private.expected_batch_size * self._in_last_part if mean else 1
            seen = {name: each.double() * (divisor / total) for name, each in seen.items()}
            each = isinstance(self._threshold, list)
            clips = "clipped per layer" if each else f"clipped to {self._threshold:.4g}"
        far = distances(seen, wanted, examples.sizes)
        tolerance = TOLERANCE_16_BIT if any(c.is_16_bit for c in calls) else TOLERANCE
        worst = max(far, key=far.__getitem__)
        if private is None and (scale <= 0 or far[worst] > tolerance):
            before = self._before.get(id(optimizer), {})
            rest = {name: each * scale - before.get(name, 0) for name, each in seen.items()}
            if max(distances(rest, wanted, examples.sizes).values()) > tolerance:
                raise NotChecked(
                    "gradients are not the mean of per-sample gradients; if the script's own code "
                    "clips them, dpbench does not know the clipping threshold"
                )
        self.clips[clips] = None
        self.worst.append((far[worst], worst, tolerance))
        for name in (name for name, distance in far.items() if distance > tolerance):
            what = STALE
            if private is not None:
                what = (
                    examples.diagnose(name, seen[name], known, 10 * tolerance) or f"not {CORRECT}"
                )
            self.wrong.setdefault(what, {})[name] = None

    # --- checks ----------------------------------------------------------------------------------

    def checks(self) -> Iterator[Check]:
        """Yield the checks of all steps."""
        known, steps = self.known, f"in {self.steps} steps"
        trained = [name for name, each in known.items() if each.trained]
        chosen = [name for name in trained if known[name].has_optimizer]
        unowned = [parameter for parameter, used in self.unowned.values() if not used]
        rest = (
            f"; optimizers have {len(unowned)} parameters of no called module; the first has the "
            f"shape {_shape(unowned)}"
        )
        yield _check(
            "optimizer has the parameters",
            [*known] if unowned and not trained else [n for n in trained if n not in chosen],
            "trainable, but in no optimizer that steps" + rest * bool(unowned),
            f"{len(chosen)} of {len(trained)} trainable",
        )
        idle = [name for name in chosen if not known[name].had_gradient]
        how = f"{len(chosen) - len(idle)} {steps}"
        yield _check("parameters get gradients", idle, f"no gradient {steps}", how)
        should_move = [name for name in chosen if known[name].should_move]
        stuck = [name for name in should_move if not known[name].moved]
        how = (
            f"{len(should_move) - len(stuck)} {steps}"
            if should_move
            else "no learning rate is above 0"
        )
        unchanged = f"has a gradient, but did not change {steps}"
        moving = _check("parameters move", stuck, unchanged, how)
        yield moving if should_move else Check(moving.name, NOT_JUDGED, "", how)
        frozen = [name for name, each in known.items() if not each.trained]
        thawed = [name for name in frozen if known[name].moved]
        how = f"{len(frozen)} frozen"
        yield _check("frozen parameters stay", thawed, "is frozen, but changes", how)
        yield self._noise_check()
        wrong = [f"{_named([*names])}: {what}" for what, names in self.wrong.items()]
        why = "; ".join(self.reasons)
        if self.worst:
            far, worst, tolerance = max(self.worst)
            error_text = f"{far:.2g} (≤ {tolerance:g}), {', '.join(self.clips)}"
            yield Check.judged("gradient", wrong, worst, error_text)
        if why or not self.worst:
            name = "gradient of some steps" if self.worst else "gradient"
            yield Check(name, NOT_JUDGED, "", why or "no optimizer stepped")
        yield Check("loss and sampling", NOT_JUDGED, "", ASSUMPTIONS)

    def _noise_check(self) -> Check:
        if self.bypassed:
            line = f"{self.bypassed} steps instead of the optimizer that make_private returns"
            return Check("clipping and noise", FAILED, "", "none", [line])
        if not self.noise:
            why = "σ is 0" if self._private else "no optimizer of Opacus steps"
            return Check("noise" if self._private else "clipping and noise", NOT_JUDGED, "", why)
        wrong = [
            f"the noise has the standard deviation {got:.4g}, but σC is {expected:.4g}"
            for got, expected, number in self.noise
            if abs(got / expected - 1) > DEVIATIONS / (2 * number) ** 0.5
        ]
        far = ", ".join(f"{got / expected:.3f}" for got, expected, _ in self.noise)
        return Check.judged("noise: deviation", wrong[:1], "", f"{far} of σC")


def _check(name: str, wrong: Sequence[str], words: str, how: str) -> Check:
    """Make a check that lists the failing parameters in one line."""
    return Check.judged(name, [f"{_named(wrong)}: {words}"] * bool(wrong), "", how)


def _named(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _shape(tensors: Sequence[Tensor]) -> str:
    return "×".join(map(str, tensors[0].shape)) if tensors else ""


def _scale(seen: Gradients, wanted: Gradients) -> float:
    """Return the factor s for which s times ``wanted`` is closest to ``seen``."""
    squares = sum(float(each.square().sum()) for each in wanted.values())
    return sum(float((seen[name] * each).sum()) for name, each in wanted.items()) / squares


def _candidate_factors(
    examples: Examples, threshold: float | list[float], sizes: Sequence[int]
) -> dict[str, Tensor]:
    """Return clipping factors, keyed by a description of the resulting mean.

    The correct factors come first, then the factors of known mistakes.

    Args:
        examples: the examples of all backward passes.
        threshold: the clipping threshold, or a list of one threshold for each parameter.
        sizes: the number of examples of each backward pass.
    """
    per_layer = isinstance(threshold, list)
    norms = examples.norms if per_layer else examples.norms.norm(dim=1, keepdim=True)
    limit = torch.as_tensor(threshold).to(norms)
    clipped = (limit / (norms + 1e-6)).clamp(max=1.0).expand_as(examples.norms)
    last = clipped * (len(clipped) / sizes[-1])
    last[: -sizes[-1]] = 0
    only_last = f"the mean over only the last of {len(sizes)} backward passes"
    common = examples.candidate_means("flat", float(limit.norm()), 1)
    return {CORRECT: clipped} | ({only_last: last} if len(sizes) > 1 else {}) | common
