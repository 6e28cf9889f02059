"""The long table: one `Measurement` per number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from dpbench.case import AXES, SCRIPT, Case
from dpbench.metrics import METRICS

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

IDENTITY = [column for column in COLUMNS if column not in ("value", "unit", "tool")]
"""The columns that tell one number from another."""


def checked(case: Case, rows: Sequence[Measurement]) -> list[Measurement]:
    """What an instrument recorded of a case, with zeros for phases that only other steps have.

    So a row that is not there was lost. The steps of a script need not be alike: its phases may
    come and go.

    Raises:
        ValueError: a row is of another case, or says a second time what another row says.
    """
    if others := {row.case.id for row in rows if row.case != case}:
        raise ValueError(f"the instrument has returned rows of {min(others)}")
    said = Counter((r.instrument, r.phase, r.metric, r.repeat, r.device) for r in rows)
    for (instrument, phase, metric, repeat, _), times in said.items():
        if times > 1:
            where = f"{metric}@{phase} of step {repeat} by {instrument}"
            raise ValueError(f"the instrument has returned {times} rows for {where}")
    return [*rows, *(() if case.workload == SCRIPT else _zeros(rows))]


def _zeros(rows: Sequence[Measurement]) -> Iterator[Measurement]:
    """Rows for the phases that only other steps have; what does not add up to a step has none."""
    whole = {metric.name for metric in METRICS.values() if not metric.adds_up}
    metrics: dict[tuple[str, str, str], dict[str, dict[int, Measurement]]] = {}
    for row in rows:
        if row.phase != STEP and row.metric not in whole:
            phases = metrics.setdefault((row.instrument, row.metric, row.device), {})
            phases.setdefault(row.phase, {})[row.repeat] = row
    for phases in metrics.values():
        repeats = {repeat for steps in phases.values() for repeat in steps}
        for steps in phases.values():
            like = next(iter(steps.values()))
            yield from (replace(like, value=0.0, repeat=n) for n in sorted(repeats - {*steps}))


def as_rows(measurements: Iterable[Measurement]) -> list[dict[str, Any]]:
    """Measurements as a list of plain dictionaries."""
    return [measurement.as_row() for measurement in measurements]
