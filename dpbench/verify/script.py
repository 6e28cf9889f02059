"""Checks the steps of a script against a loop over the examples of its batches.

While a step runs, the calls of the script's modules are kept, and the gradient of the loss with
respect to what they return. Before an optimizer steps, each call is repeated for one example after
another, with that example's part of the gradient. So nothing has to be known of the loss, except
that it is a mean or a sum over examples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpbench.child.step_finder import Calls
from dpbench.verify.check import FAILED, NOT_JUDGED, Check
from dpbench.verify.reference import Examples, distances
from dpbench.verify.subject import without_dropout

TOLERANCE, TOLERANCE_16_BIT = 1e-3, 0.05
"""Largest relative errors of a parameter's gradient, for 32 and for 16 bits."""

MOST_BYTES = 4e9
"""Memory that examples' gradients may take."""

DEVIATIONS = 6
"""By how many standard errors the deviation of noise may be off."""

NAMED = 3
"""How many parameters a line names."""

UNKNOWN_LOSS = "the loss is taken for a mean or sum over examples; how batches are drawn is unknown"


class NotChecked(Exception):
    """Why a step's gradient cannot be compared."""


@dataclass
class Call:
    """A call of a module that the loop itself made, and the gradients of its outputs."""

    module: nn.Module
    given: Any  # arguments and keyword arguments, detached copies
    outputs: list[Tensor]
    autocast: tuple[bool, torch.dtype]
    backward: int = 0  # the number of the backward pass that reached it
    gradients: dict[int, Tensor] = field(default_factory=dict)

    def take(self, number: int, passes: Backwards, gradient: Tensor) -> None:
        """Keep an output's gradient; ghost clipping runs a second backward within the first."""
        self.backward = self.backward or passes.number
        if self.backward == passes.number and number not in self.gradients:
            self.gradients[number] = gradient.detach().clone()


@dataclass
class Backwards:
    """Counts backward passes."""

    number: int = 0  # in all
    since: int = 0  # since the private optimizer's last step, which may have been a virtual one


@dataclass
class Known:
    """What is known of a parameter of a module that was called."""

    start: Tensor
    trained: bool
    chosen = rate = gradient = moved = False  # in an optimizer, with a learning rate above 0, …


class StepChecks(Calls):
    """Keeps the calls of steps, and compares what optimizers get with a loop over examples."""

    def __init__(self) -> None:
        self.steps = 0
        self.worst: list[tuple[float, str, float]] = []  # error, parameter, tolerance
        self.wrong: dict[str, dict[str, None]] = {}  # parameters by what is wrong with them
        self.reasons: dict[str, None] = {}  # why gradients were not compared
        self.clips: dict[str, None] = {}
        self.bypassed = ""
        self.noise: list[tuple[float, float, int]] = []  # deviation, σC, elements
        self.known: dict[str, Known] = {}
        self.strays: dict[int, tuple[Tensor, bool]] = {}  # no module's, and whether with gradient
        self._models: dict[int, nn.Module] = {}
        self._calls: list[Call] = []
        self._passes, self._in_last_part = Backwards(), 1
        self._private: dict[int, Any] = {}  # Opacus's optimizers by the one that each wraps
        self._thresholds: dict[int, float | list[float]] = {}

    # --- what the loop calls ---------------------------------------------------------------------

    def forward(self, call: Any, module: Any, args: Any, options: Any) -> Any:
        if not torch.is_grad_enabled():
            return call(module, *args, **options)
        if id(module) not in self._models:
            self._models[id(module)] = without_dropout(module)
            for name, parameter in self.parameters().items():
                start = parameter.detach().clone()
                self.known.setdefault(name, Known(start, parameter.requires_grad))
        out = call(module, *args, **options)
        outputs = [each for each in _tensors(out) if each.requires_grad]
        device = outputs[0].device.type if outputs else "cpu"
        autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        given = pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), (args, dict(options)))
        made = Call(module, given, outputs, autocast)
        for number, each in enumerate(outputs):
            each.register_hook(partial(made.take, number, self._passes))
        self._calls.append(made)
        return out

    def backward(self) -> None:
        self._passes.number += 1
        self._passes.since += 1

    def update(self, optimizer: Any, outer: Any) -> None:
        if outer is not None and hasattr(outer, "original_optimizer"):
            if id(outer.original_optimizer) not in self._private:
                self._private[id(outer.original_optimizer)] = outer
                outer.add_noise = partial(self._add_noise, outer, outer.add_noise)
            self._in_last_part, self._passes.since = self._passes.since, 0
        if optimizer is not None:
            calls, self._calls = self._calls, []
            self._look_at(optimizer)
            try:
                self._compare(optimizer, self._private.get(id(optimizer)), calls)
            except NotChecked as reason:
                self.reasons[str(reason)] = None
            except RuntimeError as error:
                words = str(error).partition("\n")[0]
                self.reasons[f"a call cannot be repeated for one example: {words}"] = None

    def _add_noise(self, private: Any, add_noise: Any) -> None:
        """Add noise, measure it, and take it off again, so that the gradient can be compared."""
        self._thresholds[id(private)] = getattr(private, "max_grad_norms", private.max_grad_norm)
        wanted = private.noise_multiplier * private.max_grad_norm
        add_noise()
        noise = [(p.grad - p.summed_grad.view_as(p)).flatten().double() for p in private.params]
        if noise and wanted:
            drawn = torch.cat(noise)
            self.noise.append((float(drawn.square().mean().sqrt()), float(wanted), len(drawn)))
        for p in private.params:
            p.grad = p.summed_grad.clone().view_as(p)

    def end_step(self) -> None:
        """Note which parameters have moved."""
        self.steps += 1
        for name, parameter in self.parameters().items():
            known = self.known[name]
            known.moved = known.moved or not torch.equal(parameter, known.start)

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of the modules that the loop calls, by name."""
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for module in self._models.values():
            for name, parameter in module.named_parameters():
                for wrapper in ("_module.", "module.", "_orig_mod."):
                    name = name.removeprefix(wrapper)
                found.setdefault(id(parameter), (name, parameter))
        named: dict[str, nn.Parameter] = {}
        for name, parameter in found.values():  # two models may have the same names
            named[name if name not in named else f"{name} ({len(named)})"] = parameter
        return named

    # --- an optimizer's step ---------------------------------------------------------------------

    def _look_at(self, optimizer: Any) -> None:
        """Note which parameters an optimizer has, and whether they have a gradient."""
        names = {id(p): name for name, p in self.parameters().items()}
        for group in optimizer.param_groups:
            for p in group["params"]:
                has = p.grad is not None and bool(p.grad.any())
                if known := self.known.get(names.get(id(p), "")):
                    known.chosen = True
                    known.gradient |= has
                    known.rate |= bool(group.get("lr", 1))
                else:
                    self.strays[id(p)] = p, has or self.strays.get(id(p), (p, False))[1]

    def _compare(self, optimizer: Any, private: Any, calls: Sequence[Call]) -> None:
        """Compare the gradients that an optimizer gets with those of a loop over the examples."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        trained = {n: p for n, p in self.parameters().items() if id(p) in own and p.requires_grad}
        if private is None and any(_hook_owners(call.module) for call in calls):
            kind = type(optimizer).__name__
            self.bypassed = f"the script steps {kind} itself, and not the optimizer of make_private"
        if not trained:
            raise NotChecked("the optimizer has no parameter of a module that was called")
        passes = sorted({call.backward for call in calls if call.gradients})
        if not passes:
            raise NotChecked("no output of a module was part of a loss")
        mean = private is None or private.loss_reduction == "mean"
        groups = [
            self._examples([c for c in calls if c.backward == each and c.gradients], trained, mean)
            for each in passes
        ]
        examples = Examples.joined(groups)
        if not any(examples.sizes.values()):
            raise NotChecked("the loss does not depend on the optimizer's parameters")
        zero = torch.zeros(())
        seen = {
            n: (p.grad if p.grad is not None else zero.expand_as(p)) for n, p in trained.items()
        }
        seen = {name: gradient.detach().double() for name, gradient in seen.items()}
        total = len(examples.norms)
        plain = torch.ones_like(examples.norms)
        if private is None:  # the loss of each pass is a mean of its own examples
            shares = [torch.full((len(g.norms), 1), total / len(g.norms)) for g in groups]
            wanted = examples.mean(torch.cat(shares).to(plain) * plain)
            seen, scale = _scaled(seen, wanted)
            known: Mapping[str, Tensor] = {}
        else:
            divisor = private.expected_batch_size * self._in_last_part if mean else 1
            seen = {name: gradient * (divisor / total) for name, gradient in seen.items()}
            scale, clipped = 1.0, self._factors(examples, self._thresholds[id(private)])
            wanted = examples.mean(clipped)
            known = self._known(examples, clipped, groups)
        far = distances(seen, wanted, examples.sizes)
        low = any(p.dtype.itemsize < 4 for p in trained.values()) or any(
            c.autocast[0] for c in calls
        )
        tolerance = TOLERANCE_16_BIT if low else TOLERANCE
        if private is None and (scale <= 0 or max(far.values()) > tolerance):
            raise NotChecked(
                "the gradients are not the mean of the examples' own: if the script clips them "
                "itself, nothing says to what norm"
            )
        clips = "not clipped by example" + f", but {scale:.3g} times" * (abs(scale - 1) > tolerance)
        self.clips[clips if private is None else _said(self._thresholds[id(private)])] = None
        self.worst.append((max(far.values()), max(far, key=lambda n: far[n]), tolerance))
        for name in (name for name, distance in far.items() if distance > tolerance):
            what = examples.explained(name, seen[name], known, 10 * tolerance)
            what = what or "not the mean of the examples' clipped gradients"
            self.wrong.setdefault(what, {})[name] = None

    def _factors(self, examples: Examples, threshold: float | list[float]) -> Tensor:
        norms = examples.norms
        if not isinstance(threshold, list):
            norms = norms.norm(dim=1, keepdim=True)
        limit = torch.as_tensor(threshold, dtype=norms.dtype, device=norms.device)
        return (limit / (norms + 1e-6)).clamp(max=1.0).expand_as(examples.norms)

    def _known(
        self, examples: Examples, clipped: Tensor, groups: Sequence[Examples]
    ) -> dict[str, Tensor]:
        """Factors by a name of the mean they give, the right one first, then known mistakes."""
        known = {
            "the mean of the examples' clipped gradients": clipped,
            "the mean of gradients that are not clipped": torch.ones_like(clipped),
        }
        if len(groups) > 1:
            last = len(groups[-1].norms)
            only = torch.zeros_like(clipped)
            only[-last:] = clipped[-last:] * len(clipped) / last
            words = f"the mean over the last of {len(groups)} backward passes alone: the others are lost"
            known[words] = only
        return known

    # --- the loop over examples ------------------------------------------------------------------

    def _examples(
        self, calls: Sequence[Call], trained: Mapping[str, nn.Parameter], mean: bool
    ) -> Examples:
        """The per-sample gradients of the calls that one backward pass reached."""
        sizes = {
            len(call.outputs[n]) for call in calls for n in call.gradients if call.outputs[n].ndim
        }
        if len(sizes) != 1:
            raise NotChecked(
                "no module that the script calls returns a tensor with a row for each example"
                if not sizes
                else "the modules that the script calls have batches of different sizes"
            )
        [size] = sizes
        if not size:
            raise NotChecked("a batch was empty")
        needed = size * sum(p.numel() for p in trained.values()) * 4
        if needed > MOST_BYTES:
            raise NotChecked(
                f"the gradients of {size} examples take {needed / 1e9:.0f} GB: train smaller batches"
            )
        rows = []
        with _undisturbed([call.module for call in calls]):
            for i in range(size):
                made, gradients = [], []
                for call in calls:
                    for number, out in self._again(call, i, size).items():
                        made.append(out)
                        gradients.append(call.gradients[number][i : i + 1] * (size if mean else 1))
                rows.append(
                    torch.autograd.grad(
                        made,
                        [*trained.values()],
                        gradients,
                        allow_unused=True,
                        materialize_grads=True,
                    )
                )
        stacked = [torch.stack([g.float() for g in each]) for each in zip(*rows, strict=True)]
        return Examples(dict(zip(trained, stacked, strict=True)))

    def _again(self, call: Call, i: int, size: int) -> dict[int, Tensor]:
        """The outputs of a call for one example, which must be those that it had in its batch."""

        def part(tensor: Tensor) -> Tensor:
            return tensor[i : i + 1] if tensor.ndim and len(tensor) == size else tensor

        args, options = pytree.tree_map_only(Tensor, part, call.given)
        enabled, dtype = call.autocast
        with torch.autocast(call.outputs[0].device.type, dtype, enabled=enabled):
            # Opacus's expanded weights make per-sample gradients in the wrapper's call.
            module = getattr(call.module, "_module", call.module)
            out = [t for t in _tensors(module(*args, **options)) if t.requires_grad]
        made = {n: out[n] for n in call.gradients if call.outputs[n].ndim and n < len(out)}
        for number, each in made.items():
            before = call.outputs[number][i : i + 1].detach()
            near = TOLERANCE_16_BIT if enabled or before.dtype.itemsize < 4 else TOLERANCE
            if each.shape != before.shape or (each - before).norm() > near * before.norm():
                raise NotChecked(
                    "a module returns something else for an example alone than for it in its "
                    "batch: its layers mix examples, or are random"
                )
        return made

    # --- checks ----------------------------------------------------------------------------------

    def checks(self) -> Iterator[Check]:
        """Yield the checks of all steps."""
        known = self.known
        trained = [name for name, each in known.items() if each.trained]
        absent = [name for name in trained if not known[name].chosen]
        strays = [parameter for parameter, used in self.strays.values() if not used]
        wrong = [f"{_named(absent)}: trainable, and in no optimizer that steps"] * bool(absent)
        if strays:
            shape = tuple(strays[0].shape)
            wrong.append(
                f"{len(strays)} parameters of optimizers, the first {shape}, belong to no module "
                f"that is called and get no gradient: the optimizer was made of another model"
            )
        how = f"{len(trained) - len(absent)} of {len(trained)} trainable"
        yield Check.judged("optimizer has the parameters", wrong, "", how)
        chosen = [name for name in trained if known[name].chosen]
        steps = f"in {self.steps} steps"
        idle = [name for name in chosen if not known[name].gradient]
        wrong = [f"{_named(idle)}: no gradient {steps}"] * bool(idle)
        yield Check.judged("parameters get gradients", wrong, "", f"{len(chosen)} {steps}")
        pushed = [name for name in chosen if known[name].gradient and known[name].rate]
        stuck = [name for name in pushed if not known[name].moved]
        wrong = [f"{_named(stuck)}: a gradient, and no change {steps}"] * bool(stuck)
        if pushed:
            yield Check.judged("parameters move", wrong, "", f"{len(pushed)} {steps}")
        else:
            yield Check("parameters move", NOT_JUDGED, "", "the learning rate is 0")
        frozen = [name for name, each in known.items() if not each.trained]
        moved = [name for name in frozen if known[name].moved]
        wrong = [f"{_named(moved)}: is frozen, and changes"] * bool(moved)
        yield Check.judged("frozen parameters stay", wrong, "", f"{len(frozen)} frozen")
        yield from self._of_gradients()
        yield Check("loss and sampling", NOT_JUDGED, "", UNKNOWN_LOSS)

    def _of_gradients(self) -> Iterator[Check]:
        """Yield what was found of clipping, gradients and noise."""
        if self.bypassed or not self._private:
            wrong = [self.bypassed] * bool(self.bypassed)
            why = "no optimizer of Opacus steps"
            yield Check("clipping and noise", FAILED if wrong else NOT_JUDGED, "", why, wrong)
        else:
            wrong = [
                f"has the deviation {got:.4g}, where σC is {wanted:.4g}"
                for got, wanted, number in self.noise
                if abs(got / wanted - 1) > DEVIATIONS / (2 * number) ** 0.5
            ][:1]
            far = ", ".join(f"{got / wanted:.3f}" for got, wanted, _ in self.noise) + " of σC"
            verdict = "noise: deviation", wrong, "", far
            none = Check("noise: deviation", NOT_JUDGED, "", "σ is 0")
            yield Check.judged(*verdict) if self.noise else none
        wrong = [f"{_named([*names])}: {what}" for what, names in self.wrong.items()]
        if not self.worst:
            yield Check(
                "gradient", NOT_JUDGED, "", next(iter(self.reasons), "no optimizer stepped")
            )
            return
        far, worst, tolerance = max(self.worst)
        words = f"{far:.2g} (≤ {tolerance:g}), {', '.join(self.clips)}"
        yield Check.judged("gradient", wrong, worst, words)
        if self.reasons:
            why = "; ".join(self.reasons)
            yield Check("gradient of some steps", NOT_JUDGED, "", why)


def _named(names: Sequence[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def _said(threshold: float | list[float]) -> str:
    return "clipped per layer" if isinstance(threshold, list) else f"clipped to {threshold:.4g}"


def _scaled(
    seen: Mapping[str, Tensor], wanted: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], float]:
    """Gradients divided by the common factor that fits best, and that factor."""
    squares = sum(float(each.square().sum()) for each in wanted.values())
    scale = sum(float((seen[name] * each).sum()) for name, each in wanted.items()) / squares
    return {name: each / (scale or 1.0) for name, each in seen.items()}, scale


def _tensors(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors in what a module returns."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(each)


def _hook_owners(module: nn.Module) -> list[Any]:
    """The objects whose hooks make per-sample gradients of a module's layers."""
    hooks = [hook for layer in module.modules() for hook in layer._forward_hooks.values()]
    owners = {
        id(o): o for h in hooks if hasattr(o := getattr(h, "__self__", None), "hooks_enabled")
    }
    return [*owners.values()]


@contextmanager
def _undisturbed(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let modules be called as if they were not: hooks, buffers and random numbers stay."""
    devices = [p.device for m in modules for p in m.parameters() if p.device.type == "cuda"]
    with ExitStack() as undo, torch.random.fork_rng({*devices}), torch.enable_grad():
        for module in modules:
            for owner in _hook_owners(module):
                undo.callback(setattr, owner, "hooks_enabled", owner.hooks_enabled)
                owner.hooks_enabled = False
            for buffer in module.buffers():
                undo.callback(buffer.copy_, buffer.clone())
        yield
