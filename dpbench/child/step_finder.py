"""Finds the steps and phases of an unmodified training loop in this process.

Functions that every training loop calls are wrapped (`dpbench.child.patches`): the outermost
module's call, ``backward``, clipping, noise, optimizers, batches. Forward lasts until backward
begins, so it contains the loss. A training step ends where the next one begins: at the first batch,
forward or backward after the last optimizer that takes turns (`dpbench.child.optimizers`). It does
not end with an optimizer's step, because another optimizer, a scheduler or a log may follow. All
other work is outside every phase: batches, logs, evaluation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from dpbench.child.optimizers import MOST_TURNS, AlternatingOptimizers
from dpbench.child.recorder import Calls, Recorder
from dpbench.core.case import OUTSIDE
from dpbench.training.phases import OpenPhase, Step, set_current_step


class Stop(SystemExit):
    """Ends a script where its next step would begin, with exit code 0.

    A script that catches it goes on unobserved.
    """


IGNORED = Calls()


class StepFinder:
    """Finds the steps and phases of a training loop that runs in the thread that creates this.

    Args:
        recorder: observes steps until it has finished.
        skip: the number of first steps that are not observed.
        go_on: whether the loop continues after the recorder has finished; otherwise `Stop` ends it.
        by_hand: whether the caller calls `start_step` and `end_step`; then only phases are found.
        keep: called after each observed step.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        skip: int = 0,
        go_on: bool = False,
        by_hand: bool = False,
        keep: Callable[[], object] = lambda: None,
    ) -> None:
        self.recorder, self.keep = recorder, keep
        self.skip, self.go_on, self.by_hand = skip, go_on, by_hand
        self.steps = 0  # that have ended
        self.evaluations = 0  # calls of modules without gradients, in counted steps
        self.failure: Exception | None = None  # once set, the recorder is not called again
        self.notes: list[str] = []  # for the reader of the numbers
        self.turns = AlternatingOptimizers()
        self.inside = False  # inside a module, backward or batch, where no step begins
        self.undo = ExitStack()  # run by `close`
        self._thread = threading.get_ident()
        self._closed = False
        self._begun = False  # whether a step has begun
        self._updated = False  # an optimizer has stepped, so the next call begins a new turn
        self._step = Step()
        self._forward: OpenPhase | None = None  # may outlast the module's call
        self._in_backward = False
        self._updating = 0  # depth of nested optimizers' steps
        self._updates = 0  # number of begun steps of optimizers
        self._skipped = 0  # optimizer steps that scalers skipped, in counted steps
        self._infinite: list[Any] = []  # found_inf of optimizers that skip steps themselves

    # --- steps -------------------------------------------------------------------------------

    def start_step(self) -> None:
        """Begin a step; it is recorded unless it is one of the skipped ones."""
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
        """Abandon a step that did not end, and record nothing more."""
        self.failure = self.failure or InterruptedError("a step did not end")
        self._step.listener = None
        self.end_step()

    def switch(self, phase: str) -> None:
        """See `dpbench.training.phases.PhaseListener`; called in observed steps only."""
        self._tell(self.recorder.switch, phase)

    def _tell(self, method: Callable[..., object], *given: Any) -> None:
        """Call the recorder; if it raises, the recording ends and the script goes on."""
        if self.failure is None:
            try:
                method(*given)
            except Exception as error:
                self.failure = error

    def _end_turn(self) -> None:
        """End the training step if all optimizers that take turns have stepped."""
        self._updated = False
        if not self.turns.end_turn():
            return
        if not self.counts:
            steps = self.turns.start()
            if steps > 1:
                self.notes.append(
                    f"an optimizer did not step in {MOST_TURNS} turns of others: it is ignored"
                )
            self.steps += steps - 1
            self.end_step()
        elif self.turns.is_round:
            self.turns.most = max(self.turns.most, self.turns.taken)
            self.turns.start()
            self.end_step()
        else:
            self.failure = RuntimeError(
                f"other optimizers step in step {self.steps + 1} than in the steps before it: "
                f"choose --skip and --steps so that it does not count"
            )
            self.give_up_step()

    def _maybe_begin_step(self) -> None:
        """At a call that may begin a step, end the last step if it is complete, and begin one.

        Do nothing in inference mode: its end would undo a dispatch mode begun or ended inside.
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
        """The object to which calls are reported now."""
        return self.recorder.calls if self.counts else IGNORED

    # --- phases ------------------------------------------------------------------------------

    def _is_loop_thread(self) -> bool:
        """Whether this is the loop's thread, or any thread in backward: autograd has its own."""
        return not self._closed and (threading.get_ident() == self._thread or self._in_backward)

    @contextmanager
    def within(self, phase: str, *, begins: bool = False, resumes: bool = False) -> Iterator[None]:
        """Mark the phase of a call.

        With ``begins`` the call may begin a step; with ``resumes`` open forwards go on after it.
        """
        if not self._is_loop_thread():
            yield
            return
        if begins and not self._in_backward:
            self._maybe_begin_step()
        step, before = self._step, (self.inside, self._in_backward)
        if self._forward and not self.inside:
            step.leave(self._forward)
            self._forward = None
        else:
            resumes = False
        entered = step.enter(phase) if phase != step.phase else None
        self.inside = self.inside or begins
        if phase == "backward" and not self._in_backward:
            self._in_backward = True
            self._tell(self.calls.backward)
        try:
            yield
        finally:
            self.inside, self._in_backward = before
            if entered:
                step.leave(entered)
            if resumes:
                self._forward = step.enter("forward")

    def begins_forward(self, module: Any) -> bool:
        """Whether the loop itself calls a module; ones without parameters (losses) do not count."""
        return (
            not (self._closed or self._in_backward)
            and threading.get_ident() == self._thread
            and self._step.phase in (OUTSIDE, "forward", "optimizer")
            and next(module.parameters(), None) is not None
        )

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Mark a module's call as forward; if gradients are off, as an evaluation."""
        import torch

        evaluation = None
        if self._step.phase != "forward":
            self._maybe_begin_step()
            if torch.is_grad_enabled():
                self._forward = self._step.enter("forward")
            else:
                self.evaluations += self.counts
                evaluation = self._step.enter(OUTSIDE) if self._step.phase != OUTSIDE else None
        step, self.inside = self._step, True
        try:
            yield
        finally:
            self.inside = False
            if evaluation:
                step.leave(evaluation)

    def begin_update(self, optimizer: Any = None, outer: Any = None) -> Any:
        """Begin an optimizer's step.

        Args:
            optimizer: None for a wrapper's step, Opacus's or a scaler's, which calls an optimizer.
            outer: the wrapper, if it is Opacus's.
        """
        if not self._is_loop_thread():
            return None
        again = optimizer in self.turns.stepped or not self._begun
        if again and not (self._updating or self._in_backward):
            self._maybe_begin_step()  # no call between steps: a closure calls the model
        within = self.within("optimizer")
        within.__enter__()
        self._updating += 1
        self._updates += 1
        self._closed = True  # ignore calls that the recorder makes
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
        """Count a scaler's step as an update, even if it skips the optimizer's."""
        updates, within = self._updates + 1, self.begin_update()
        try:
            yield
        finally:
            self.end_update(within)
        if within is not None and self._updates == updates:
            self._has_updated(getattr(optimizer, "original_optimizer", optimizer))
            self._skipped += self.counts

    def remarks(self) -> Iterator[str]:
        """Yield notes about the observed steps."""
        yield from self.notes
        if self.turns.most > 1:
            yield f"optimizers take turns: a step is a round, of at most {self.turns.most} turns"
        if skipped := self._skipped + sum(bool(infinite) for infinite in self._infinite):
            yield (
                f"updates that GradScaler skipped because gradients were inf or nan: {skipped}; "
                f"the steps that count lack their work"
            )
        if self.evaluations:
            yield (
                f"{self.evaluations} calls of a model without gradients (as in evaluation) are in "
                f"{OUTSIDE!r}"
            )

    def close(self) -> None:
        """Stop watching; end the last step if an optimizer has stepped in it."""
        if not self._closed:
            if self._updated and not self.by_hand:
                self._end_turn()
            self._closed = True
            set_current_step(None)
            self.undo.close()

    def forget(self) -> None:
        """Stop recording in this process, a fork of the one that trains."""
        self._closed = True
        set_current_step(None)
        if self.counts:
            self.recorder.forked()
