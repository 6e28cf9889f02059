"""Anybody's training in this process: its steps and phases, found from outside.

PyTorch and Opacus are watched where every training loop passes (`dpbench.process.watched`): the
outermost module's call, ``backward``, clipping, noise, optimizers, batches. Forward lasts until
backward begins, so a loss is part of it. An optimizer's step is not yet the end of a training
step, for another optimizer, a scheduler or a log may follow: it ends where the next one begins, at
a batch, a forward or a backward after the last of those that take turns (`dpbench.process.turns`).
Steps follow each other without a gap; what belongs to no phase is outside: batches, logs, calls of
modules without gradients, as in evaluation.
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

from dpbench.case import OUTSIDE, Case
from dpbench.process.turns import MOST_TURNS, Turns
from dpbench.training.phases import OpenPhase, PhaseListener, Step, hear

_NOTHING = nullcontext()

MOST_STOPS = 20
"""How often a script that catches `Stop` is told to end, before it is left alone."""


class Stop(SystemExit):
    """Ends a script where its next step would begin, as if it had come to its end."""


class StepRecorder(PhaseListener, Protocol):
    """Hears the steps that count, in the process that takes them."""

    hears_warmup: bool
    """Whether it hears the steps of a case's warm-up, too."""

    def prepare(self) -> None:
        """Fail, or import what takes long, before this process holds its GPU."""

    @property
    def finished(self) -> bool:
        """Whether it has heard enough."""

    def record(self, case: Case) -> dict[str, Any]:
        """What was heard, as plain JSON types: seconds, bytes."""

    def close(self) -> None:
        """Let go of what it holds of this process: modes, counters."""

    def forked(self) -> None:
        """Let go of what a fork of this process has of it; counters are its parent's."""


class StepFinder:
    """Watches a training loop that knows nothing of it, in the thread that makes this.

    Args:
        recorder: hears the steps that count, all if it is never finished.
        skip: steps that come before them.
        go_on: whether the loop goes on when the recorder has finished; else `Stop` ends it.
        by_hand: whether `start_step` and `end_step` are called; then only phases are found.
        keep: is called after each step that counts.
    """

    def __init__(
        self,
        recorder: StepRecorder,
        *,
        skip: int = 0,
        go_on: bool = False,
        by_hand: bool = False,
        keep: Callable[[], object] = lambda: None,
    ) -> None:
        self.recorder, self.keep = recorder, keep
        self.skip, self.by_hand = skip, by_hand
        self.steps = 0  # that are over
        self.steps_elsewhere = 0  # of optimizers in other threads, which are not seen
        self.evaluations = 0  # calls of modules without gradients, within steps that count
        self.failure: Exception | None = None  # after it the recorder hears nothing any more
        self.notes: list[str] = []  # what a reader should know
        self.turns = Turns()
        self.settled = False  # in a module, a backward or a batch: modules begin nothing
        self.idle = True  # in no step that counts: only borders are looked for
        # In a step that does not count, before an optimizer has stepped: none can begin or end,
        # and watching costs nothing.
        self.quiet = False
        self.undo = ExitStack()  # what `close` takes back
        self._thread = threading.get_ident()
        self._children = page_faults_of_children()
        self._closed = False
        self._begun = False  # a step
        self._updated = False  # an optimizer has stepped: what begins next is another turn
        self._stopped = False
        self._stops = 0 if go_on else MOST_STOPS  # how often it is still told to end
        self._step = Step()
        self._forward: OpenPhase | None = None  # that of a module which has returned, maybe
        self._in_backward = False
        self._updating = 0  # optimizers' steps that are inside each other
        self._updates = 0  # optimizers' steps that have begun
        self._skipped = 0  # by scalers, in steps that count
        self._infinite: list[Any] = []  # whether they are, by optimizers that see to it themselves

    # --- steps -------------------------------------------------------------------------------

    def start_step(self) -> None:
        """A step begins; from here on its phases are heard, if it counts."""
        self._begun = True
        counts = self.steps >= self.skip and not (self.recorder.finished or self.failure)
        self._step = Step(self if counts else None)
        self.idle = self.quiet = not counts
        if counts:
            self._tell(self.recorder.start_step)
            hear(self._step)

    def end_step(self) -> None:
        """The step is over."""
        hear(None)
        if self._step.listener:
            self._tell(self.recorder.end_step)
            self._tell(self.keep)
        self.steps += 1
        self._step, self._forward, self.idle = Step(), None, True
        self._begun = self._updated = self.quiet = False

    def give_up_step(self) -> None:
        """The step did not come to its end; what is heard ends with the one before."""
        self.failure = self.failure or InterruptedError("a step did not end")
        self._step.listener = None
        self.end_step()

    def switch(self, phase: str) -> None:
        """Of a step that counts: see `PhaseListener`."""
        self._tell(self.recorder.switch, phase)

    def _tell(self, method: Callable[..., object], *phase: str) -> None:
        """Let the recorder hear something; its errors are not the script's."""
        if self.failure is None:
            try:
                method(*phase)
            except Exception as error:
                self.failure = error

    def _end_turn(self) -> None:
        """Optimizers have stepped; the training step is over if they were the last of a round."""
        self._updated, self.quiet = False, self.idle
        if not self.turns.over():
            return
        if self._step.listener is None:
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
        """Something begins that a step begins with; a closure's is inside its optimizer's step."""
        if self.by_hand or (self._updating and not self._stopped):
            return
        if self._updated:
            self._end_turn()
            self._stopped = self.recorder.finished or self.failure is not None
        if self._stopped:
            self._stops -= 1
            if self._stops >= 0:
                raise Stop(0)
            self.close()
        elif not self._begun:
            self.start_step()

    def begin(self, *, in_backward: bool) -> tuple[bool, bool] | None:
        """A batch, a backward or a module begins while no step that counts is under way.

        `end` takes what is returned; it is None if a step that counts has begun now, and in other
        threads than the loop's: see `within`.
        """
        if self._closed or threading.get_ident() != self._thread:
            return None
        if not self._in_backward:
            self._border()
            if not self.idle:
                return None
        before = self.settled, self._in_backward
        self.settled, self._in_backward = True, in_backward or self._in_backward
        return before

    def end(self, before: tuple[bool, bool]) -> None:
        """See `begin`."""
        self.settled, self._in_backward = before

    # --- phases ------------------------------------------------------------------------------

    def _hears(self) -> bool:
        """Whether this is the loop's thread, or one of those that autograd runs for it."""
        return not self._closed and (threading.get_ident() == self._thread or self._in_backward)

    @contextmanager
    def within(self, phase: str, *, begins: bool = False, resumes: bool = False) -> Iterator[None]:
        """A call that is in one phase; ``begins`` if a step may begin with it.

        Forward is over, unless the call ``resumes`` it: a gradient that the loss is made of.
        """
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
        self._in_backward = self._in_backward or phase == "backward"
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
        """A module is called; without gradients it is an evaluation."""
        import torch

        evaluation = None
        if self._step.phase != "forward":
            self._border()
            if torch.is_grad_enabled():
                self._forward = self._step.enter("forward")
            else:
                self.evaluations += self._step.listener is not None
                evaluation = self._step.enter(OUTSIDE) if self._step.phase != OUTSIDE else None
        step, self.settled = self._step, True
        try:
            yield
        finally:
            self.settled = False
            if evaluation:
                step.leave(evaluation)

    def begin_update(self, optimizer: Any = None) -> Any:
        """An optimizer's step begins; Opacus's and scalers' are none, if no other is inside."""
        if not self._hears():
            self.steps_elsewhere += optimizer is not None and not self._closed
            return None
        again = optimizer in self.turns.stepped or not self._begun
        if again and not (self._updating or self._in_backward):
            self._border()  # nothing was called since its last step: its closure does that
        within = _NOTHING if self.idle else self.within("optimizer")
        within.__enter__()
        self._updating += 1
        self._updates += 1
        if optimizer is not None:
            self._has_updated(optimizer)
            if (
                self._step.listener
                and (infinite := getattr(optimizer, "found_inf", None)) is not None
            ):
                self._infinite.append(infinite)
        return within

    def _has_updated(self, optimizer: Any) -> None:
        self._updated, self.quiet = True, False
        self.turns.add(optimizer)

    def end_update(self, within: Any) -> None:
        if within is not None:
            self._updating -= 1
            within.__exit__(None, None, None)

    @contextmanager
    def scaled_update(self, optimizer: Any) -> Iterator[None]:
        """A scaler's step, which is one of a training loop even if it makes none."""
        updates, within = self._updates + 1, self.begin_update()
        try:
            yield
        finally:
            self.end_update(within)
        if within is not None and self._updates == updates:
            self._has_updated(getattr(optimizer, "original_optimizer", optimizer))
            self._skipped += self._step.listener is not None

    # --- the end -----------------------------------------------------------------------------

    def remarks(self) -> Iterator[str]:
        """What a reader of the steps that count should know."""
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
        """Watch no longer; a step that an optimizer has made is over."""
        if not self._closed:
            if self._updated and not self.by_hand:
                self._end_turn()
            self._closed = True
            hear(None)
            self.undo.close()

    @property
    def started_processes(self) -> bool:
        """Whether this process has meanwhile started others, and waited for them."""
        return page_faults_of_children() > self._children

    def forget(self) -> None:
        """Hear nothing more: this process is a fork of the one that trains."""
        self._closed = True
        hear(None)
        if self._step.listener:
            self.recorder.forked()


def page_faults_of_children() -> int:
    """A number that grows with each process that this one starts, once it has waited for it."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt
