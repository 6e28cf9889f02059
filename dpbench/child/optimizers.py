"""Which optimizers step in a training step: one, several at once, or several in turn.

GANs and actor-critic methods train models in turn, each of them maybe more often than once. No
batch tells where such an iteration ends, for each turn may take its own. It lies between updates
of the optimizer that stepped first: it is over once all optimizers have stepped, and what steps
after that and is not the first belongs to it, too. How many turns those are is known from the
iterations before.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet, ref

MOST_TURNS = 12
"""An optimizer that has not stepped in so many turns no longer takes part."""


class AlternatingOptimizers:
    """The optimizers of a training loop, and which of them have stepped in this training step."""

    def __init__(self) -> None:
        self.awaited: WeakSet[Any] = WeakSet()  # which step in each training step
        self.stepped: WeakSet[Any] = WeakSet()
        self.taken = 0  # turns since the step began, each of one optimizer or several at once
        self.heard = 0  # the most turns that a step had which counts
        self._first: ref[Any] | None = None  # the optimizer with which steps begin
        self._turn: list[ref[Any]] = []  # the optimizers of this turn
        self._after = 0  # turns since all have stepped, and the one in which they had
        self._more = 0  # turns of a step after all have stepped
        self._late: list[WeakSet[Any]] = []  # the turns, in a row, that belonged to a step before
        self._began = True  # the first one stepped in the first turn
        self._whole = False  # all that were awaited have stepped
        self._known = True  # and none else

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
            As how many steps the last one counts: none if it belongs to the one before it, more
            than 1 if an awaited optimizer did not step.
        """
        steps = 1
        if not self._began:
            steps, self._more = 0, self._more + 1
            self._late.append(self.stepped)
            self.awaited |= self.stepped
            if len(self._late) == MOST_TURNS:  # the first one steps no more
                steps, self._first = MOST_TURNS, None
                self.awaited = WeakSet(each for turn in self._late for each in turn)
        elif not self._whole:  # the others were awaited in vain
            steps, self.awaited = self.taken, WeakSet(self.stepped)
        if steps:
            self._late = []
        if steps > 1:
            self._more = 0
        self.stepped, self.taken, self._after, self._known = WeakSet(), 0, 0, True
        return steps
