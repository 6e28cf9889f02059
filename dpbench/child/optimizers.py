"""Which optimizers step in a training step: one, several at once, or several in turn.

GANs and actor-critic methods train models in turn, each of them maybe more often than once. Batches
do not mark its end, because each turn may take its own. An iteration begins with the optimizer that
stepped first, and lasts until all have stepped. Later turns of optimizers other than the first
still belong to it; earlier iterations tell how many such turns there are.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet, ref

MOST_TURNS = 12
"""An optimizer that has not stepped in so many turns no longer takes part."""


class AlternatingOptimizers:
    """The optimizers of a training loop, and which of them have stepped in this training step."""

    def __init__(self) -> None:
        self.awaited: WeakSet[Any] = WeakSet()  # those that step in each training step
        self.stepped: WeakSet[Any] = WeakSet()
        self.taken = 0  # turns since the step began, each of one or more optimizers
        self.heard = 0  # the most turns of any counted step
        self._first: ref[Any] | None = None  # the optimizer that begins steps
        self._turn: list[ref[Any]] = []  # the optimizers of this turn
        self._after = 0  # turns from the one in which all had stepped
        self._more = 0  # turns of a step after all have stepped
        self._late: list[WeakSet[Any]] = []  # consecutive turns that belonged to an earlier step
        self._began = True  # the first one stepped in the first turn
        self._whole = False  # all awaited ones have stepped
        self._known = True  # and no others

    def add(self, optimizer: Any) -> None:
        """Note that an optimizer has stepped."""
        self.stepped.add(optimizer)
        self._turn.append(ref(optimizer))
        self._whole = self.awaited <= self.stepped
        self._known = self._known and optimizer in self.awaited

    def over(self) -> bool:
        """End a turn; returns whether the training step has ended with it, or before it."""
        self.taken += 1
        self._after += self._whole
        if self.taken == 1 and (self._first is None or self._first() is None):
            self._first = self._turn[0]  # the loop has begun, or has dropped the last one
        begins = self._first in self._turn
        self._turn = []
        if self.taken == 1:
            self._began = begins
        elif begins and self._after > 1:  # the next step has begun
            self._more, self._known = 0, False
            return True
        enough = self._after > self._more if self._whole else self.taken >= MOST_TURNS
        return enough or not self._began

    @property
    def is_round(self) -> bool:
        """Whether exactly the awaited optimizers have stepped, beginning with the first."""
        return self._began and self._whole and self._known

    def start(self) -> int:
        """Begin the next training step.

        Returns:
            How many steps the last one counts as: 0 if it belongs to the one before it, more than 1
            if an awaited optimizer did not step.
        """
        steps = 1
        if not self._began:
            steps, self._more = 0, self._more + 1
            self._late.append(self.stepped)
            self.awaited |= self.stepped
            if len(self._late) == MOST_TURNS:  # the first one no longer steps
                steps, self._first = MOST_TURNS, None
                self.awaited = WeakSet(each for turn in self._late for each in turn)
        elif not self._whole:  # the others did not step
            steps, self.awaited = self.taken, WeakSet(self.stepped)
        if steps:
            self._late = []
        if steps > 1:
            self._more = 0
        self.stepped, self.taken, self._after, self._known = WeakSet(), 0, 0, True
        return steps
