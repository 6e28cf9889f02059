"""Which optimizers step in a training step: one, several at once, or several in turn.

GANs and actor-critic methods train models in turn, one of them maybe more often. No batch tells
where such an iteration ends, for each turn may take its own; that all optimizers have stepped does.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

MOST_TURNS = 12
"""After as many turns without it an optimizer does not take part, or no longer."""


class Turns:
    """The optimizers that there are, and those which have stepped since the training step began."""

    def __init__(self) -> None:
        self.awaited: WeakSet[Any] = WeakSet()  # which step in each training step
        self.stepped: WeakSet[Any] = WeakSet()
        self.taken = 0  # turns since the step began, each of one optimizer or several at once
        self.heard = 0  # the most turns that a step had which counts
        self._whole = False  # all that were awaited have stepped
        self._known = True  # and none else

    def add(self, optimizer: Any) -> None:
        """An optimizer has stepped; those that are made later are awaited in the next step."""
        self.stepped.add(optimizer)
        self._whole = self.awaited <= self.stepped
        self._known = self._known and optimizer in self.awaited

    def over(self) -> bool:
        """A turn is; returns whether the training step is, too."""
        self.taken += 1
        return self._whole or self.taken >= MOST_TURNS

    @property
    def is_round(self) -> bool:
        """Whether those and only those have stepped that were awaited."""
        return self._whole and self._known

    def start(self) -> int:
        """The next training step begins; returns how many the last was, if it was no round."""
        steps = 1
        if not self._whole:  # the others were awaited in vain
            steps, self.awaited = self.taken, WeakSet(self.stepped)
        self.stepped, self.taken, self._known = WeakSet(), 0, True
        return steps
