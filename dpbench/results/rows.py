"""The long table: one `Measurement` per number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from numbers import Integral
from pathlib import Path
from typing import Any

from dpbench.case import AXES, Case
from dpbench.registry import MODELS, TRAINERS

SCHEMA = 1
"""Version of the JSON documents; raised when a field changes its meaning."""

STORAGE = Path(".dpbench")
"""Where runs are saved unless told otherwise."""

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
        row = asdict(self)
        return {**row.pop("case"), **row}

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Measurement:
        """The inverse of `as_row`."""
        measured = {name: value for name, value in row.items() if name not in AXES}
        return cls(case=saved_case({name: row[name] for name in AXES}), **measured)


def saved_case(fields: Mapping[str, Any]) -> Case:
    """A case from saved results, whose trainer and model may be unknown to this process.

    Its numbers may be NumPy's: that is what pandas 2 calls groups of a frame by.
    """
    TRAINERS.admit(fields["trainer"])
    MODELS.admit(fields["model"])
    return Case(**{name: _plain(value) for name, value in fields.items()})


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


OWN_COLUMNS = [field.name for field in fields(Measurement) if field.name != "case"]
"""The columns of the long table that are not the case's."""

COLUMNS = [*AXES, *OWN_COLUMNS]
"""The columns of the long table, in order."""


def as_rows(measurements: Iterable[Measurement]) -> list[dict[str, Any]]:
    """Measurements as a list of plain dictionaries."""
    return [measurement.as_row() for measurement in measurements]
