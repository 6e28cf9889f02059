"""Which optimizers step in a training step: one, several at once, or several in turn.

GANs and actor-critic methods train models in turn, one of them maybe more often. No batch tells
where such an iteration ends, for each turn may take its own; that all optimizers have stepped does.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

MOST_TURNS = 12
"""An optimizer that has not stepped in so many turns no longer takes part."""


class Turns:
    """The optimizers of a training loop, and which of them have stepped in this training step."""

    def __init__(self) -> None:
        self.awaited: WeakSet[Any] = WeakSet()  # which step in each training step
        self.stepped: WeakSet[Any] = WeakSet()
        self.taken = 0  # turns since the step began, each of one optimizer or several at once
        self.heard = 0  # the most turns that a step had which counts
        self._whole = False  # all that were awaited have stepped
        self._known = True  # and none else

    def add(self, optimizer: Any) -> None:
        """Note that an optimizer has stepped."""
        self.stepped.add(optimizer)
        self._whole = self.awaited <= self.stepped
        self._known = self._known and optimizer in self.awaited

    def over(self) -> bool:
        """End a turn; returns whether the training step has ended with it."""
        self.taken += 1
        return self._whole or self.taken >= MOST_TURNS

    @property
    def is_round(self) -> bool:
        """Whether exactly the awaited optimizers have stepped."""
        return self._whole and self._known

    def start(self) -> int:
        """Begin the next training step.

        Returns:
            As how many steps the last one counts: more than 1 if an awaited optimizer did not step.
        """
        steps = 1
        if not self._whole:  # the others were awaited in vain
            steps, self.awaited = self.taken, WeakSet(self.stepped)
        self.stepped, self.taken, self._known = WeakSet(), 0, True
        return steps
