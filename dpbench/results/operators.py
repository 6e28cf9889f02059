"""What each operator of a step did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class OperatorCount:
    """What one operator did in one phase. A list of them makes a ``pandas.DataFrame``.

    Args:
        phase: a phase of the step.
        operator: e.g. ``aten.clone``.
        calls: how often it ran.
        read_bytes: logical bytes read, B.
        write_bytes: logical bytes written, B.
        flops: floating-point operations, a multiply-add counting as two.
        general_rule: whether nobody has reviewed a rule for this operator, so that its bytes
            are a guess.
    """

    phase: str
    operator: str
    calls: int
    read_bytes: int
    write_bytes: int
    flops: int
    general_rule: bool = False

    @property
    def total_bytes(self) -> int:
        """Logical bytes read and written, B."""
        return self.read_bytes + self.write_bytes

    def as_row(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> OperatorCount:
        """The inverse of `as_row`; what else is in the row is left alone."""
        return cls(**{name: row[name] for name in cls.__dataclass_fields__ if name in row})


HEAVY = 0.01
"""An operator with more than this part of a step's bytes is heavy."""


def guesses(counts: Iterable[OperatorCount]) -> dict[str, float]:
    """The heavy operators that were counted by the general rule, with their part of the step."""
    counts = list(counts)
    total = sum(count.total_bytes for count in counts)
    guessed = Counter[str]()
    for count in counts:
        guessed[count.operator] += count.total_bytes * count.general_rule
    return {name: size / total for name, size in guessed.items() if size > HEAVY * total}
