"""Finds the end of a training step in which several optimizers take turns.

A turn consists of a forward, a backward and the steps of one or more optimizers. Most loops take
one turn in a training step. GANs and actor-critic methods train several models in turn, and may
train one model several times in a training step. Batches do not mark the end of such a step,
because each turn may fetch its own batch. So a training step begins with a turn of the optimizer
that stepped first in the loop, and lasts until all optimizers have stepped. Further turns of other
optimizers belong to the same training step. The number of further turns is learned from earlier
training steps.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet, ref

MOST_TURNS = 12
"""After this many turns, optimizers that have not stepped are ignored."""


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
