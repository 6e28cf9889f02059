"""The long table: one `Measurement` per number."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from dpbench.case import AXES, Case

SCHEMA = 1
"""Version of the JSON documents; raised when a field changes its meaning."""

STEP = "step"
"""The phase of a row that speaks of the whole step."""

NO_HARDWARE = "logical (no hardware)"
"""The device of rows that were counted, not measured."""


@dataclass(frozen=True)
class Measurement:
    """One number about one case.

    Args:
        case: what was measured.
        instrument: which instrument measured it.
        phase: a phase of the step, or ``"step"`` for the whole.
        metric: spelled out and without its unit, e.g. ``dram_read_bytes``.
        value: in ``unit``, never scaled.
        unit: ``B``, ``s``, ``B/s``, ``1/s`` or ``1``; for other counters, what the tool says.
        repeat: which of the active steps, from 0.
        device: the name of the processor that ran it.
        tool: the versions that made the number, e.g. ``ncu 2025.3.1``.
    """

    case: Case
    instrument: str
    phase: str
    metric: str
    value: float
    unit: str
    repeat: int
    device: str
    tool: str

    def as_row(self) -> dict[str, Any]:
        """The row as plain JSON types, the case's fields first."""
        row = {**vars(self.case), **vars(self)}
        del row["case"]
        return row

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Measurement:
        """The inverse of `as_row`."""
        return cls(Case.from_row(row), **{name: row[name] for name in OWN_COLUMNS})


OWN_COLUMNS = [field.name for field in fields(Measurement) if field.name != "case"]
"""The columns of the long table that are not the case's."""

COLUMNS = [*AXES, *OWN_COLUMNS]
"""The columns of the long table, in order."""


def as_rows(measurements: Iterable[Measurement]) -> list[dict[str, Any]]:
    """Measurements as a list of plain dictionaries."""
    return [measurement.as_row() for measurement in measurements]
