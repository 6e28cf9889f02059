"""What counting a case yields, and its form on the way between two processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dpbench.results.operators import OperatorCount, guesses
from dpbench.results.rows import Measurement


@dataclass(frozen=True)
class LogicalResult:
    """All that counting a case yields.

    Args:
        rows: ``logical_read_bytes``, ``logical_write_bytes``, ``flops`` and
            ``peak_memory_bytes``, by phase and for the step.
        operators: the same bytes and flops by phase and operator, most bytes first.
        assumed: what was assumed about values that do not exist without data.
    """

    rows: tuple[Measurement, ...]
    operators: tuple[OperatorCount, ...]
    assumed: tuple[str, ...]

    @property
    def general_rule_operators(self) -> tuple[str, ...]:
        """Operators counted by the general rule because nobody has reviewed one for them."""
        return tuple(sorted({count.operator for count in self.operators if count.general_rule}))

    @property
    def notes(self) -> tuple[str, ...]:
        """What must be known beside the tables, which name the heavy ones of these operators."""
        heavy = guesses(self.operators)
        light = (name for name in self.general_rule_operators if name not in heavy)
        return (*self.assumed, *(f"{name}: counted by the general rule" for name in light))

    def as_json(self) -> dict[str, Any]:
        """Plain JSON types; the inverse of `from_json`."""
        return {
            "rows": [row.as_row() for row in self.rows],
            "operators": [count.as_row() for count in self.operators],
            "assumed": list(self.assumed),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LogicalResult:
        """The result that `as_json` described."""
        return cls(
            rows=tuple(Measurement.from_row(row) for row in data["rows"]),
            operators=tuple(OperatorCount.from_row(row) for row in data["operators"]),
            assumed=tuple(data["assumed"]),
        )
