"""Where every training loop passes: functions of PyTorch and Opacus that tell a `StepFinder`.

Libraries are watched from the moment they are imported, and nothing is imported here that the
script does not import itself: what it sets before (threads, allocators) stays as it set it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

from dpbench.case import OUTSIDE
from dpbench.process.script import StepFinder

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
"""The phases of the methods of Opacus's optimizers."""

Replacement = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes of a function one that does the same, and tells of it."""


def watch(finder: StepFinder) -> None:
    """Let a finder hear of PyTorch and Opacus, each once it is imported, until it is closed."""
    watching = _Watching(finder)
    for owner, name in ((BaseProcess, "start"), (subprocess.Popen, "__init__")):
        watching.replace(owner, name, watching.process)
    libraries: dict[str, Callable[[Any], None]] = {
        "torch": watching.torch,
        "opacus.optimizers.optimizer": watching.opacus,
        "opacus.utils.fast_gradient_clipping_utils": watching.ghost_clipping,
        "opacus.grad_sample.grad_sample_module_fast_gradient_clipping": watching.norms,
        "fastDP.autograd_grad_sample": watching.fastdp,
        "fastDP.privacy_engine": watching.fastdp_engine,
    }
    later: dict[str, Callable[[Any], None]] = {}
    for name, library in libraries.items():
        told = partial(watching.library, name, library)
        if name in sys.modules:
            told(sys.modules[name])
        else:
            later[name] = told
    after_import = _AfterImport(later)
    sys.meta_path.insert(0, after_import)
    finder.undo.callback(sys.meta_path.remove, after_import)
    # A data loader's workers are forks of this process and train nothing.
    forked, started = weakref.WeakMethod(finder.forget), weakref.WeakMethod(finder.note_process)
    os.register_at_fork(
        after_in_child=lambda: (forget := forked()) and forget(),
        after_in_parent=lambda: (note := started()) and note(),
    )


class _Watching:
    """Puts functions around those of libraries."""

    def __init__(self, finder: StepFinder) -> None:
        self.finder = finder
        self._updates: list[tuple[Any, Any]] = []

    def library(self, name: str, watch: Callable[[Any], None], module: ModuleType) -> None:
        """Watch a library; one that has changed shall not break the script."""
        try:
            watch(module)
        except (AttributeError, ImportError, KeyError) as error:
            self.finder.notes.append(f"{name} lacks {error}: not all phases were found")

    def replace(self, owner: Any, name: str, made: Replacement) -> None:
        """Put a function in the place of one of a module's or a class's."""
        original = vars(owner)[name]
        setattr(owner, name, wraps(original)(made(original)))
        self.finder.undo.callback(setattr, owner, name, original)

    # --- functions ---------------------------------------------------------------------------

    def phase(self, phase: str, *, begins: bool = False) -> Replacement:
        """Its calls are in one phase; see `StepFinder.within`."""
        finder, is_backward = self.finder, phase == "backward"

        def made(function: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any, **options: Any) -> Any:
                if (finder.quiet and not is_backward) or (finder.idle and not begins):
                    return function(*args, **options)
                if finder.idle and (before := finder.begin(in_backward=is_backward)):
                    try:
                        return function(*args, **options)
                    finally:
                        finder.end(before)
                resumes = bool(options.get("create_graph"))
                with finder.within(phase, begins=begins, resumes=resumes):
                    return function(*args, **options)

            return called

        return made

    def outer_update(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """A step that makes an optimizer step, or does not."""

        def called(*args: Any, **options: Any) -> Any:
            update = self.finder.begin_update(is_update=False)
            try:
                return step(*args, **options)
            finally:
                self.finder.end_update(update)

        return called

    def process(self, start: Callable[..., Any]) -> Callable[..., Any]:
        """Starts another process."""

        def started(*args: Any, **options: Any) -> Any:
            self.finder.note_process()
            return start(*args, **options)

        return started

    def module(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call of every module, of which most are inside another's."""
        finder = self.finder

        def called(module: Any, /, *args: Any, **options: Any) -> Any:
            if (finder.quiet or finder.settled) and module._compiled_call_impl is None:
                return module._call_impl(*args, **options)  # all that the original does
            if finder.quiet or finder.settled or not finder.begins_forward(module):
                return call(module, *args, **options)
            trains = sys.modules["torch"].is_grad_enabled()
            if finder.idle and (before := finder.begin(in_backward=False, trains=trains)):
                try:
                    return call(module, *args, **options)
                finally:
                    finder.end(before)
            with finder.forward():
                return call(module, *args, **options)

        return called

    def _before_update(self, optimizer: Any, args: Any, options: Any) -> None:
        self._updates.append((optimizer, self.finder.begin_update(is_update=True)))

    def _after_update(self, optimizer: Any, args: Any, options: Any) -> None:
        while self._updates:  # those above raised, and were not heard to end
            begun, update = self._updates.pop()
            self.finder.end_update(update)
            if begun is optimizer:
                return

    # --- libraries ---------------------------------------------------------------------------

    def torch(self, torch: Any) -> None:
        """Modules, backward, batches, optimizers, clipping of whole gradients, scalers."""
        from torch.nn.utils import clip_grad
        from torch.optim import optimizer
        from torch.utils.data import dataloader

        self.replace(torch.nn.Module, "__call__", self.module)
        backward = self.phase("backward", begins=True)
        self.replace(torch.autograd, "backward", backward)
        self.replace(torch.autograd, "grad", backward)
        self.replace(torch.Tensor, "backward", backward)
        batch = self.phase(OUTSIDE, begins=True)
        self.replace(dataloader._BaseDataLoaderIter, "__next__", batch)
        self.replace(dataloader.DataLoader, "__iter__", batch)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            for place in (clip_grad, torch.nn.utils):
                self.replace(place, name, self.phase("clip"))
        for name in ("unscale_", "update"):
            self.replace(torch.amp.GradScaler, name, self.phase("optimizer"))
        self.replace(torch.amp.GradScaler, "step", self.outer_update)
        self.replace(torch.optim.Optimizer, "zero_grad", self.phase("optimizer"))
        before = optimizer.register_optimizer_step_pre_hook(self._before_update)
        after = optimizer.register_optimizer_step_post_hook(self._after_update)
        self.finder.undo.callback(before.remove)
        self.finder.undo.callback(after.remove)

    def opacus(self, module: ModuleType) -> None:
        """Optimizers: clipping and noise, and steps, of which PyTorch's hooks hear nothing."""
        seen: set[type] = set()

        def watch_all() -> None:
            for cls in {module.DPOptimizer, *_derived(module.DPOptimizer)} - seen:
                seen.add(cls)
                for name, phase in OPACUS.items():
                    if name in vars(cls):
                        self.replace(cls, name, self.phase(phase))
                if "step" in vars(cls):
                    self.replace(cls, "step", self.outer_update)

        def made(init: Callable[..., None]) -> Callable[..., None]:
            def initialised(optimizer: Any, /, *args: Any, **options: Any) -> None:
                watch_all()  # the script's own classes have come since
                init(optimizer, *args, **options)

            return initialised

        watch_all()
        self.replace(module.DPOptimizer, "__init__", made)

    def ghost_clipping(self, module: ModuleType) -> None:
        """A loss that runs backward twice, of which autograd hears only the parts."""
        backward = self.phase("backward", begins=True)
        self.replace(module.DPTensorFastGradientClipping, "backward", backward)

    def norms(self, module: ModuleType) -> None:
        """Clipping factors from the norms of gradients that are never made."""
        for cls in vars(module).values():
            if isinstance(cls, type) and "get_clipping_coef" in vars(cls):
                self.replace(cls, "get_clipping_coef", self.phase("clip"))

    def fastdp(self, module: ModuleType) -> None:
        """Book-keeping, which clips within backward."""
        self.replace(module, "_per_block_clip_grad", self.phase("clip"))

    def fastdp_engine(self, module: ModuleType) -> None:
        """Its noise, which a method puts on the optimizer adds before the optimizer's own step."""
        engine = module.PrivacyEngine
        self.replace(engine, "_create_noisy_clipped_gradient", self.phase("noise"))


def _derived(cls: type[Any]) -> Iterator[type[Any]]:
    for derived in cls.__subclasses__():
        yield derived
        yield from _derived(derived)


class _AfterImport(MetaPathFinder):
    """Calls a function with each module that was named, as soon as it has been imported."""

    def __init__(self, functions: dict[str, Callable[[Any], None]]) -> None:
        self._functions = functions

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Let the others find it, and have it executed with its function after that."""
        if name not in self._functions:
            return None
        function = self._functions.pop(name)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            function(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
