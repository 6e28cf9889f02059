"""What each operator of a step did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

HEAVY = 0.01
"""An operator with more than this part of a step's bytes is heavy."""


@dataclass(frozen=True)
class Entry:
    """One line of a document's list of operators or kernels."""

    def as_row(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self:
        """The inverse of `as_row`; what else is in the row is left alone."""
        return cls(**{each.name: row[each.name] for each in fields(cls) if each.name in row})


@dataclass(frozen=True)
class OperatorCount(Entry):
    """What one operator did in one phase. A list of them makes a ``pandas.DataFrame``."""

    phase: str
    operator: str  # e.g. aten.clone
    calls: int
    read_bytes: int  # logical, B
    write_bytes: int
    flops: int  # a multiply-add counts as two
    general_rule: bool = False  # nobody has reviewed a rule for it: its bytes are a guess

    @property
    def total_bytes(self) -> int:
        """Logical bytes read and written, B."""
        return self.read_bytes + self.write_bytes


def guesses(counts: Iterable[OperatorCount]) -> dict[str, float]:
    """The heavy operators that were counted by the general rule, with their part of the step."""
    counts = list(counts)
    total = sum(count.total_bytes for count in counts)
    guessed = Counter[str]()
    for count in counts:
        guessed[count.operator] += count.total_bytes * count.general_rule
    return {name: size / total for name, size in guessed.items() if size > HEAVY * total}
