"""Finds which optimizers belong to a training step: one, several at once, or several in turn.

GANs and actor-critic methods train models in turn, and may train one several times per training
step. Batches do not mark the end of the step, because each turn may take its own batch. A training
step begins with the optimizer that stepped first in the loop, and lasts until all have stepped.
Further turns of optimizers other than the first still belong to it. Their number is known from
earlier training steps.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet, ref

MOST_TURNS = 12
"""An optimizer that has not stepped for this many turns is ignored."""


class AlternatingOptimizers:
    """Tracks the optimizers of a loop, and which of them have stepped in this training step."""

    def __init__(self) -> None:
        self.awaited: WeakSet[Any] = WeakSet()  # optimizers expected in each training step
        self.stepped: WeakSet[Any] = WeakSet()
        self.taken = 0  # turns since the training step began
        self.most = 0  # most turns of any counted step
        self._first: ref[Any] | None = None  # the optimizer that begins training steps
        self._turn: list[ref[Any]] = []  # the optimizers of this turn
        self._after = 0  # turns since the last of them stepped, counting that turn
        self._more = 0  # expected turns after the one in which all have stepped
        self._late: list[
            WeakSet[Any]
        ] = []  # by late turn in a row (of an earlier step): optimizers
        self._began = True  # whether `_first` stepped in the first turn
        self._whole = False  # whether all awaited ones have stepped
        self._known = True  # whether only awaited ones have stepped

    def add(self, optimizer: Any) -> None:
        """Note that an optimizer has stepped."""
        self.stepped.add(optimizer)
        self._turn.append(ref(optimizer))
        self._whole = self.awaited <= self.stepped
        self._known = self._known and optimizer in self.awaited

    def end_turn(self) -> bool:
        """End a turn; return whether the training step ended with this turn or before it."""
        self.taken += 1
        self._after += self._whole
        if self.taken == 1 and (self._first is None or self._first() is None):
            self._first = self._turn[0]  # the loop has begun, or its first optimizer is gone
        begins = self._first in self._turn
        self._turn = []
        if self.taken == 1:
            self._began = begins
        elif begins and self._after > 1:  # this turn begins the next training step
            self._more, self._known = 0, False
            return True
        enough = self._after > self._more if self._whole else self.taken >= MOST_TURNS
        return enough or not self._began

    @property
    def is_round(self) -> bool:
        """Whether all awaited optimizers and no others stepped, with `_first` in the first turn."""
        return self._began and self._whole and self._known

    def start(self) -> int:
        """Begin the next training step.

        Returns:
            How many steps the ended one counts as: 0 if its turn belongs to the step before; more
            than 1 if an awaited optimizer did not step, since then each turn counts.
        """
        steps = 1
        if not self._began:
            steps, self._more = 0, self._more + 1
            self._late.append(self.stepped)
            self.awaited |= self.stepped
            if len(self._late) == MOST_TURNS:  # `_first` no longer steps
                steps, self._first = MOST_TURNS, None
                self.awaited = WeakSet(each for turn in self._late for each in turn)
        elif not self._whole:  # stop awaiting those that did not step
            steps, self.awaited = self.taken, WeakSet(self.stepped)
        if steps:
            self._late = []
        if steps > 1:
            self._more = 0
        self.stepped, self.taken, self._after, self._known = WeakSet(), 0, 0, True
        return steps
