"""Checks the steps of a script against a loop over the examples of its batches.

While a step runs, the calls of the script's modules are recorded, with the gradients of the loss
with respect to their outputs. Before an optimizer steps, each call is repeated for one example
after another, with that example's part of the gradients. So nothing need be known about the loss,
except that it is a mean or a sum over examples.
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

from dpbench.child.recorder import Calls
from dpbench.verify.check_result import FAILED, NOT_JUDGED, Check
from dpbench.verify.reference import NEGLIGIBLE, Examples, Gradients, distances
from dpbench.verify.trained_model import without_dropout

TOLERANCE, TOLERANCE_16_BIT = 1e-3, 0.05
"""Largest allowed relative error of a parameter's gradient, with 32 and with 16 bits."""

MOST_BYTES = 4e9
"""Most bytes that per-sample gradients may take."""

DEVIATIONS = 6
"""How many standard errors the noise's standard deviation may be off."""

NAMED = 3
"""How many parameters one line names at most."""

RIGHT = "the mean of the examples' clipped gradients"
STALE = "has the last step's gradient, too: nothing sets it to zero"
UNKNOWN = "assumed: the loss is a mean or sum over examples, and the sampler draws as it says"


class NotChecked(Exception):
    """A step's gradient cannot be compared. The message says why."""


@dataclass
class Call:
    """A call of a module by the training loop, not by another module."""

    module: nn.Module
    given: Any  # copies of arguments and keyword arguments
    outputs: list[Tensor]
    autocast: tuple[bool, torch.dtype]
    backward: int = 0  # number of the backward pass that reached it
    gradients: dict[int, Tensor] = field(default_factory=dict)  # by index of the output

    @property
    def is_16_bit(self) -> bool:
        """Whether its results are rounded to 16 bits."""
        return self.autocast[0] or any(each.dtype.itemsize < 4 for each in self.outputs)


@dataclass
class ParameterHistory:
    """What steps have shown so far of one parameter of a called module."""

    start: Tensor
    trained: bool
    chosen = False  # whether an optimizer that steps has it
    gradient = should_move = False  # whether it had a gradient, and one large enough to move it
    moved = False


class StepChecks(Calls):
    """Records a step's calls; compares the gradients of optimizers with a loop over examples."""

    def __init__(self) -> None:
        self.steps = 0
        self.worst: list[tuple[float, str, float]] = []  # error, parameter, tolerance
        self.wrong: dict[str, dict[str, None]] = {}  # parameters by what is wrong with them
        self.reasons: dict[str, None] = {}  # why gradients were not compared
        self.clips: dict[str, None] = {}  # how they were clipped
        self.bypassed = ""  # which optimizer steps in place of the private one
        self.noise: list[tuple[float, float, int]] = []  # deviation, σC, elements
        self.known: dict[str, ParameterHistory] = {}
        self.unowned: dict[int, tuple[Tensor, bool]] = {}  # no module has it; it had a gradient
        self._models: dict[int, nn.Module] = {}
        self._calls: list[Call] = []
        self._passes = self._since = self._in_last_part = 0  # backward passes
        self._private: dict[int, Any] = {}  # Opacus's optimizers by the one that each wraps
        self._threshold: float | list[float] = 0.0
        self._before: dict[int, Gradients] = {}  # what optimizers got in their last step

    # --- what the loop calls ---------------------------------------------------------------------

    def forward(self, call: Any, module: Any, args: Any, options: Any) -> Any:
        if not torch.is_grad_enabled():
            return call(module, *args, **options)
        if id(module) not in self._models:
            self._models[id(module)] = without_dropout(module)
            for name, p in self.parameters().items():
                self.known.setdefault(name, ParameterHistory(p.detach().clone(), p.requires_grad))
        out = call(module, *args, **options)
        outputs = [each for each in _tensors(out) if each.requires_grad]
        device = outputs[0].device.type if outputs else "cpu"
        autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        given = pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), (args, dict(options)))
        made = Call(module, given, outputs, autocast)
        for number, each in enumerate(outputs):
            each.register_hook(partial(self._take, made, number))
        self._calls.append(made)
        return out

    def _take(self, call: Call, number: int, gradient: Tensor) -> None:
        """Keep an output's first gradient in a pass: ghost clipping runs backward twice in one."""
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
            self._in_last_part, self._since = self._since, 0  # earlier ones were virtual steps
        if optimizer is not None:
            calls = self._calls
            self._calls = [call for call in calls if not call.gradients]  # for a later loss
            self._look_at(optimizer)
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
        """Add noise, measure it, and remove it, so that the gradient can be compared."""
        threshold = float(private.max_grad_norm)
        self._threshold = getattr(private, "max_grad_norms", threshold)
        sigma = private.noise_multiplier
        if sigma and (of_count := getattr(private, "unclipped_num_std", 0)):
            # Adaptive clipping spends part of the privacy on a count
            # (https://arxiv.org/abs/1905.03871).
            sigma = (sigma**-2 - (2 * of_count) ** -2) ** -0.5
        wanted = float(sigma * threshold)
        add_noise()
        noise = [(p.grad - p.summed_grad.view_as(p)).flatten().double() for p in private.params]
        if wanted:
            drawn = torch.cat(noise)
            self.noise.append((float(drawn.square().mean().sqrt()), wanted, len(drawn)))
        for p in private.params:
            p.grad = p.summed_grad.clone().view_as(p)

    def end_step(self) -> None:
        """Note which parameters have moved."""
        self.steps += 1
        self._calls = []
        for name, p in self.parameters().items():
            self.known[name].moved |= not torch.equal(p, self.known[name].start)

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of the modules that the loop calls, by name."""
        named: dict[str, nn.Parameter] = {}
        for number, module in enumerate(self._models.values()):
            for name, parameter in module.named_parameters():
                for wrapper in ("_module.", "module.", "_orig_mod."):
                    name = name.removeprefix(wrapper)
                if not any(parameter is each for each in named.values()):
                    named[f"module {number + 1}: {name}" if name in named else name] = parameter
        return named

    # --- an optimizer's step ---------------------------------------------------------------------

    def _look_at(self, optimizer: Any) -> None:
        """Note the optimizer's parameters, and whether they have gradients."""
        names = {id(p): name for name, p in self.parameters().items()}
        norms = [
            (group, p, 0.0 if p.grad is None else float(p.grad.norm()))
            for group in optimizer.param_groups
            for p in group["params"]
        ]
        rounding = NEGLIGIBLE * max((norm for *_, norm in norms), default=0.0)
        for group, p, norm in norms:
            if known := self.known.get(names.get(id(p), "")):
                known.chosen, known.gradient = True, known.gradient or norm > 0
                known.should_move |= norm > rounding and bool(group.get("lr", 1))
            else:
                self.unowned[id(p)] = p, norm > 0 or self.unowned.get(id(p), (p, False))[1]

    def _compare(self, optimizer: Any, private: Any, calls: Sequence[Call]) -> None:
        """Compare an optimizer's gradients with those of a loop over the examples."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        trained = {n: p for n, p in self.parameters().items() if id(p) in own and p.requires_grad}
        if private is None and any(_hook_owners(call.module) for call in calls):
            self.bypassed = type(optimizer).__name__
        passes = sorted({call.backward for call in calls if call.gradients})
        if not (trained and passes):
            raise NotChecked("no loss of a module's outputs trains the optimizer's parameters")
        mean = private is None or private.loss_reduction == "mean"
        of_pass = ([c for c in calls if c.backward == n and c.gradients] for n in passes)
        groups = [_examples(each, trained, mean=mean) for each in of_pass]
        examples = Examples.joined(groups)
        if not any(examples.sizes.values()):
            raise NotChecked("no loss depends on the optimizer's parameters")
        seen = {n: (torch.zeros_like(p) if p.grad is None else p.grad) for n, p in trained.items()}
        total, scale, known = len(examples.norms), 1.0, dict[str, Tensor]()
        if private is None:  # expect the sum over passes of the mean over each pass
            shares = [g.norms.new_full(g.norms.shape, total / len(g.norms)) for g in groups]
            wanted = examples.mean(torch.cat(shares))
            scale = _scale(seen, wanted)
            seen = {name: each.double() / (scale or 1) for name, each in seen.items()}
            clips = "not clipped by example" + " but as a batch" * (abs(scale - 1) > TOLERANCE)
        else:
            known = _known(examples, self._threshold, [len(g.norms) for g in groups])
            wanted = examples.mean(known[RIGHT])
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
                    "gradients are not the mean of the examples' own: if the script clips them by "
                    "its own code, its clipping threshold is not known here"
                )
        self.clips[clips] = None
        self.worst.append((far[worst], worst, tolerance))
        for name in (name for name, distance in far.items() if distance > tolerance):
            what = STALE
            if private is not None:
                what = examples.diagnose(name, seen[name], known, 10 * tolerance) or f"not {RIGHT}"
            self.wrong.setdefault(what, {})[name] = None

    # --- checks ----------------------------------------------------------------------------------

    def checks(self) -> Iterator[Check]:
        """Yield the checks of all steps."""
        known, steps = self.known, f"in {self.steps} steps"
        trained = [name for name, each in known.items() if each.trained]
        chosen = [name for name in trained if known[name].chosen]
        unowned = [parameter for parameter, used in self.unowned.values() if not used]
        made = (
            f"; optimizers have {len(unowned)} parameters that no called module has, the first "
            f"{_shape(unowned)}"
        )
        yield _all_but(
            "optimizer has the parameters",
            [*known] if unowned and not trained else [n for n in trained if n not in chosen],
            "trainable, and in no optimizer that steps" + made * bool(unowned),
            f"{len(chosen)} of {len(trained)} trainable",
        )
        idle = [name for name in chosen if not known[name].gradient]
        how = f"{len(chosen) - len(idle)} {steps}"
        yield _all_but("parameters get gradients", idle, f"no gradient {steps}", how)
        should_move = [name for name in chosen if known[name].should_move]
        stuck = [name for name in should_move if not known[name].moved]
        how = (
            f"{len(should_move) - len(stuck)} {steps}"
            if should_move
            else "no learning rate is above 0"
        )
        moving = _all_but("parameters move", stuck, f"has a gradient, no change {steps}", how)
        yield moving if should_move else Check(moving.name, NOT_JUDGED, "", how)
        frozen = [name for name, each in known.items() if not each.trained]
        thawed = [name for name in frozen if known[name].moved]
        how = f"{len(frozen)} frozen"
        yield _all_but("frozen parameters stay", thawed, "is frozen, and changes", how)
        yield self._of_noise()
        wrong = [f"{_named([*names])}: {what}" for what, names in self.wrong.items()]
        why = "; ".join(self.reasons)
        if self.worst:
            far, worst, tolerance = max(self.worst)
            words = f"{far:.2g} (≤ {tolerance:g}), {', '.join(self.clips)}"
            yield Check.judged("gradient", wrong, worst, words)
        if why or not self.worst:
            name = "gradient of some steps" if self.worst else "gradient"
            yield Check(name, NOT_JUDGED, "", why or "no optimizer stepped")
        yield Check("loss and sampling", NOT_JUDGED, "", UNKNOWN)

    def _of_noise(self) -> Check:
        if self.bypassed:
            line = f"{self.bypassed} steps instead of the optimizer that make_private returns"
            return Check("clipping and noise", FAILED, "", "none", [line])
        if not self.noise:
            why = "σ is 0" if self._private else "no optimizer of Opacus steps"
            return Check("noise" if self._private else "clipping and noise", NOT_JUDGED, "", why)
        wrong = [
            f"its deviation is {got:.4g}, but σC is {wanted:.4g}"
            for got, wanted, number in self.noise
            if abs(got / wanted - 1) > DEVIATIONS / (2 * number) ** 0.5
        ]
        far = ", ".join(f"{got / wanted:.3f}" for got, wanted, _ in self.noise)
        return Check.judged("noise: deviation", wrong[:1], "", f"{far} of σC")


def _all_but(name: str, wrong: Sequence[str], words: str, how: str) -> Check:
    """Make a check that lists the failing parameters in one line."""
    return Check.judged(name, [f"{_named(wrong)}: {words}"] * bool(wrong), "", how)


def _named(names: Sequence[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def _shape(tensors: Sequence[Tensor]) -> str:
    return "×".join(map(str, tensors[0].shape)) if tensors else ""


def _scale(seen: Gradients, wanted: Gradients) -> float:
    """The factor s that fits ``seen`` = s × ``wanted`` best."""
    squares = sum(float(each.square().sum()) for each in wanted.values())
    return sum(float((seen[name] * each).sum()) for name, each in wanted.items()) / squares


def _known(
    examples: Examples, threshold: float | list[float], sizes: Sequence[int]
) -> dict[str, Tensor]:
    """Factors by the name of the resulting mean: first the correct one, then known mistakes.

    Args:
        examples: the examples of all backward passes.
        threshold: C, or one threshold for each parameter.
        sizes: the number of examples of each backward pass.
    """
    per_layer = isinstance(threshold, list)
    norms = examples.norms if per_layer else examples.norms.norm(dim=1, keepdim=True)
    limit = torch.as_tensor(threshold).to(norms)
    clipped = (limit / (norms + 1e-6)).clamp(max=1.0).expand_as(examples.norms)
    last = clipped * (len(clipped) / sizes[-1])
    last[: -sizes[-1]] = 0
    words = f"the mean over the last of {len(sizes)} backward passes alone, without the others"
    common = examples.candidate_means("flat", float(limit.norm()), 1)
    return {RIGHT: clipped} | ({words: last} if len(sizes) > 1 else {}) | common


# --- the loop over examples ----------------------------------------------------------------------


def _examples(
    calls: Sequence[Call], trained: Mapping[str, nn.Parameter], *, mean: bool
) -> Examples:
    """Compute the per-sample gradients of the calls that one backward pass reached."""
    sizes = {len(c.outputs[n]) for c in calls for n in c.gradients if c.outputs[n].ndim}
    size = max(sizes, default=0)
    if len(sizes) != 1 or not size:
        raise NotChecked("the outputs of modules do not all have one row for each example")
    if (needed := size * sum(p.numel() for p in trained.values()) * 4) > MOST_BYTES:
        raise NotChecked(
            f"gradients of {size} examples take {needed / 1e9:.0f} GB: use a smaller batch"
        )
    rows = []
    with _undisturbed([call.module for call in calls]):
        for i in range(size):
            made = [(c, n, out) for c in calls for n, out in _again(c, i, size).items()]
            scaled = [c.gradients[n][i : i + 1] * (size if mean else 1) for c, n, _ in made]
            outs, named = [out for *_, out in made], [*trained.values()]
            options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
            rows.append(torch.autograd.grad(outs, named, scaled, **options))
    stacked = [torch.stack([g.float() for g in each]) for each in zip(*rows, strict=True)]
    return Examples(dict(zip(trained, stacked, strict=True)))


def _again(call: Call, i: int, size: int) -> dict[int, Tensor]:
    """Repeat a call for one example; its outputs must equal those in the batch."""

    def part(tensor: Tensor) -> Tensor:
        return tensor[i : i + 1] if tensor.ndim and len(tensor) == size else tensor

    args, options = pytree.tree_map_only(Tensor, part, call.given)
    enabled, dtype = call.autocast
    # Call the wrapped module: with expanded weights, Opacus's wrapper makes per-sample gradients.
    module = getattr(call.module, "_module", call.module)
    try:
        with torch.autocast(call.outputs[0].device.type, dtype, enabled=enabled):
            out = [each for each in _tensors(module(*args, **options)) if each.requires_grad]
    except Exception as error:  # the script's own code can raise anything
        words = str(error).partition("\n")[0]
        raise NotChecked(f"a call cannot be repeated for one example: {words}") from error
    near = TOLERANCE_16_BIT if call.is_16_bit else TOLERANCE
    made = {n: out[n] for n in call.gradients if call.outputs[n].ndim and n < len(out)}
    for number, each in made.items():
        before = call.outputs[number][i : i + 1].detach()
        if each.shape != before.shape or (each - before).norm() > near * before.norm():
            raise NotChecked(
                "a module's output for one example differs from that in the batch: its layers mix "
                "examples, or are random"
            )
    return made


def _tensors(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors in what a module returns."""
    if isinstance(value, Tensor) and value.is_floating_point():
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(each)


def _hook_owners(module: nn.Module) -> list[Any]:
    """The objects whose hooks make per-sample gradients of a module's layers."""
    hooks = [hook for layer in module.modules() for hook in layer._forward_hooks.values()]
    owners = {id(owner): owner for hook in hooks if (owner := getattr(hook, "__self__", None))}
    return [owner for owner in owners.values() if hasattr(owner, "hooks_enabled")]


@contextmanager
def _undisturbed(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let modules be called without per-sample hooks; restore buffers and random states."""
    devices = {p.device for m in modules for p in m.parameters() if p.device.type == "cuda"}
    with ExitStack() as undo, torch.random.fork_rng(devices), torch.enable_grad():
        for module in modules:
            for owner in _hook_owners(module):
                undo.callback(setattr, owner, "hooks_enabled", owner.hooks_enabled)
                owner.hooks_enabled = False
            for buffer in module.buffers():
                undo.callback(buffer.copy_, buffer.clone())
        yield
