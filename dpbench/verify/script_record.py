"""Records what the training loop of a script does in each step, and what its data reaches."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from dpbench.child.recorder import Calls
from dpbench.training.fused import FusedTrainer
from dpbench.verify.influence import MADE, Influences, tensors_in
from dpbench.verify.private import FusedStep, PrivateStep, PrivateSteps
from dpbench.verify.reference import NEGLIGIBLE, Call, trained_outputs
from dpbench.verify.trained_model import name_in_model, without_dropout

MADE_BATCHES, BATCHES_OF_CALLS = 2, 4
"""Sources, in `Influences`, of a private model's inputs that come from no data loader. The first is
of inputs that a step makes of random numbers, as generators and examples without data do."""

SOURCES = 2**64 - 1
"""The bits of data sets and of inputs without a loader. Higher bits stand for single batches."""


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


class StepRecord(Calls):
    """Records the calls of each step, and which parameters and buffers depend on which batches.

    Attributes:
        steps: number of steps so far.
        private: what private steps hand over.
        known: facts about the parameters of called modules.
        unowned: by their ids, parameters of an optimizer but of no called module, and whether each
            had a gradient.
        bypassed: the class of an optimizer that steps in place of a private optimizer.
        remembers: whether losses depend on batches of earlier steps.
        follows: whether learning rates follow a metric.
        depends: for each step, the sources of parameters and buffers at its end. Those that share
            a storage have the same.
        written: for each step, the parameters that private batches have changed in place so far.
        models: the called modules that compute gradients.
    """

    compares_steps = False

    def __init__(self) -> None:
        self.steps = 0
        self.influences = Influences()
        self.private = PrivateSteps()
        self.known: dict[str, ParameterHistory] = {}
        self.unowned: dict[int, tuple[Tensor, bool]] = {}
        self.bypassed = ""
        self.remembers = self.follows = False
        self.depends: list[dict[str, int]] = []
        self.written: list[set[str]] = []
        self.models: dict[int, nn.Module] = {}
        self._called: dict[int, nn.Module] = {}  # all called modules, also without gradients
        self._sources: dict[int, Source] = {}
        self._batches = 0  # batches so far
        self._judged = 0  # sources of the batches in private steps
        self._leaves = WeakTensorKeyDictionary()  # those of `Influences` at the last step's end
        self._calls: list[Call] = []
        self._passes = 0  # backward passes so far
        self._fused: set[int] = set()  # the ids of parameters that a `FusedTrainer` trains
        self._trainers: list[FusedTrainer] = []

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
        call = partial(self._call, call)
        if not torch.is_grad_enabled():
            return call(module, *args, **options)
        self._forget_unused()
        if id(module) not in self.models:
            self.models[id(module)] = without_dropout(module)
            for name, p in self.parameters().items():
                trained = p.requires_grad or id(p) in self._fused  # it is frozen in its steps
                self.known.setdefault(name, ParameterHistory(p.detach().clone(), trained))
        made = Call(module, None, [], (False, torch.float32))
        if any(hasattr(p, "summed_grad") or id(p) in self._fused for p in module.parameters()):
            self.private.lower([*self.models.values()])
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

    def begin_private(self, trainer: Any) -> None:
        """Forget calls of a batch that the script has given up, and lower the threshold."""
        self._fused |= {id(p) for p in trainer.trained}
        self._trainers = [each for each in self._trainers if each is not trainer] + [trainer]
        self._calls = [
            c for c in self._calls if not self._fused & {*map(id, c.module.parameters())}
        ]
        self.private.lower([*self.models.values()])

    def private_step(self, optimizer: Any, step: Callable[[], Any]) -> None:
        kind = FusedStep if isinstance(optimizer, FusedTrainer) else PrivateStep
        private = kind(optimizer, {id(p): name for name, p in self.parameters().items()})
        ids = {id(p) for p in private.parameters.values()}
        self._forget_unused()
        made = [c for c in self._calls if c.gradients and ids & {*map(id, c.module.parameters())}]
        self._calls = [call for call in self._calls if call not in made]
        now = reduce(or_, (call.sources for call in made), 0)
        read = self.influences.of([(call.outputs, call.gradients) for call in made])
        self.remembers |= read & self._judged & ~now > SOURCES
        self._judged |= now
        with self.influences.paused():
            self.private.begin(private, made, step, self.steps)

    def update(self, optimizer: Any) -> None:
        self._note_parameters(optimizer)
        if id(optimizer) in self.private.handed:
            with self.influences.paused():
                self.private.collect(optimizer, self.steps)
            for p in self.private.latest[id(optimizer)].parameters.values():
                if p.grad is not None:
                    self.influences.assign(p.grad, 0)
        elif any(hasattr(p, "summed_grad") for g in optimizer.param_groups for p in g["params"]):
            self.bypassed = type(optimizer).__name__

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
        before, self._leaves = self._leaves, WeakTensorKeyDictionary(self.influences.leaves)
        others = [*(p for p, _ in self.unowned.values()), *before]
        named += [(f"a tensor of {shape_of(p)}", p) for p in others if id(p) not in known]
        now: dict[str, int] = {}
        for name, each in named:
            now[name] = now.get(name, 0) | self.influences.of(each)
        self.depends.append(now)
        written = {
            name for name, each in named if self._leaves.get(each, 0) & self.private_sources()
        }
        self.written.append(written)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the modules that the loop has called so far, by name."""
        named: dict[str, nn.Parameter] = {}
        for number, module in enumerate(self.models.values()):
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
            return in_grad or id(p) in self._fused or getattr(p, "grad_sample", None) is not None

        self._calls = [
            c for c in self._calls if not c.gradients or any(map(is_used, c.module.parameters()))
        ]

    def _mark_inputs(self, inputs: Any, dimension: int) -> str:
        """Mark inputs that come from no loader. Describe inputs whose rows are no examples."""
        misread = ""
        parts = {n for trainer in self._trainers for n in trainer.sizes}  # examples in a part
        for each in (t for t in tensors_in(inputs) if not isinstance(t, nn.Parameter)):
            bits = self.influences.of(each)
            if not bits & ~MADE:
                self.influences.assign(each, bits | MADE_BATCHES if bits else BATCHES_OF_CALLS)
            bits &= SOURCES & ~(MADE_BATCHES | BATCHES_OF_CALLS)
            sizes = {n for s in self._sources.values() if s.bit == bits for n in s.sizes}
            if sizes and all(sizes) and each.ndim > 1:
                rows, others = each.shape[dimension], each.shape[1 - dimension]
                rows -= 0 if dimension else len(each) - self.influences.data_rows(each)
                if rows > max(sizes) or (rows not in sizes | parts and others in sizes):
                    misread = f"{rows} rows are clipped one by one, of {max(sizes)} examples"
        return misread

    def private_sources(self) -> int:
        """Return the sources of private batches: data loaders, if any, or else other inputs."""
        of_loaders = SOURCES & ~(MADE_BATCHES | BATCHES_OF_CALLS)
        of_kinds = (self._judged & each for each in (of_loaders, BATCHES_OF_CALLS, MADE_BATCHES))
        return next(filter(None, of_kinds), 0)


def shape_of(tensor: Tensor) -> str:
    """Return the shape as text, for messages."""
    return "×".join(map(str, tensor.shape)) or "one element"
