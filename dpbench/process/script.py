"""Anybody's training in this process: its steps and phases, found from outside.

PyTorch and Opacus are watched where every training loop passes: the outermost module's call,
``backward``, clipping, noise, optimizers, batches. Forward lasts until backward begins, so a loss
is part of it. An optimizer's step is not yet the end of a training step, for another optimizer,
a scheduler or a log may follow: it ends where the next one begins, at a batch, a forward or a
backward. What belongs to no phase is outside: batches, logs, evaluation.

Libraries are watched from the moment they are imported, and nothing is imported here that the
script does not import itself: what it sets before (threads, allocators) stays as it set it.
"""

from __future__ import annotations

import importlib.util
import multiprocessing.process
import os
import runpy
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from dpbench.case import OUTSIDE
from dpbench.training.phases import OpenPhase, PhaseListener, Step, hear

MOST_STOPS = 20
"""How often a script that catches `Stop` is told to end, before it is left alone."""

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


class Stop(SystemExit):
    """Ends a script where its next step would begin, as if it had come to its end."""

    def __init__(self) -> None:
        super().__init__(0)


class StepRecorder(PhaseListener, Protocol):
    """Hears the steps that count."""

    @property
    def finished(self) -> bool:
        """Whether it has heard enough."""

    def close(self) -> None:
        """Let go of what it holds of this process: modes, counters."""


class StepFinder:
    """Watches a training loop that knows nothing of it, in the thread that makes this.

    Args:
        recorder: hears the steps that count, all if it is never finished.
        skip: steps that come before them.
        go_on: whether the loop goes on when the recorder has finished; else `Stop` ends it.
        by_hand: whether `begin_step` and `end_step` are called; then only phases are found.

    Attributes:
        steps: how many are over.
        failure: what went wrong while recording; the recorder hears nothing any more.
        steps_elsewhere: steps of optimizers in other threads, which are not seen.
        processes: how many others were started.
        evaluations: calls of modules without gradients, within steps that count.
        notes: what a reader should know.
    """

    def __init__(
        self, recorder: StepRecorder, *, skip: int = 0, go_on: bool = False, by_hand: bool = False
    ) -> None:
        self.recorder = recorder
        self.skip, self.go_on, self.by_hand = skip, go_on, by_hand
        self.steps = self.steps_elsewhere = self.processes = self.evaluations = 0
        self.failure: Exception | None = None
        self.notes: list[str] = []
        self._thread = threading.get_ident()
        self._undo = ExitStack()
        self._closed = False
        self._begun = False  # a step
        self._updated = False  # an optimizer has stepped: what begins next is another step
        self._stops = 0
        self._stopped = False
        self._step = Step()
        self._forward: OpenPhase | None = None  # that of a module which has returned, maybe
        self._settled = False  # within a module, a backward, a batch: modules begin nothing
        self._in_backward = False
        self._updating = 0  # optimizers' steps that are inside each other
        self._updates: list[Any] = []

    # --- steps -------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """A step begins; from here on its phases are heard, if it counts."""
        self._begun = True
        counts = self.steps >= self.skip and not (self.recorder.finished or self.failure)
        self._step = Step(self if counts else None)
        if counts:
            self._tell(self.recorder.start_step)
            hear(self._step)

    def end_step(self) -> None:
        """The step is over."""
        hear(None)
        if self._step.listener:
            self._tell(self.recorder.end_step)
        self.steps += 1
        self._step, self._forward = Step(), None
        self._begun = self._updated = False

    def give_up_step(self) -> None:
        """The step did not come to its end; what is heard ends with the one before."""
        self.failure = self.failure or InterruptedError("a step did not end")
        self._step.listener = None
        self.end_step()

    def switch(self, phase: str) -> None:
        """Of a step that counts: see `PhaseListener`."""
        self._tell(partial(self.recorder.switch, phase))

    def start_step(self) -> None:
        """See `PhaseListener`; steps begin with `begin_step`."""

    def _tell(self, what: Callable[[], object]) -> None:
        """Let the recorder hear something; its errors are not the script's."""
        if self.failure is None:
            try:
                what()
            except Exception as error:
                self.failure = error

    def _border(self, *, begins: bool = True) -> None:
        """Something begins that a step begins with; a closure's is inside its optimizer's step."""
        if self.by_hand or (self._updating and not self._stopped):
            return
        if self._updated:
            self.end_step()
            self._stopped = self.recorder.finished or self.failure is not None
        if self._stopped and self.go_on:
            self.close()
        elif self._stopped:
            self._stops += 1
            if self._stops <= MOST_STOPS:
                raise Stop
            self.close()
        elif begins and not self._begun:
            self.begin_step()

    # --- phases ------------------------------------------------------------------------------

    def _hears(self) -> bool:
        """Whether this is the loop's thread, or one of those that autograd runs for it."""
        return not self._closed and (threading.get_ident() == self._thread or self._in_backward)

    @contextmanager
    def _within(self, phase: str, *, begins: bool = False, resumes: bool = False) -> Iterator[None]:
        """A call that is in one phase; ``begins`` if a step may begin with it.

        Forward is over, unless the call ``resumes`` it: a gradient that the loss is made of.
        """
        if not self._hears():
            yield
            return
        if begins and not self._in_backward:
            self._border()
        resumes = resumes and self._forward is not None and not self._settled
        if not self._settled:
            self._end_forward()
        step, before = self._step, (self._settled, self._in_backward)
        entered = step.enter(phase) if phase != step.phase else None
        self._settled = self._settled or begins
        self._in_backward = self._in_backward or phase == "backward"
        try:
            yield
        finally:
            self._settled, self._in_backward = before
            if entered:
                step.leave(entered)
            if resumes:
                self._forward = step.enter("forward")

    def _end_forward(self) -> None:
        if self._forward is not None:
            self._step.leave(self._forward)
            self._forward = None

    def _begins_forward(self, module: Any) -> bool:
        """Whether a module's call is one of the loop's own; losses have no parameters."""
        import torch

        return (
            not self._closed
            and threading.get_ident() == self._thread
            and self._step.phase in (OUTSIDE, "forward", "optimizer")
            and not torch.compiler.is_compiling()
            and next(module.parameters(), None) is not None
        )

    def _begin_forward(self) -> OpenPhase | None:
        """A module is called; without gradients it is an evaluation, which the caller ends."""
        import torch

        if self._step.phase == "forward":
            return None
        trains = torch.is_grad_enabled()
        self._border(begins=trains)
        if trains:
            self._forward = self._step.enter("forward")
            return None
        self.evaluations += self._step.listener is not None
        return self._step.enter(OUTSIDE) if self._step.phase != OUTSIDE else None

    def _begin_update(self, *, is_update: bool) -> Any:
        """An optimizer's step begins; Opacus's and scalers' are none, if no other is inside."""
        if not self._hears():
            self.steps_elsewhere += is_update and not self._closed
            return None
        within = self._within("optimizer")
        within.__enter__()
        self._updating += 1
        self._updated = self._updated or is_update
        return within

    def _end_update(self, within: Any) -> None:
        if within is not None:
            self._updating -= 1
            within.__exit__(None, None, None)

    # --- where every loop passes --------------------------------------------------------------

    def watch(self) -> None:
        """Begin to watch PyTorch and Opacus, each once it is imported."""
        self._undo.callback(hear, None)
        for started in (multiprocessing.process.BaseProcess.start, subprocess.Popen.__init__):
            owner = sys.modules[started.__module__]
            self._replace(getattr(owner, started.__qualname__.partition(".")[0]), started.__name__)
        libraries: dict[str, Callable[[Any], None]] = {
            "torch": self._watch_torch,
            "opacus.optimizers.optimizer": self._watch_opacus,
            "opacus.utils.fast_gradient_clipping_utils": self._watch_ghost_clipping,
            "opacus.grad_sample.grad_sample_module_fast_gradient_clipping": self._watch_norms,
            "fastDP.autograd_grad_sample": self._watch_fastdp,
        }
        later: dict[str, Callable[[Any], None]] = {}
        for name, watch in libraries.items():
            if name in sys.modules:
                self._try(name, watch, sys.modules[name])
            else:
                later[name] = partial(self._try, name, watch)
        finder = _AfterImport(later)
        sys.meta_path.insert(0, finder)
        self._undo.callback(sys.meta_path.remove, finder)
        # A data loader's workers are forks of this process and train nothing.
        forked = weakref.WeakMethod(self._forget)
        os.register_at_fork(after_in_child=lambda: (forget := forked()) and forget())

    def close(self) -> None:
        """Watch no longer; a step that an optimizer has made is over."""
        if not self._closed:
            if self._updated and not self.by_hand:
                self.end_step()
            self._closed = True
            self._undo.close()

    def _forget(self) -> None:
        self._closed = True
        hear(None)
        if self._step.listener:
            self.recorder.close()

    def _try(self, name: str, watch: Callable[[Any], None], module: Any) -> None:
        """A library that has changed shall not break the script."""
        try:
            watch(module)
        except (AttributeError, ImportError, KeyError) as error:
            self.notes.append(f"{name} lacks {error}: not all phases were found")

    def _replace(
        self, owner: Any, name: str, made: Callable[[Any], Callable[..., Any]] | None = None
    ) -> None:
        """Put a function around one of a module's or a class's, until `close`."""
        original = vars(owner)[name]
        replacement = wraps(original)((made or self._count_processes)(original))
        setattr(owner, name, replacement)
        self._undo.callback(setattr, owner, name, original)

    def _count_processes(self, start: Callable[..., Any]) -> Callable[..., Any]:
        def started(*args: Any, **options: Any) -> Any:
            self.processes += 1
            return start(*args, **options)

        return started

    def _in_phase(self, phase: str, **how: bool) -> Callable[[Any], Callable[..., Any]]:
        def made(function: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any, **options: Any) -> Any:
                with self._within(phase, resumes=bool(options.get("create_graph")), **how):
                    return function(*args, **options)

            return called

        return made

    def _outer_update(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            update = self._begin_update(is_update=False)
            try:
                return step(*args, **options)
            finally:
                self._end_update(update)

        return called

    def _watch_torch(self, torch: Any) -> None:
        from torch.nn.utils import clip_grad
        from torch.optim import optimizer
        from torch.utils.data import dataloader

        self._replace(torch.nn.Module, "__call__", self._watch_modules)
        backward = self._in_phase("backward", begins=True)
        for owner, name in (
            (torch.autograd, "backward"),
            (torch.autograd, "grad"),
            (torch.Tensor, "backward"),
        ):
            self._replace(owner, name, backward)
        batch = self._in_phase(OUTSIDE, begins=True)
        self._replace(dataloader._BaseDataLoaderIter, "__next__", batch)
        self._replace(dataloader.DataLoader, "__iter__", batch)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            self._replace(clip_grad, name, self._in_phase("clip"))
            original = vars(torch.nn.utils)[name]
            setattr(torch.nn.utils, name, vars(clip_grad)[name])
            self._undo.callback(setattr, torch.nn.utils, name, original)
        for name in ("unscale_", "update"):
            self._replace(torch.amp.GradScaler, name, self._in_phase("optimizer"))
        self._replace(torch.amp.GradScaler, "step", self._outer_update)
        self._replace(torch.optim.Optimizer, "zero_grad", self._in_phase("optimizer"))
        before = optimizer.register_optimizer_step_pre_hook(self._before_update)
        after = optimizer.register_optimizer_step_post_hook(self._after_update)
        self._undo.callback(before.remove)
        self._undo.callback(after.remove)

    def _watch_modules(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(module: Any, *args: Any, **options: Any) -> Any:
            if self._settled or not self._begins_forward(module):
                return call(module, *args, **options)
            evaluation = self._begin_forward()
            self._settled = True
            try:
                return call(module, *args, **options)
            finally:
                self._settled = False
                if evaluation:
                    self._step.leave(evaluation)

        return called

    def _before_update(self, optimizer: Any, args: Any, options: Any) -> None:
        self._updates.append((optimizer, self._begin_update(is_update=True)))

    def _after_update(self, optimizer: Any, args: Any, options: Any) -> None:
        while self._updates:  # those above raised, and were not heard to end
            begun, update = self._updates.pop()
            self._end_update(update)
            if begun is optimizer:
                return

    def _watch_opacus(self, module: ModuleType) -> None:
        base, seen = module.DPOptimizer, set()

        def made(init: Callable[..., None]) -> Callable[..., None]:
            def initialised(self_: Any, *args: Any, **options: Any) -> None:
                for cls in type(self_).__mro__:  # the user's own, too
                    if cls not in seen and issubclass(cls, base):
                        seen.add(cls)
                        watch(cls)
                init(self_, *args, **options)

            return initialised

        def watch(cls: type) -> None:
            for name, phase in OPACUS.items():
                if name in vars(cls):
                    self._replace(cls, name, self._in_phase(phase))
            if "step" in vars(cls):
                self._replace(cls, "step", self._outer_update)

        self._replace(base, "__init__", made)

    def _watch_ghost_clipping(self, module: ModuleType) -> None:
        backward = self._in_phase("backward", begins=True)
        self._replace(module.DPTensorFastGradientClipping, "backward", backward)

    def _watch_norms(self, module: ModuleType) -> None:
        for cls in vars(module).values():
            if isinstance(cls, type) and "get_clipping_coef" in vars(cls):
                self._replace(cls, "get_clipping_coef", self._in_phase("clip"))

    def _watch_fastdp(self, module: ModuleType) -> None:
        self._replace(module, "_per_block_clip_grad", self._in_phase("clip"))


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


# --- the script ------------------------------------------------------------------------------


def run_program(program: Sequence[str], *, is_module: bool) -> None:
    """Run a script, or a module by its name, with its arguments as Python itself would."""
    sys.argv = list(program)
    if is_module:  # whose directory, the current one, ``python -m`` has put on the path
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
        return
    path = Path(program[0]).resolve()
    sys.path[0] = str(path.parent)
    main = ModuleType("__main__")
    main.__dict__.update(__file__=str(path), __builtins__=__builtins__)
    sys.modules["__main__"] = main
    exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), vars(main))


def print_error(error: BaseException) -> None:
    """Print a script's traceback as it would be without us."""
    ours = (str(Path(__file__).parents[1]), "<frozen runpy>")
    shown: traceback.TracebackException | None = traceback.TracebackException.from_exception(error)
    pending = [shown]
    while pending:
        if (part := pending.pop()) is not None:
            stack = [frame for frame in part.stack if not frame.filename.startswith(ours)]
            part.stack = traceback.StackSummary.from_list(stack)
            pending += [part.__cause__, part.__context__]
    assert shown
    print("".join(shown.format()), end="", file=sys.stderr, flush=True)
