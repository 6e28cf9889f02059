"""Finds the steps and phases of an unmodified training loop in this process.

`dpbench.child.patches` wraps functions that training loops call: the calls of modules, the
backward, clipping, noise, optimizers' steps and the fetching of batches. The forward phase lasts
until the backward begins, so it contains the loss. A training step ends where the next training
step begins: at the first fetching of a batch, forward or backward after the last optimizer has
stepped (`AlternatingOptimizers`). It does not end with the optimizer's step, because another
optimizer, a scheduler or logging may follow. Evaluation and the fetching of batches are outside
every phase.

A turn consists of a forward, a backward and the steps of one or more optimizers. Most loops take
one turn in a training step. GANs and actor-critic methods train several models in turn, and may
train one model several times in a training step. Batches do not mark the end of such a step,
because each turn may fetch its own batch. So a training step begins with a turn of the optimizer
that stepped first in the loop, and lasts until all optimizers have stepped. Further turns of other
optimizers belong to the same training step. The number of further turns is learned from earlier
training steps.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any
from weakref import WeakSet, ref

from dpbench.child.recorder import Calls, Recorder
from dpbench.core.case import OUTSIDE
from dpbench.core.errors import ConfigurationError
from dpbench.results.kernels import POISSON
from dpbench.training.phases import OpenPhase, Step, set_current_step

MOST_TURNS = 12
"""After this many turns, optimizers that have not stepped are ignored."""


class Stop(SystemExit):
    """Exception that ends a script where its next training step would begin, with exit status 0.

    A script that catches this exception continues, and is no longer observed.
    """


IGNORED = Calls()


class StepFinder:
    """Finds the steps and phases of the training loop in the thread that creates the finder.

    Args:
        recorder: observes steps until the recorder has finished.
        skip: number of first steps that are not observed.
        go_on: whether the loop continues after the recorder has finished. Otherwise, `Stop` ends
            the loop.
        by_hand: whether the caller calls `start_step` and `end_step`. If so, only phases are found.
        keep: function that is called after each observed step.

    Attributes:
        steps: number of ended steps.
        evaluations: number of calls of modules with gradients disabled, in observed steps.
        poisson: whether a data loader has a sampler of Poisson batches.
        failure: the error that ended the recording, if any. Afterwards the recorder is not called.
        notes: notes for readers of the measured numbers.
        labels: where the noise of `make_private` is, if it is in no phase of its own.
        turns: the optimizers and their turns in the training step, see `AlternatingOptimizers`.
        inside: whether the loop is inside a module's call, a backward or the fetching of a batch,
            where no step begins.
        undo: undoes the wrapping of functions when the finder is closed.
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
        self.steps = 0
        self.evaluations = 0
        self.poisson = False
        self._fetched = defaultdict[int, list[int | None]](list)  # sizes of batches, by step
        self.failure: Exception | None = None
        self.notes: list[str] = []
        self.labels: dict[str, str] = {}
        self.turns = AlternatingOptimizers()
        self.inside = False
        self.undo = ExitStack()
        self._thread = threading.get_ident()
        self._closed = False
        self._begun = False  # whether a step has begun
        self._updated = False  # whether an optimizer has stepped in this turn
        self._step = Step()
        self._forward: OpenPhase | None = None  # lasts until the backward, not only for the call
        self._in_backward = False
        self._updating = 0  # depth of nested calls of optimizers' steps
        self._updates = 0  # number of optimizers' steps that have begun
        self._skipped = 0  # number of updates that scalers skipped in observed steps
        # Tensors ``found_inf`` of optimizers that skip updates themselves, in observed steps.
        self._infinite: list[Any] = []

    # --- steps -------------------------------------------------------------------------------

    def start_step(self) -> None:
        """Begin a step. The first ``skip`` steps are not recorded."""
        self._begun = True
        counts = self.steps >= self.skip and not (self.recorder.finished or self.failure)
        self._step, self._forward = Step(self if counts else None), None
        if counts:
            self._tell(self.recorder.start_step)
            set_current_step(self._step)

    def end_step(self) -> None:
        """End the current step."""
        set_current_step(None)
        if self.counts:
            self._tell(self.recorder.end_step)
            self._tell(self.keep)
        self.steps += 1
        self._step, self._forward = Step(), None
        self._begun = self._updated = False

    def give_up_step(self) -> None:
        """Discard the current step, and stop recording."""
        self.failure = self.failure or InterruptedError("a step began but did not end")
        self._step.listener = None
        self.end_step()

    def switch(self, phase: str) -> None:
        """Tell the recorder that a new phase begins. Only observed steps call this method."""
        self._tell(self.recorder.switch, phase)

    def _tell(self, method: Callable[..., object], *arguments: Any) -> None:
        """Call a method of the recorder. If the method raises, only the recording ends."""
        if self.failure is None:
            try:
                method(*arguments)
            except Exception as error:
                self.failure = error

    def _end_turn(self) -> None:
        """End the current turn, and end the training step if the step is complete."""
        self._updated = False
        if not self.turns.end_turn():
            return
        if not self.counts:
            steps = self.turns.begin_step()
            if steps > 1:
                self.notes.append(
                    f"an optimizer is ignored, because it did not step in {MOST_TURNS} turns of "
                    f"other optimizers"
                )
            self.steps += steps - 1
            self.end_step()
        elif self.turns.is_complete_round or not self.calls.compares_steps:
            self.turns.most_turns = max(self.turns.most_turns, self.turns.turns_taken)
            self.turns.begin_step()
            self.end_step()
        else:
            self.failure = RuntimeError(
                f"the turns of the optimizers in step {self.steps + 1} differ from those in "
                f"earlier steps: choose --skip and --steps so that this step does not count"
            )
            self.give_up_step()

    def _maybe_begin_step(self) -> None:
        """End the last step if it is complete, and begin the next step if none is under way.

        Nothing happens in inference mode, where recorders must not begin or end: the end of
        inference mode restores the dispatch modes that were active before it.
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

    def report(self, method: Callable[..., object], *arguments: Any) -> None:
        """Tell the recorder of the loop's calls, and ignore calls that the recorder makes."""
        if self._is_loop_thread():
            self._closed = True
            self._tell(method, *arguments)
            self._closed = False

    @property
    def counts(self) -> bool:
        """True if a recorded step is under way."""
        return self._step.listener is not None

    @property
    def calls(self) -> Calls:
        """The object to which the loop's calls are reported at the moment."""
        return self.recorder.calls if self.counts else IGNORED

    # --- phases ------------------------------------------------------------------------------

    def _is_loop_thread(self) -> bool:
        """Return True in the loop's thread or during backward, unless the finder is closed."""
        return not self._closed and (threading.get_ident() == self._thread or self._in_backward)

    @contextmanager
    def within(self, phase: str, *, begins: bool = False, resumes: bool = False) -> Iterator[None]:
        """Mark the phase of a call.

        Args:
            phase: the phase that lasts during the call.
            begins: whether the call may begin a step.
            resumes: whether an open forward phase continues after the call.
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
        """Return True if a call of a module is a forward or an evaluation.

        The loop itself must call the module, and the module must have parameters. Most modules that
        compute a loss have no parameters.
        """
        return (
            not (self._closed or self._in_backward)
            and threading.get_ident() == self._thread
            and self._step.phase in (OUTSIDE, "forward", "optimizer")
            and next(module.parameters(), None) is not None
        )

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Mark a module's call as forward, or as an evaluation if gradients are disabled."""
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

    def begin_private(self, trainer: Any) -> None:
        """Begin a step, if none has begun, with a batch that a `FusedTrainer` clips."""
        if self._is_loop_thread() and not (self.inside or self._in_backward):
            self._maybe_begin_step()
        self.labels = {name: of for name, of in trainer.labels.items() if name == "noise"}
        self.report(self.calls.begin_private, trainer)

    def begin_update(self, optimizer: Any = None, private: Sequence[Any] = ()) -> Any:
        """Begin an optimizer's step.

        Args:
            optimizer: the optimizer; None if a wrapper of the optimizer steps, which is Opacus's
                optimizer or a GradScaler.
            private: an optimizer that hands private gradients over, as Opacus's does, and a
                function that takes its step once more; or the arguments of
                `Calls.private_step` of a `FusedTrainer`; empty if another optimizer steps.

        Returns:
            A value to pass to `end_update`.
        """
        if not self._is_loop_thread():
            return None
        again = optimizer in self.turns.stepped or not self._begun
        if again and not (self._updating or self._in_backward):
            # The loop has called nothing since the last update, so a closure may call the model.
            self._maybe_begin_step()
        within = self.within("optimizer")
        within.__enter__()
        self._updating += 1
        self._updates += 1
        if private:
            self.report(self.calls.private_step, *private)
        if optimizer is not None:
            self.report(self.calls.update, optimizer)
            self.has_updated(optimizer)
            infinite = getattr(optimizer, "found_inf", None)
            if self.counts and infinite is not None:
                self._infinite.append(infinite)
        return within

    def has_updated(self, optimizer: Any) -> None:
        """Record that an optimizer has stepped, or that its step was replaced."""
        self._updated = True
        self.turns.add(optimizer)

    def end_update(self, within: Any) -> None:
        if within is not None:
            self._updating -= 1
            within.__exit__(None, None, None)

    @contextmanager
    def scaled_update(self, optimizer: Any) -> Iterator[None]:
        """Count a GradScaler's step as an update, even if the scaler skips the optimizer's step."""
        updates, within = self._updates + 1, self.begin_update()
        try:
            yield
        finally:
            self.end_update(within)
        if within is not None and self._updates == updates:
            self.has_updated(getattr(optimizer, "original_optimizer", optimizer))
            self._skipped += self.counts

    def fetched(self, batch: Any) -> None:
        """Record the size of a batch that a data loader yielded for training, None if unknown."""
        import torch

        from dpbench.workloads.base import examples_in

        if self.recorder.finished or not (self._is_loop_thread() and torch.is_grad_enabled()):
            return
        try:
            size = examples_in(dict(batch) if isinstance(batch, Mapping) else batch)
        except ConfigurationError:
            size = None
        self._fetched[self.steps].append(size)

    @property
    def examples(self) -> tuple[int, ...]:
        """The number of examples in each observed step, or empty if it is unknown.

        It is known only if each step so far, observed or not, fetched equally many batches: a loop
        that fetches batches ahead of their steps fetches more of them in its first step.
        """
        last = self.skip + self.recorder.observed
        steps = [self._fetched.get(number, []) for number in range(last)]
        if len({len(sizes) for sizes in steps}) != 1 or None in chain(*steps):
            return ()
        return tuple(sum(filter(None, sizes)) for sizes in steps[self.skip :] if sizes)

    def remarks(self) -> Iterator[str]:
        """Yield notes about the observed steps."""
        yield from self.notes
        if self.poisson:
            yield POISSON
        if self.turns.most_turns > 1:
            most = self.turns.most_turns
            yield f"optimizers take turns: a counted step contains at most {most} of their turns"
        if skipped := self._skipped + sum(bool(infinite) for infinite in self._infinite):
            yield (
                f"GradScaler skipped {skipped} updates in counted steps because gradients were inf "
                f"or nan, so the work of these updates is missing"
            )
        if self.evaluations:
            yield (
                f"{self.evaluations} calls of a model without gradients (as in evaluation) count "
                f"as {OUTSIDE!r}"
            )

    def close(self) -> None:
        """Stop observing, and end the last step if an optimizer has stepped in it."""
        if not self._closed:
            if self._updated and not self.by_hand:
                self._end_turn()
            self._closed = True
            set_current_step(None)
            self.undo.close()

    def forget(self) -> None:
        """Stop recording in a fork of the training process, because forks do not train."""
        self._closed = True
        set_current_step(None)
        if self.counts:
            self.recorder.forked()


class AlternatingOptimizers:
    """Tracks the optimizers of a loop, and which of them have stepped in this training step.

    Attributes:
        awaited: the optimizers that are expected to step in each training step.
        stepped: the optimizers that have stepped in this training step.
        turns_taken: number of turns in this training step.
        most_turns: the largest number of turns in a counted training step.
    """

    def __init__(self) -> None:
        self.awaited: WeakSet[Any] = WeakSet()
        self.stepped: WeakSet[Any] = WeakSet()
        self.turns_taken = 0
        self.most_turns = 0
        self._first: ref[Any] | None = None  # the optimizer that begins training steps
        self._stepped_now: list[ref[Any]] = []  # the optimizers that stepped in this turn
        # Number of turns at whose end all awaited optimizers had stepped in this training step.
        self._turns_since_all = 0
        self._extra_turns = 0  # expected number of turns after all optimizers have stepped
        # For each turn that was found to belong to the previous training step, its optimizers.
        self._late_turns: list[WeakSet[Any]] = []
        self._first_began = True  # whether `_first` stepped in the first turn
        self._all_stepped = False  # whether all awaited optimizers have stepped
        self._only_awaited = True  # whether only awaited optimizers stepped

    def add(self, optimizer: Any) -> None:
        """Record that an optimizer has stepped in the current turn."""
        self.stepped.add(optimizer)
        self._stepped_now.append(ref(optimizer))
        self._all_stepped = self.awaited <= self.stepped
        self._only_awaited = self._only_awaited and optimizer in self.awaited

    def end_turn(self) -> bool:
        """End a turn. Return True if the training step ended with this turn or before it."""
        self.turns_taken += 1
        self._turns_since_all += self._all_stepped
        if self.turns_taken == 1 and (self._first is None or self._first() is None):
            self._first = self._stepped_now[0]  # no optimizer is known to begin steps
        begins = self._first in self._stepped_now
        self._stepped_now = []
        if self.turns_taken == 1:
            self._first_began = begins
        elif begins and self._turns_since_all > 1:  # this turn begins the next training step
            self._extra_turns, self._only_awaited = 0, False
            return True
        if self._all_stepped:
            enough = self._turns_since_all > self._extra_turns
        else:
            enough = self.turns_taken >= MOST_TURNS
        return enough or not self._first_began

    @property
    def is_complete_round(self) -> bool:
        """True if exactly the awaited optimizers stepped, with `_first` in the first turn."""
        return self._first_began and self._all_stepped and self._only_awaited

    def begin_step(self) -> int:
        """Begin the next training step.

        Returns:
            The number of training steps that have ended. It is 0 if the latest turn still belongs
            to the previous training step. It is more than 1 if an awaited optimizer has not stepped
            for `MOST_TURNS` turns, because each of these turns then counts as a training step.
        """
        steps = 1
        if not self._first_began:
            steps, self._extra_turns = 0, self._extra_turns + 1
            self._late_turns.append(self.stepped)
            self.awaited |= self.stepped
            if len(self._late_turns) == MOST_TURNS:  # `_first` no longer steps
                steps, self._first = MOST_TURNS, None
                self.awaited = WeakSet(each for turn in self._late_turns for each in turn)
        elif not self._all_stepped:  # no longer await the optimizers that did not step
            steps, self.awaited = self.turns_taken, WeakSet(self.stepped)
        if steps:
            self._late_turns = []
        if steps > 1:
            self._extra_turns = 0
        self.stepped, self._only_awaited = WeakSet(), True
        self.turns_taken = self._turns_since_all = 0
        return steps
