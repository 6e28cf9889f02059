"""The long table: one `Measurement` per number."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from itertools import product
from typing import Any

from dpbench.case import AXES, COUNTS, Case, Script
from dpbench.metrics import METRICS

SCHEMA = 2
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
        rank: which process of a distributed step, from 0.
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
    rank: int = 0

    def as_row(self) -> dict[str, Any]:
        """The row as plain JSON types, the case's fields first."""
        row = {**vars(self.case), **vars(self)}
        del row["case"]
        return row

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Measurement:
        """The inverse of `as_row`, or a row of an older document."""
        return cls(Case.from_row(row), **{name: (LATER | row)[name] for name in OWN_COLUMNS})


_, *OWN_FIELDS = fields(Measurement)

OWN_COLUMNS = [field.name for field in OWN_FIELDS]
"""The columns of the long table that are not the case's."""

LATER = {field.name: field.default for field in OWN_FIELDS if field.default is not MISSING}
"""What older documents mean that lack a column."""

COLUMNS = [*AXES, *OWN_COLUMNS]
"""The columns of the long table, in order."""

INTEGERS = {*COUNTS, *(field.name for field in OWN_FIELDS if field.type == "int")}
"""The columns that hold integers."""

IDENTITY = [column for column in COLUMNS if column not in ("value", "unit", "tool")]
"""The columns that tell one number from another: all others are lists of these less some."""

REDUCED = ("rank", "repeat")
"""The columns that a summary has no longer: it has one number for all ranks and steps."""


def identity(*without: str) -> list[str]:
    """The columns that tell one number from another where it has none of ``without``."""
    if unknown := {*without} - {*IDENTITY}:
        raise ValueError(f"rows are not told apart by {', '.join(sorted(unknown))}")
    return [column for column in IDENTITY if column not in without]


def summed(*without: str) -> list[str]:
    """The columns that tell one number of a summary from another, less ``without``."""
    return identity(*REDUCED, *without)


def checked(case: Case, rows: Sequence[Measurement]) -> list[Measurement]:
    """What an instrument recorded of a case, with zeros for phases that only other steps have.

    So a row that is not there was lost. The steps of a script need not be alike: its phases may
    come and go.

    Raises:
        ValueError: a row is of another case, or says a second time what another row says.
    """
    if others := {row.case.id for row in rows if row.case != case}:
        raise ValueError(f"the instrument has returned rows of {min(others)}")
    said = Counter(map(_without_value, rows))
    for row, times in said.items():
        if times > 1:
            where = f"{row.metric}@{row.phase} of step {row.repeat} by {row.instrument}"
            raise ValueError(f"the instrument has returned {times} rows for {where}")
    return [*rows, *(() if isinstance(case, Script) else _zeros(rows))]


def _zeros(rows: Sequence[Measurement]) -> Iterator[Measurement]:
    """Rows for the phases that only other steps have; what does not add up to a step has none."""
    whole = {metric.name for metric in METRICS.values() if not metric.adds_up}
    there = {_without_value(row) for row in rows}
    phases: dict[Measurement, dict[str, Measurement]] = defaultdict(dict)
    steps: dict[Measurement, set[tuple[int, int]]] = defaultdict(set)
    for row in rows:
        if row.phase != STEP and row.metric not in whole:
            alike = replace(_without_value(row), phase="", rank=0, repeat=0)
            phases[alike].setdefault(row.phase, row)
            steps[alike].add((row.rank, row.repeat))
    for alike, by_phase in phases.items():
        for row, (rank, repeat) in product(by_phase.values(), sorted(steps[alike])):
            zero = replace(row, value=0.0, rank=rank, repeat=repeat)
            if _without_value(zero) not in there:
                yield zero


def _without_value(row: Measurement) -> Measurement:
    """What a row is about, whatever it says."""
    return replace(row, value=0.0, unit="", tool="")


def as_rows(measurements: Iterable[Measurement]) -> list[dict[str, Any]]:
    """Measurements as a list of plain dictionaries."""
    return [measurement.as_row() for measurement in measurements]
