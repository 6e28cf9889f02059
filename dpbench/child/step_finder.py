"""Finds the steps and phases of an unmodified training loop in this process.

Functions that every training loop calls are wrapped (`dpbench.child.patches`): the outermost
module's call, ``backward``, clipping, noise, optimizers, batches. Forward lasts until backward
begins, so it contains the loss. A training step does not end with an optimizer's step, which
another optimizer, a scheduler or a log may follow, but where the next one begins: at a batch, a
forward or a backward after the last optimizer that takes turns (`dpbench.child.optimizers`). All
else is outside: batches, logs, evaluation.
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from dpbench.child.optimizers import MOST_TURNS, AlternatingOptimizers
from dpbench.core.case import OUTSIDE, Case
from dpbench.training.phases import OpenPhase, PhaseListener, Step, set_current_step


class Stop(SystemExit):
    """Ends a script where its next step would begin, with exit code 0.

    A script that catches it runs on, unobserved.
    """


class Calls:
    """Is told of the calls that make a step; by default it ignores them."""

    def forward(self, call: Callable[..., Any], module: Any, args: Any, options: Any) -> Any:
        """Call a module for the loop; returns what ``call(module, *args, **options)`` does."""
        return call(module, *args, **options)

    def backward(self) -> None:
        """A backward pass of the loop begins."""

    def update(self, optimizer: Any, outer: Any) -> None:
        """An optimizer begins its step, which ``outer``, such as a wrapper of Opacus, may call."""


class StepListener(PhaseListener, Protocol):
    """Observes training steps in the process that takes them."""

    hears_warmup: bool
    """Whether it also observes the warm-up steps of a case."""

    def prepare(self) -> None:
        """Do what can fail or is slow (imports) before this process locks its GPU."""

    @property
    def finished(self) -> bool:
        """Whether it has observed as many steps as it wanted."""

    def record(self, case: Case) -> dict[str, Any]:
        """What was observed, as plain JSON types; in seconds and bytes."""

    def close(self) -> None:
        """Release what it has set in this process: modes, counters."""

    def forked(self) -> None:
        """Release what a fork of this process inherited; counters stay with the parent."""


IGNORED = Calls()


class StepFinder:
    """Finds the steps and phases of an unmodified training loop, in the thread that creates this.

    Args:
        recorder: observes the steps, until it is finished.
        skip: steps at the beginning that it does not observe.
        go_on: whether the loop goes on when the recorder has finished; else `Stop` ends it.
        by_hand: whether the caller calls `start_step` and `end_step`; then only phases are found.
        keep: called after each observed step.
        calls: returns what is told of the calls of observed steps.
    """

    def __init__(
        self,
        recorder: StepListener,
        *,
        skip: int = 0,
        go_on: bool = False,
        by_hand: bool = False,
        keep: Callable[[], object] = lambda: None,
        calls: Callable[[], Calls] = Calls,
    ) -> None:
        self.recorder, self.keep, self._told = recorder, keep, calls
        self.skip, self.go_on, self.by_hand = skip, go_on, by_hand
        self.steps = 0  # finished ones
        self.steps_elsewhere = 0  # of optimizers in other threads, which are not seen
        self.evaluations = 0  # calls of modules without gradients, within steps that count
        self.failure: Exception | None = None  # afterwards, the recorder gets no more calls
        self.notes: list[str] = []  # for the reader of the numbers
        self.turns = AlternatingOptimizers()
        self.settled = False  # inside a module, backward or batch, where no step begins
        self.undo = ExitStack()  # what `close` undoes
        self._thread = threading.get_ident()
        self._children = page_faults_of_children()
        self._closed = False
        self._begun = False  # whether a step has begun
        self._updated = False  # an optimizer has stepped: a new turn comes next
        self._step = Step()
        self._forward: OpenPhase | None = None  # maybe of a module that has returned
        self._in_backward = False
        self._updating = 0  # depth of nested optimizers' steps
        self._updates = 0  # begun steps of optimizers
        self._skipped = 0  # skipped by scalers, in counted steps
        self._infinite: list[Any] = []  # found_inf of optimizers that skip steps themselves

    # --- steps -------------------------------------------------------------------------------

    def start_step(self) -> None:
        """Begin a step; its phases are recorded unless it is skipped."""
        self._begun = True
        counts = self.steps >= self.skip and not (self.recorder.finished or self.failure)
        self._step, self._forward = Step(self if counts else None), None
        if counts:
            self._tell(self.recorder.start_step)
            set_current_step(self._step)

    def end_step(self) -> None:
        """End the step."""
        set_current_step(None)
        if self.counts:
            self._tell(self.recorder.end_step)
            self._tell(self.keep)
        self.steps += 1
        self._step, self._forward = Step(), None
        self._begun = self._updated = False

    def give_up_step(self) -> None:
        """Abandon the step, which did not end; nothing more is recorded."""
        self.failure = self.failure or InterruptedError("a step did not end")
        self._step.listener = None
        self.end_step()

    def switch(self, phase: str) -> None:
        """See `PhaseListener`; called in observed steps only."""
        self._tell(self.recorder.switch, phase)

    def _tell(self, method: Callable[..., object], *given: Any) -> None:
        """Call the recorder; an error of its own ends the recording, not the script."""
        if self.failure is None:
            try:
                method(*given)
            except Exception as error:
                self.failure = error

    def _end_turn(self) -> None:
        """End the training step if all optimizers that take turns have stepped."""
        self._updated = False
        if not self.turns.over():
            return
        if not self.counts:
            steps = self.turns.start()
            if steps > 1:
                self.notes.append(
                    f"an optimizer did not step in {MOST_TURNS} turns of others: steps are theirs"
                )
            self.steps += steps - 1
            self.end_step()
        elif self.turns.is_round:
            self.turns.heard = max(self.turns.heard, self.turns.taken)
            self.turns.start()
            self.end_step()
        else:
            self.failure = RuntimeError(
                f"not the same optimizers step in step {self.steps + 1} as before it: choose "
                f"--skip and --steps so that it does not count"
            )
            self.give_up_step()

    def _border(self) -> None:
        """End the last step and begin the next, at a call with which a step can begin.

        Not in inference mode, whose end would undo a dispatch mode begun or ended inside.
        """
        import torch

        if self.by_hand or self._updating or torch.is_inference_mode_enabled():
            return
        if self._updated:
            self._end_turn()
            if self.recorder.finished or self.failure is not None:
                self.close()
                if not self.go_on:
                    raise Stop(0)
                return
        if not self._begun:
            self.start_step()

    @property
    def counts(self) -> bool:
        """Whether a recorded step is under way."""
        return self._step.listener is not None

    @property
    def calls(self) -> Calls:
        """What is told of calls now."""
        return self._told() if self.counts else IGNORED

    # --- phases ------------------------------------------------------------------------------

    def _hears(self) -> bool:
        """Whether this is the loop's thread, or one of those that autograd runs for it."""
        return not self._closed and (threading.get_ident() == self._thread or self._in_backward)

    @contextmanager
    def within(self, phase: str, *, begins: bool = False, resumes: bool = False) -> Iterator[None]:
        """Mark the phase of a call; the call may begin a step, and forward may resume after it."""
        if not self._hears():
            yield
            return
        if begins and not self._in_backward:
            self._border()
        step, before = self._step, (self.settled, self._in_backward)
        if self._forward and not self.settled:
            step.leave(self._forward)
            self._forward = None
        else:
            resumes = False
        entered = step.enter(phase) if phase != step.phase else None
        self.settled = self.settled or begins
        if phase == "backward" and not self._in_backward:
            self._in_backward = True
            self._tell(self.calls.backward)
        try:
            yield
        finally:
            self.settled, self._in_backward = before
            if entered:
                step.leave(entered)
            if resumes:
                self._forward = step.enter("forward")

    def begins_forward(self, module: Any) -> bool:
        """Whether a module's call is one of the loop's own; losses have no parameters."""
        return (
            not (self._closed or self._in_backward)
            and threading.get_ident() == self._thread
            and self._step.phase in (OUTSIDE, "forward", "optimizer")
            and next(module.parameters(), None) is not None
        )

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Mark a module's call as forward, or without gradients as an evaluation."""
        import torch

        evaluation = None
        if self._step.phase != "forward":
            self._border()
            if torch.is_grad_enabled():
                self._forward = self._step.enter("forward")
            else:
                self.evaluations += self.counts
                evaluation = self._step.enter(OUTSIDE) if self._step.phase != OUTSIDE else None
        step, self.settled = self._step, True
        try:
            yield
        finally:
            self.settled = False
            if evaluation:
                step.leave(evaluation)

    def begin_update(self, optimizer: Any = None, outer: Any = None) -> Any:
        """Begin an update; no optimizer for Opacus's and scalers' steps, which call one."""
        if not self._hears():
            self.steps_elsewhere += optimizer is not None and not self._closed
            return None
        again = optimizer in self.turns.stepped or not self._begun
        if again and not (self._updating or self._in_backward):
            self._border()  # no call since its last step: its closure makes them
        within = self.within("optimizer")
        within.__enter__()
        self._updating += 1
        self._updates += 1
        self._closed = True  # what the recorder calls is not the loop's
        self._tell(self.calls.update, optimizer, outer)
        self._closed = False
        if optimizer is not None:
            self._has_updated(optimizer)
            infinite = getattr(optimizer, "found_inf", None)
            if self.counts and infinite is not None:
                self._infinite.append(infinite)
        return within

    def _has_updated(self, optimizer: Any) -> None:
        self._updated = True
        self.turns.add(optimizer)

    def end_update(self, within: Any) -> None:
        if within is not None:
            self._updating -= 1
            within.__exit__(None, None, None)

    @contextmanager
    def scaled_update(self, optimizer: Any) -> Iterator[None]:
        """Count a scaler's step as an update, also if it skips its optimizer's."""
        updates, within = self._updates + 1, self.begin_update()
        try:
            yield
        finally:
            self.end_update(within)
        if within is not None and self._updates == updates:
            self._has_updated(getattr(optimizer, "original_optimizer", optimizer))
            self._skipped += self.counts

    def remarks(self) -> Iterator[str]:
        """Notes about the observed steps."""
        yield from self.notes
        if self.turns.heard > 1:
            yield f"optimizers take turns: a step is a round, of at most {self.turns.heard} turns"
        if skipped := self._skipped + sum(bool(infinite) for infinite in self._infinite):
            yield (
                f"updates that GradScaler skipped, for gradients that were inf or nan: {skipped}, "
                f"whose work the steps that count lack"
            )
        if self.evaluations:
            yield (
                f"{self.evaluations} calls of a model without gradients (as in evaluation) are in "
                f"{OUTSIDE!r}"
            )

    def close(self) -> None:
        """Stop watching; ends a step in which an optimizer has stepped."""
        if not self._closed:
            if self._updated and not self.by_hand:
                self._end_turn()
            self._closed = True
            set_current_step(None)
            self.undo.close()

    @property
    def started_processes(self) -> bool:
        """Whether this process has meanwhile started others, and waited for them."""
        return page_faults_of_children() > self._children

    def forget(self) -> None:
        """Stop recording: this process is a fork of the one that trains."""
        self._closed = True
        set_current_step(None)
        if self.counts:
            self.recorder.forked()


def page_faults_of_children() -> int:
    """A number that grows with each process that this one starts, once it has waited for it."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt
