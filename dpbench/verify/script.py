"""Checks the steps of a private script while the script trains.

Four things are judged. Each rests on what the step itself does:

- *Who is trained.* A parameter or buffer may depend on the private batches only through gradients
  that a private training has handed over (`Influences`).
- *What is handed over.* The private step is taken with σ = 0, undone, and taken as it is. Without
  noise, the gradient that reaches the inner optimizer is the mean of clipped gradients, computed
  with a loop over the examples (`repeated_calls`).
- *The noise*: the difference of the two gradients, for each parameter and step (`check_noise`).
- *Clipping*: the threshold is lowered until norms exceed it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from dpbench.child.recorder import Calls
from dpbench.verify.check_result import FAILED, NOT_JUDGED, NOTE, Check
from dpbench.verify.influence import MADE, Influences, tensors_in
from dpbench.verify.noise import check_noise
from dpbench.verify.noise_draw import Draw
from dpbench.verify.private import (
    OpacusStep,
    PrivateStep,
    gradient_of,
    handed_without_noise,
)
from dpbench.verify.reference import NEGLIGIBLE, Examples, Gradients, Threshold, distances
from dpbench.verify.repeated_calls import (
    TOLERANCE,
    TOLERANCE_16_BIT,
    Call,
    NotChecked,
    examples_of_pass,
    trained_outputs,
)
from dpbench.verify.trained_model import name_in_model, without_dropout

MOST_NAMES = 3
"""Largest number of parameters that one line of a message names."""

ASSUMPTIONS = (
    "assumed: the loss is a mean or sum over examples, of which none has inputs or labels that "
    "are made of others; the sampler draws at its stated rate"
)
NOT_FOUND = "private data by way of Python numbers, NumPy or files; faults outside these steps"
MADE_BATCHES, BATCHES_OF_CALLS = 2, 4
"""Sources, in `Influences`, of a private model's inputs that come from no data loader. The first is
of inputs that a step makes of random numbers, as generators and examples without data do."""

SOURCES = 2**64 - 1
"""The bits of data sets and of inputs without a loader. Higher bits stand for single batches."""

LOWERED = 0.25
"""The threshold is lowered to this share of the median norm, so that clipping shows."""

KNOWN_SEED = 2**32
"""PyTorch itself seeds with 64 random bits. A smaller seed has been set by the script."""


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


@dataclass
class Source:
    """A data set of one or more data loaders.

    Attributes:
        dataset: the data set, which is kept alive for its id.
        bit: the source in `Influences`.
        sizes: numbers of examples of the latest batches; 0 where it is not known. A loader may
            fetch batches ahead.
    """

    dataset: Any
    bit: int
    sizes: deque[int] = field(default_factory=lambda: deque(maxlen=3))


class StepChecks(Calls):
    """Records the calls of each step, and checks what private steps hand over."""

    compares_steps = False

    def __init__(self) -> None:
        self.steps = 0
        self.worst: list[tuple[float, str, float]] = []  # error, parameter, tolerance
        self.wrong: dict[str, dict[str, None]] = {}  # parameters, by a description of the error
        self.reasons: dict[str, None] = {}  # reasons why steps could not be compared
        self.clips: dict[str, None] = {}  # descriptions of the clipping
        self.has_clipped = False  # whether a norm exceeded the threshold in a compared step
        self.bypassed = ""  # class of an optimizer that steps in place of a private optimizer
        self.draws: dict[tuple[str, ...], list[Draw]] = {}  # noise, by the parameters' names
        self.noiseless: set[int] = set()  # steps with σ = 0
        self.known: dict[str, ParameterHistory] = {}
        # Parameters of an optimizer but of no called module, and whether each had a gradient:
        self.unowned: dict[int, tuple[Tensor, bool]] = {}
        self.influences = Influences()
        self.changed: dict[str, None] = {}  # parameters that change beside the optimizers' steps
        self._left = WeakTensorKeyDictionary()  # values of parameters after optimizers' steps
        self.remembers = False  # whether losses depend on batches of earlier steps
        self.holders: dict[str, None] = {}  # attributes that depend on batches of earlier steps
        self.follows = False  # whether learning rates follow a metric
        self._sources: dict[int, Source] = {}
        self._batches = 0  # batches so far
        self._before = 0  # sources of the batches in private steps, without the last step
        self._leaves = WeakTensorKeyDictionary()  # those of `Influences` at the last step's end
        self._judged = 0  # sources of the batches in private steps
        self._depends: dict[str, int] = {}  # sources of parameters and buffers
        self._called: dict[int, nn.Module] = {}  # all called modules, also without gradients
        self._models: dict[int, nn.Module] = {}
        self._calls: list[Call] = []
        self._passes = 0  # backward passes so far
        self._private: dict[int, PrivateStep] = {}  # latest steps, by the inner optimizer
        self._parts: dict[int, list[list[Call]]] = {}  # calls of a step that is under way
        self._handed: dict[int, Gradients] = {}  # gradients without noise, to be handed over
        self._lowered: dict[int, Threshold] = {}  # thresholds at which norms are clipped
        self._own: dict[int, Threshold] = {}  # the script's thresholds that have been lowered

    # --- calls from the training loop ------------------------------------------------------------

    def batch(self, dataset: Any, batch: Any) -> None:
        """Mark a batch. It is private if batches of its data set are used in private steps."""
        new = Source(dataset, 2 * BATCHES_OF_CALLS << len(self._sources))
        source = self._sources.setdefault(id(dataset), new)
        tensors = [*tensors_in(batch)]
        sizes = {len(each) if each.ndim else 1 for each in tensors}
        source.sizes.append(sizes.pop() if len(sizes) == 1 else 0)
        for each in tensors:
            self.influences.assign(each, source.bit | SOURCES + 1 << self._batches)
        self._batches += 1

    def forward(self, call: Any, module: Any, args: Any, options: Any) -> Any:
        self._called[id(module)] = module
        self._compare_with_left()
        call = partial(self._call, call)
        if not torch.is_grad_enabled():
            return call(module, *args, **options)
        self._forget_unused()
        if id(module) not in self._models:
            self._models[id(module)] = without_dropout(module)
            for name, p in self.parameters().items():
                self.known.setdefault(name, ParameterHistory(p.detach().clone(), p.requires_grad))
        made = Call(module, None, [], (False, torch.float32))
        if any(hasattr(p, "summed_grad") for p in module.parameters()):
            self._lower()
            made.misread = self._mark_inputs((args, options), made.dimension)
        made.sources = self.influences.of([args, options]) & ~MADE
        out = call(module, *args, **options)
        made.outputs = trained_outputs(out)
        device = made.outputs[0].device.type if made.outputs else "cpu"
        made.autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        for number, each in enumerate(made.outputs):
            each.register_hook(partial(self._record_gradient, weakref.ref(made), number))
        if made.outputs:
            with self.influences.paused():
                made.arguments = pytree.tree_map_only(
                    Tensor, lambda t: t.detach().clone(), (args, dict(options))
                )
            self._calls.append(made)
        return out

    def _call(self, call: Any, module: Any, *args: Any, **options: Any) -> Any:
        """Call a module. What it makes of random numbers, as a generator does, is no data."""
        of = self.influences.of
        # Before the first step, nothing was followed.
        known = (
            bits & MADE or not (bits or self.steps) for bits in map(of, tensors_in([args, options]))
        )
        is_made = all(known)
        out = call(module, *args, **options)
        for each in tensors_in(out if is_made else ()):
            self.influences.assign(each, of(each) | MADE)
        return out

    def _record_gradient(self, made: weakref.ref[Call], number: int, gradient: Tensor) -> None:
        """Record the first gradient of an output, because ghost clipping runs backward twice."""
        if (call := made()) is None:
            return
        call.backward = call.backward or self._passes
        if call.backward == self._passes and number not in call.gradients:
            call.gradients[number] = gradient.detach().clone()

    def backward(self) -> None:
        self._forget_unused()
        self._passes += 1

    def private_step(self, optimizer: Any, step: Callable[[], Any]) -> None:
        private = getattr(optimizer, "private_step", lambda: OpacusStep(optimizer))()
        names = {id(p): name for name, p in self.parameters().items()}
        own = {names.get(id(p), f"parameter {i}"): p for i, p in enumerate(private.parameters)}
        key, ids = id(private.inner), {id(p) for p in own.values()}
        self._private[key] = private
        self._forget_unused()
        made = [c for c in self._calls if c.gradients and ids & {*map(id, c.module.parameters())}]
        self._calls = [call for call in self._calls if call not in made]
        self._parts.setdefault(key, []).append(made)
        now = reduce(or_, (call.sources for call in made), 0)
        read = self.influences.of([(call.outputs, call.gradients) for call in made])
        self.remembers |= read & self._judged & ~now > SOURCES
        self._judged |= now
        self._handed[key] = {}
        try:
            with self.influences.paused():
                gradients = handed_without_noise(private, step, self.steps)
                if gradients is None:  # the step only accumulates gradients
                    del self._handed[key]
                else:
                    self._handed[key] = dict(zip(own, gradients, strict=True))
                    self._compare(private, own, self._parts.pop(key))
        except NotChecked as reason:
            self.reasons[str(reason)] = None

    def update(self, optimizer: Any) -> None:
        self._note_parameters(optimizer)
        key = id(optimizer)
        if key in self._handed:
            with self.influences.paused():
                self._draw(self._private[key], self._handed.pop(key))
            for p in self._private[key].parameters:
                if p.grad is not None:
                    self.influences.assign(p.grad, 0)
        elif any(hasattr(p, "summed_grad") for g in optimizer.param_groups for p in g["params"]):
            self.bypassed = type(optimizer).__name__

    def updated(self, optimizer: Any) -> None:
        for p in (p for each in self._private.values() for p in each.parameters):
            self._left[p] = p.detach().clone()

    def _compare_with_left(self) -> None:
        """Record which parameters have changed since the optimizers' last steps."""
        for name, p in self.parameters().items() if self._left else ():
            if p in self._left and not torch.equal(p, self._left[p]):
                self.changed[name] = None
        self._left.clear()

    def schedule_by(self, metric: Any) -> None:
        self.follows = True

    def end_step(self) -> None:
        """Record which parameters have moved, and what parameters and buffers depend on."""
        self.steps += 1
        self._calls = [call for call in self._calls if call.gradients]
        named: list[tuple[str, Tensor]] = [*self.parameters().items()]
        for name, p in named:
            self.known[name].moved |= not torch.equal(p, self.known[name].start)
        for module in self._called.values():
            named += [(name_in_model(name), buffer) for name, buffer in module.named_buffers()]
        known = {id(p) for _, p in named}
        # A tensor that is changed in place is a parameter if it outlives a step.
        leaves, self._leaves = self._leaves, WeakTensorKeyDictionary(self.influences.leaves)
        others = [*(p for p, _ in self.unowned.values()), *leaves]
        named += [(f"a tensor of {_shape([p])}", p) for p in others if id(p) not in known]
        for name, each in named:
            self._depends[name] = self._depends.get(name, 0) | self.influences.of(each)

        for module in self._called.values():
            self._note_attributes(module)
        self._before = self._judged

    def _note_attributes(self, module: nn.Module) -> None:
        """Record attributes, other than buffers, that depend on batches of earlier steps."""
        for path, layer in module.named_modules():
            for name, value in vars(layer).items():
                of_batches = self.influences.of(value) & self._before
                if of_batches > SOURCES and name not in ("_buffers", "_parameters"):
                    self.holders[name_in_model(f"{path}.{name}".strip("."))] = None

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the modules that the loop has called so far, by name."""
        named: dict[str, nn.Parameter] = {}
        for number, module in enumerate(self._models.values()):
            for name, parameter in module.named_parameters():
                name = name_in_model(name)
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

    def _forget_unused(self) -> None:
        """Forget calls of backward passes whose gradients the script has set to zero."""

        def is_used(p: Any) -> bool:
            in_grad = p.grad is not None and bool(p.grad.any())
            return in_grad or getattr(p, "grad_sample", None) is not None

        self._calls = [
            c for c in self._calls if not c.gradients or any(map(is_used, c.module.parameters()))
        ]

    def _mark_inputs(self, inputs: Any, dimension: int) -> str:
        """Mark inputs that come from no loader. Describe inputs whose rows are no examples."""
        misread = ""
        for each in (t for t in tensors_in(inputs) if not isinstance(t, nn.Parameter)):
            bits = self.influences.of(each)
            if not bits & ~MADE:
                self.influences.assign(each, bits | MADE_BATCHES if bits else BATCHES_OF_CALLS)
            bits &= SOURCES & ~(MADE_BATCHES | BATCHES_OF_CALLS)
            sizes = {n for s in self._sources.values() if s.bit == bits for n in s.sizes}
            if sizes and all(sizes) and each.ndim > 1:
                rows, others = each.shape[dimension], each.shape[1 - dimension]
                rows -= 0 if dimension else len(each) - self.influences.data_rows(each)
                if rows > max(sizes) or (rows not in sizes and others in sizes):
                    misread = f"{rows} rows are clipped one by one, of {max(sizes)} examples"
        return misread

    def _lower(self) -> None:
        """Lower thresholds for the next step, so that clipping shows."""
        for key, wanted in self._lowered.items():
            if before := self._private[key].lower(wanted, [*self._models.values()]):
                self._own.setdefault(key, before)

    def _compare(
        self, private: PrivateStep, own: Mapping[str, nn.Parameter], parts: Sequence[Sequence[Call]]
    ) -> None:
        """Compare a step's gradients without noise with those of a loop over the examples."""
        key = id(private.inner)
        passes = [
            [call for call in part if call.backward == number]
            for part in parts
            for number in sorted({call.backward for call in part})
        ]
        if not passes:
            raise NotChecked("no loss of a module's outputs trains the optimizer's parameters")
        groups = [examples_of_pass(each, own, mean=private.mean) for each in passes]
        last_passes = len({call.backward for call in parts[-1]}) or 1
        divisor = private.batch_size * last_passes if private.mean else 1
        examples = replace(Examples.joined(groups), expected=divisor)
        if len(examples.norms) and not any(examples.sizes.values()):
            raise NotChecked("no loss depends on the optimizer's parameters")
        seen = {name: each.double() for name, each in self._handed[key].items()}
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
        self.worst.append((far[worst], worst, tolerance))
        for call in calls:
            if call.misread:
                self.wrong[call.misread] = dict.fromkeys(far)
        for name in (name for name, distance in far.items() if distance > tolerance):
            what = examples.diagnose(name, seen[name], known, 10 * tolerance) or f"not {correct}"
            self.wrong.setdefault(what, {})[name] = None

    def _draw(self, private: PrivateStep, clipped: Gradients) -> None:
        """Record the noise of a step, from the gradients that the inner optimizer receives."""
        deviation = private.sigma * float(torch.tensor(private.threshold).norm()) / private.divisor
        if not deviation:
            self.noiseless.add(self.steps)
        if not (deviation and clipped):
            return
        noise, rounding, largest = dict[str, Tensor](), 0.0, 0.0
        for (name, before), p in zip(clipped.items(), private.parameters, strict=True):
            received = gradient_of(p)
            noise[name] = ((received.double() - before) / deviation).flatten()
            rounding += (torch.finfo(received.dtype).eps * float(received.norm())) ** 2
            largest = max(largest, float(before.abs().max()))
        run = f"optimizer {[*self._private].index(id(private.inner)) + 1}"
        # Beside smaller gradients, float32 rounds noise as if it were alone.
        slack = 2 * rounding**0.5 / deviation if largest > deviation else 0.0
        draw = Draw.beside(clipped, run, self.steps + 1, noise, slack)
        self.draws.setdefault(tuple(noise), []).append(draw)

    # --- checks ----------------------------------------------------------------------------------

    def checks(self) -> Iterator[Check]:
        """Yield the checks of all steps."""
        known, steps = self.known, f"in {self.steps} steps"
        # Ignore models that only compute, such as a teacher, beside models that are trained.
        names = {id(p): name for name, p in self.parameters().items()}
        models = [[names[id(p)] for p in m.parameters()] for m in self._models.values()]
        stepped = [each for each in models if any(known[name].has_optimizer for name in each)]
        of_models = {name for each in stepped or models for name in each}
        trained = [name for name, each in known.items() if each.trained and name in of_models]
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
        if self.bypassed:
            line = f"{self.bypassed} steps instead of the optimizer that make_private returns"
            yield Check("clipping and noise", FAILED, "", "none", [line])
        if self._private:
            yield self._dependence_check()
            yield from self._noise_checks()
            yield from self._gradient_checks()
        elif not self.bypassed:
            why = "not private: no optimizer of Opacus steps"
            yield Check("clipping and noise", NOT_JUDGED, "", why)
        if self.holders:
            text = (
                f"{_named([*self.holders])}: hold data of earlier batches, so do not publish them"
            )
            yield Check("attributes", NOTE, "", text)
        if self.changed:
            text = f"{_named([*self.changed])}: change between steps, by no optimizer"
            yield Check("other changes", NOTE, "", text)
        if self.follows:
            text = "ReduceLROnPlateau changes it; if by a metric of private data, that is a leak"
            yield Check("learning rate", NOTE, "", text)
        if self.draws and torch.initial_seed() < KNOWN_SEED:
            text = f"who knows the seed {torch.initial_seed()} can subtract the noise"
            yield Check("seed", NOTE, "", text)
        yield Check("loss and sampling", NOTE, "", ASSUMPTIONS)
        yield Check("not found", NOTE, "", NOT_FOUND)

    def _gradient_checks(self) -> Iterator[Check]:
        wrong = [f"{_named([*names])}: {what}" for what, names in self.wrong.items()]
        why = "; ".join(self.reasons)
        if self.worst:
            far, worst, tolerance = max(self.worst)
            error_text = f"{far:.2g} (≤ {tolerance:g}), {', '.join(self.clips)}"
            yield Check.judged("gradient", wrong, worst, error_text)
            if not self.has_clipped:
                yield Check("clipping", NOT_JUDGED, "", "no norm exceeded the threshold")
        if why or not self.worst:
            name = "gradient of some steps" if self.worst else "gradient"
            yield Check(name, NOT_JUDGED, "", why or "no private step was taken")

    @property
    def _private_sources(self) -> int:
        """The sources of private batches: data loaders, if any, or else other inputs."""
        of_loaders = SOURCES & ~(MADE_BATCHES | BATCHES_OF_CALLS)
        of_kinds = (self._judged & each for each in (of_loaders, BATCHES_OF_CALLS, MADE_BATCHES))
        return next(filter(None, of_kinds), 0)

    def _dependence_check(self) -> Check:
        name = "trained by private steps"
        if not (private := self._private_sources):
            return Check(name, NOT_JUDGED, "", "no private batch is known")
        wrong = [each for each, bits in self._depends.items() if bits & private]
        wrong += ["the loss of a later step"] * self.remembers
        words = "depends on private batches otherwise than through a private step"
        return _check(name, wrong, words, f"{len(self._depends)} parameters and buffers")

    def _noise_checks(self) -> Iterator[Check]:
        if self.noiseless or not self.draws:
            steps = f" in {len(self.noiseless)} of {self.steps} steps" * bool(self.draws)
            why = f"σ is 0{steps}" if self.noiseless else "no private step was compared"
            yield Check("noise", NOT_JUDGED, "", why)
        dtypes = {p.dtype for each in self._private.values() for p in each.parameters}
        dtype = min(dtypes, key=lambda each: each.itemsize, default=torch.float32)
        for names, draws in self.draws.items():
            of = f" of {names[0]}, …" * (len(self.draws) > 1)
            for check in check_noise(draws, dtype, "parameters, steps"):
                applies = check.verdict != NOT_JUDGED or check.wrong
                verdict = check.verdict if applies else NOTE
                yield replace(check, name=check.name + of, verdict=verdict)


def _check(name: str, wrong: Sequence[str], words: str, how: str) -> Check:
    """Make a check that lists the failing parameters in one line."""
    return Check.judged(name, [f"{_named(wrong)}: {words}"] * bool(wrong), "", how)


def _named(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _shape(tensors: Sequence[Tensor]) -> str:
    return "×".join(map(str, tensors[0].shape)) or "one element" if tensors else ""


def _quarter(examples: Examples, threshold: Threshold) -> Threshold:
    """Return `LOWERED` times the median norm, for each parameter if the threshold is a list."""
    if isinstance(threshold, list):
        each: list[float] = (LOWERED * examples.norms.median(dim=0).values).tolist()
        return [a or b for a, b in zip(each, threshold, strict=True)]
    return LOWERED * float(examples.norms.norm(dim=1).median()) or threshold
