"""Wraps functions that training loops call, and reports their calls to a `StepFinder`.

The functions belong to PyTorch, Opacus and fastDP. A library's functions are wrapped when the
script imports the library. dpbench does not import the library earlier: the script may first set
the number of threads or the allocator, and these settings must take effect.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial, reduce, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from dpbench.child.step_finder import StepFinder
from dpbench.core.case import OUTSIDE
from dpbench.core.errors import subclasses
from dpbench.results.kernels import ELSEWHERE

FUNCTIONS: dict[str, dict[str, str]] = {
    "torch": {
        "autograd.backward": "backward",
        "autograd.grad": "backward",
        "Tensor.backward": "backward",
        "utils.data.dataloader.DataLoader.__iter__": OUTSIDE,
        "nn.utils.clip_grad_norm_": "clip",
        "nn.utils.clip_grad_value_": "clip",
        "nn.utils.clip_grad.clip_grad_norm_": "clip",
        "nn.utils.clip_grad.clip_grad_value_": "clip",
        "amp.GradScaler.unscale_": "optimizer",
        "amp.GradScaler.update": "optimizer",
        "optim.Optimizer.zero_grad": "optimizer",
    },
    # The backward of ghost clipping's loss runs two backward passes, which count as one.
    "opacus.utils.fast_gradient_clipping_utils": {
        "DPTensorFastGradientClipping.backward": "backward",
    },
    "opacus.utils.adaptive_clipping.adaptive_clipping_utils": {
        "DPTensorFastGradientAdaptiveClipping.backward": "backward",
    },
    # Models that `make_private` trains run with examples of the first batch before the first step.
    "dpbench.training.fused": {"FusedTrainer.prepare": OUTSIDE},
    # fastDP clips during the backward, and adds noise before the optimizer's step.
    "fastDP.autograd_grad_sample": {"_per_block_clip_grad": "clip"},
    "fastDP.privacy_engine": {"PrivacyEngine._create_noisy_clipped_gradient": "noise"},
}
"""Phases of functions, by the name of a module and the path of a function in this module."""

OPACUS = {
    "clip_and_accumulate": "clip",
    "accumulate": "clip",
    "update_max_grad_norm": "clip",
    "_ddp_per_layer_hook": "clip",
    "add_noise": "noise",
    "scale_grad": "noise",
    "_add_noise_parameter": "noise",
    "_scale_grad_parameter": "noise",
    "reduce_gradients": OUTSIDE,
    "zero_grad": "optimizer",
}
"""Phases of the methods of Opacus's optimizers."""

BEGIN_STEPS = ("backward", OUTSIDE)
"""Phases of calls that may begin a step: a backward, and the fetching of a batch."""

DYNAMO = "torch._dynamo.eval_frame"
"""Module of PyTorch's compiler whose function `skip_code` excludes code from compilation."""

LOADERS = "torch.utils.data."
"""Prefix of the modules of data loaders. Their threads are ignored, because they only move batches.
"""

Replacement = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Takes a function, and returns a wrapper that reports the function's calls to a `StepFinder`."""


def watch(finder: StepFinder) -> None:
    """Wrap the functions of each library, now or after its import, until the finder is closed."""
    watching = _Watching(finder)
    later = set()
    for name in {*FUNCTIONS, *watching.further}:
        if name in sys.modules:
            watching.library(sys.modules[name])
        else:
            later.add(name)
    after_import = _AfterImport(later, watching.library)
    sys.meta_path.insert(0, after_import)
    finder.undo.callback(sys.meta_path.remove, after_import)
    # Forks of this process, such as a data loader's workers, do not train.
    forked = weakref.WeakMethod(finder.forget)
    os.register_at_fork(after_in_child=lambda: (forget := forked()) and forget())


class _Watching:
    """Wraps functions of libraries, and reports their calls to a finder."""

    def __init__(self, finder: StepFinder) -> None:
        self.finder = finder
        self._updates: list[tuple[Any, Any]] = []
        self._stepping: Any = None  # the optimizer of Opacus that steps at the moment
        self._codes: set[CodeType] = set()  # the wrappers' code, which Dynamo must not compile
        self.further: dict[str, Callable[[Any], None]] = {
            "torch": self.torch,
            DYNAMO: self.compiler,
            "opacus.optimizers.optimizer": self.opacus,
            "dpbench.training.fused": self.fused,
            "opacus.grad_sample.grad_sample_module_fast_gradient_clipping": self.norms,
        }

    def library(self, module: ModuleType) -> None:
        """Wrap a library's functions. Add a note if this version of the library lacks any."""
        name = module.__name__
        try:
            if name in self.further:
                self.further[name](module)
            for path, phase in FUNCTIONS.get(name, {}).items():
                *owner, function = path.split(".")
                self.replace(reduce(getattr, owner, module), function, self.phase(phase))
        except (AttributeError, ImportError, KeyError) as error:
            self.finder.notes.append(f"not all phases in {name} can be found: {error}")

    def replace(self, owner: Any, name: str, made: Replacement) -> None:
        """Replace a function of a module or class with its wrapper."""
        original = vars(owner)[name]
        replacement = made(original)
        self._codes.add(replacement.__code__)
        if dynamo := sys.modules.get(DYNAMO):
            self.dynamo(dynamo)
        setattr(owner, name, wraps(original)(replacement))
        self.finder.undo.callback(setattr, owner, name, original)

    # --- functions ---------------------------------------------------------------------------

    def phase(self, phase: str) -> Replacement:
        """Return a `Replacement` for functions whose calls belong to a phase."""
        finder, begins = self.finder, phase in BEGIN_STEPS
        compiles = is_compiling()

        def made(function: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any, **options: Any) -> Any:
                if compiles():
                    return function(*args, **options)
                # With ``create_graph`` the gradient is part of the loss, so the forward continues
                # afterwards. A gradient computed by torch.func is a complete backward.
                resumes = bool(options.get("create_graph")) and not in_transform()
                with finder.within(phase, begins=begins, resumes=resumes):
                    return function(*args, **options)

            return called

        return made

    def batch(self, fetch: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the fetching of a batch by an iterator of a data loader."""
        finder = self.finder

        def called(iterator: Any) -> Any:
            with finder.within(OUTSIDE, begins=True):
                batch = fetch(iterator)
            sampler = type(getattr(iterator, "_index_sampler", None)).__name__
            finder.poisson |= "UniformWithReplacement" in sampler or "Poisson" in sampler
            finder.fetched(batch)
            if not (finder.recorder.finished or sys.modules["torch"].is_inference_mode_enabled()):
                finder.report(finder.recorder.calls.batch, iterator._dataset, batch)
            return batch

        return called

    def outer_update(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``step`` or ``pre_step`` of Opacus's optimizer. Only the outermost is reported."""
        compiles = is_compiling()

        def called(optimizer: Any, *args: Any, **options: Any) -> Any:
            if optimizer is self._stepping or compiles():
                return step(optimizer, *args, **options)
            for closure in filter(callable, (*args, *options.values())):
                with sys.modules["torch"].enable_grad():  # as Opacus does
                    closure()
                args, options = (), {}
            before, self._stepping = self._stepping, optimizer
            update, take = None, partial(step, optimizer, *args, **options)
            try:
                update = self.finder.begin_update(private=(optimizer, take))
                return take()
            finally:
                self.finder.end_update(update)
                self._stepping = before

        return called

    def plateau(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the step of a scheduler whose learning rate follows a metric."""

        def called(scheduler: Any, metrics: Any, *args: Any, **options: Any) -> Any:
            self.finder.report(self.finder.calls.schedule_by, metrics)
            return step(scheduler, metrics, *args, **options)

        return called

    def scaled_update(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap GradScaler's ``step``, which skips the optimizer if gradients are not finite."""

        def called(scaler: Any, optimizer: Any, *args: Any, **options: Any) -> Any:
            with self.finder.scaled_update(optimizer):
                return step(scaler, optimizer, *args, **options)

        return called

    def optimizer(self, init: Callable[..., None]) -> Callable[..., None]:
        """Wrap the constructor of optimizers, because each optimizer is expected to step."""

        def called(optimizer: Any, *args: Any, **options: Any) -> None:
            init(optimizer, *args, **options)
            self.finder.turns.awaited.add(optimizer)

        return called

    def module(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the call of modules. A call inside another module's call is not reported."""
        finder, compiles = self.finder, is_compiling()

        # PyTorch's profiler looks for the variable ``self`` in calls of modules.
        def called(self: Any, /, *args: Any, **options: Any) -> Any:
            if compiles():
                return call(self, *args, **options)
            if finder.inside and self._compiled_call_impl is None:
                return self._call_impl(*args, **options)  # what the original call does
            if finder.inside or not finder.begins_forward(self):
                return call(self, *args, **options)
            with finder.forward():
                return finder.calls.forward(call, self, args, options)

        return called

    def _before_update(self, optimizer: Any, args: Any, options: Any) -> None:
        self._updates.append((optimizer, self.finder.begin_update(optimizer)))

    def _after_update(self, optimizer: Any, args: Any, options: Any) -> None:
        while self._updates:  # the stack still has the updates that raised
            begun, update = self._updates.pop()
            self.finder.end_update(update)
            if begun is optimizer:
                return

    # --- libraries ---------------------------------------------------------------------------

    def torch(self, torch: Any) -> None:
        """Wrap PyTorch's modules, optimizers and GradScaler."""
        from torch.optim import optimizer

        self.replace(torch.nn.Module, "__call__", self.module)
        self.replace(torch.amp.GradScaler, "step", self.scaled_update)
        fetching = torch.utils.data.dataloader._BaseDataLoaderIter
        self.replace(fetching, "__next__", self.batch)
        self.replace(torch.optim.lr_scheduler.ReduceLROnPlateau, "step", self.plateau)
        self.replace(optimizer.Optimizer, "__init__", self.optimizer)
        before = optimizer.register_optimizer_step_pre_hook(self._before_update)
        after = optimizer.register_optimizer_step_post_hook(self._after_update)
        self.finder.undo.callback(before.remove)
        self.finder.undo.callback(after.remove)

    def compiler(self, eval_frame: Any) -> None:
        """Handle the import of PyTorch's compiler."""
        self.dynamo(eval_frame)
        self.finder.recorder.compiler(eval_frame)

    def dynamo(self, eval_frame: Any) -> None:
        """Exclude the wrappers from compilation, as Dynamo excludes the wrapped functions.

        Otherwise, ``Sequential.compile()`` would compile the layers, which Dynamo usually skips,
        and compiled layers draw other random numbers.
        """
        for code in self._codes:
            eval_frame.skip_code(code)

    def opacus(self, module: ModuleType) -> None:
        """Wrap methods of Opacus's optimizers, whose steps do not call PyTorch's hooks."""
        seen: set[type] = set()

        def watch_all() -> None:
            for cls in {*subclasses(module.DPOptimizer)} - seen:
                seen.add(cls)
                for name, phase in OPACUS.items():
                    if name in vars(cls):
                        self.replace(cls, name, self.phase(phase))
                for name in {"step", "pre_step"} & vars(cls).keys():
                    self.replace(cls, name, self.outer_update)

        def derived(cls: Any, /, **options: Any) -> None:
            super(module.DPOptimizer, cls).__init_subclass__(**options)
            watch_all()

        watch_all()
        module.DPOptimizer.__init_subclass__ = classmethod(derived)
        self.finder.undo.callback(delattr, module.DPOptimizer, "__init_subclass__")

    def fused(self, module: ModuleType) -> None:
        """Wrap the update of `make_private`'s trainer, which may call no optimizer's step."""
        finder = self.finder

        def begun(begin: Callable[..., None]) -> Callable[..., None]:
            def called(trainer: Any) -> None:
                if isinstance(trainer, module.FusedTrainer):
                    finder.begin_private(trainer)
                begin(trainer)

            return called

        def updated(update: Callable[..., None]) -> Callable[..., None]:
            def called(trainer: Any, reductions: Any) -> None:
                within = finder.begin_update(private=(trainer, lambda: reductions))
                try:
                    update(trainer, reductions)
                    if within is not None:
                        finder.has_updated(trainer.plain_optimizer)
                finally:
                    finder.end_update(within)

            return called

        self.replace(module.ClippedSumTrainer, "begin_step", begun)
        self.replace(module.FusedTrainer, "noisy_step", updated)

    def norms(self, module: ModuleType) -> None:
        """Wrap the method with which ghost clipping computes clipping factors from norms."""
        for cls in vars(module).values():
            if isinstance(cls, type) and "get_clipping_coef" in vars(cls):
                self.replace(cls, "get_clipping_coef", self.phase("clip"))


def is_compiling() -> Callable[[], bool]:
    """Return PyTorch's function that returns True while Dynamo traces a function.

    A wrapper that is traced only calls the wrapped function.
    """
    compiles: Callable[[], bool] = sys.modules["torch"].compiler.is_compiling
    return compiles


def in_transform() -> bool:
    """Return True inside a transform of ``torch.func``, such as ``grad`` or ``vmap``."""
    return sys.modules["torch"]._C._functorch.maybe_current_level() is not None


class _AfterImport(MetaPathFinder):
    """Import hook that calls a function with each of the named modules after the import."""

    def __init__(self, names: set[str], function: Callable[[ModuleType], None]) -> None:
        self._names, self._function = names, function

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Find a module as usual, and make its loader call the function after the import."""
        if name not in self._names:
            return None
        self._names.remove(name)  # so that the search below does not find this import hook
        spec = importlib.util.find_spec(name)
        self._names.add(name)  # the caller may search for a module without importing it
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            self._names.discard(name)
            execute(module)
            self._function(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


# --- other threads and forks -----------------------------------------------------------------


def watch_threads_and_forks(finder: StepFinder) -> None:
    """Add a note to the finder if other threads or forks run operators during counted steps.

    The watching ends when the finder is closed.
    """
    # Two bytes shared with forks: whether steps are counted at the moment, and whether another
    # thread or a fork has run an operator meanwhile.
    shared = mmap.mmap(-1, 2)
    keep, start = finder.keep, threading.Thread.start

    def keep_and_share() -> None:
        shared[0] = not finder.recorder.finished
        keep()

    def saw() -> None:
        if not shared.closed and (shared[0] or finder.counts):
            shared[1] = True

    def start_watched(thread: Any) -> None:
        target = getattr(thread, "_target", None)
        if not str(getattr(target, "__module__", "")).startswith(LOADERS):
            thread.run = partial(_run_watched, thread.run, saw)
        start(thread)

    def end() -> None:
        finder.notes += [ELSEWHERE] if shared[1] else []
        shared.close()

    finder.keep = keep_and_share
    threading.Thread.start = start_watched  # type: ignore[method-assign, assignment]
    finder.undo.callback(end)
    finder.undo.callback(setattr, threading.Thread, "start", start)
    os.register_at_fork(after_in_child=partial(_enter_in_fork, shared, saw))


def _run_watched(run: Callable[[], object], saw: Callable[[], object]) -> None:
    with _watching_mode(saw) if "torch" in sys.modules else nullcontext():
        run()


def _enter_in_fork(shared: mmap.mmap, saw: Callable[[], object]) -> None:
    if "torch" in sys.modules and not shared.closed:
        _watching_mode(saw).__enter__()


def _watching_mode(saw: Callable[[], object]) -> AbstractContextManager[object]:
    """Return a dispatch mode that calls ``saw`` for each operator of this thread."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.data import get_worker_info

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(
            self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if get_worker_info() is None:  # a data loader's worker does not train
                saw()
            return operator(*args, **(kwargs or {}))

    mode: AbstractContextManager[object] = Watching()  # type: ignore[no-untyped-call]
    return mode
