"""What each operator of a step did: the table by phase and operator, and what grew in it."""

from __future__ import annotations

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
    """

    phase: str
    operator: str
    calls: int
    read_bytes: int
    write_bytes: int
    flops: int

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
        return cls(**{name: row[name] for name in cls.__dataclass_fields__})


def growth(before: Iterable[OperatorCount], after: Iterable[OperatorCount]) -> list[OperatorCount]:
    """By phase and operator, what ``after`` has beyond ``before``; what grew most comes first.

    Only what changed is listed; what shrank is negative.
    """
    earlier = {(count.phase, count.operator): count for count in before}
    later = {(count.phase, count.operator): count for count in after}
    changes = []
    for phase, operator in earlier.keys() | later.keys():
        nothing = OperatorCount(phase, operator, 0, 0, 0, 0)
        old = earlier.get((phase, operator), nothing)
        new = later.get((phase, operator), nothing)
        change = OperatorCount(
            phase,
            operator,
            new.calls - old.calls,
            new.read_bytes - old.read_bytes,
            new.write_bytes - old.write_bytes,
            new.flops - old.flops,
        )
        if change != nothing:
            changes.append(change)
    return sorted(changes, key=lambda change: (-change.total_bytes, change.phase, change.operator))
