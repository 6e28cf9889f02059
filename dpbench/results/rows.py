"""The long table: one `Measurement` per number."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

from dpbench.core.case import ALL_PHASES, AXES
from dpbench.core.metric import is_counter
from dpbench.core.metrics import METRICS
from dpbench.core.subject import Script, Subject, subject_from

SCHEMA = 2
"""Version of the JSON documents; raised when a field changes its meaning."""

STEP = "step"
"""The phase of rows about the whole step."""

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
        unit: ``B``, ``s``, ``B/s``, ``1/s`` or ``1``; of other counters, the tool's.
        repeat: which of the active steps, from 0.
        device: the name of the processor that ran it.
        tool: the versions that made the number, e.g. ``ncu 2025.3.1``.
        rank: which process of a distributed step, from 0.
    """

    case: Subject
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
        row = {**self.case.columns, **vars(self)}
        del row["case"]
        return row

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Measurement:
        """The inverse of `as_row`."""
        return cls(subject_from(row), **{name: row[name] for name in OWN_COLUMNS})


_, *OWN_FIELDS = fields(Measurement)

OWN_COLUMNS = [field.name for field in OWN_FIELDS]
"""The columns of the long table that are not the case's."""

COLUMNS = [*AXES, *OWN_COLUMNS]
"""The columns of the long table, in order."""

IDENTITY = [column for column in COLUMNS if column not in ("value", "unit", "tool")]
"""The columns that identify a number. Other such lists are derived from this one."""

NUMBER = ["case", *(c for c in IDENTITY if c not in (*AXES, "rank", "repeat"))]
"""The columns that identify a number of a summary, which combines ranks and steps."""

PLACE = [column for column in NUMBER if column not in ("instrument", "metric")]
"""The columns that identify its case, device and phase."""

OF_CASE = [column for column in PLACE if column != "phase"]
"""The columns that identify its case and device."""


_TYPES: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float)}


def checked(
    case: Subject, rows: Iterable[Measurement], *, whole: bool = True
) -> tuple[list[Measurement], list[str]]:
    """The valid rows that an instrument recorded for a case, and why others are refused.

    Zeros are added where a step lacks a phase, so a row still missing was lost. Scripts
    get none, because their steps may differ in phases; nor does a case of which a row is refused,
    or that was not measured as a ``whole``.
    """
    stands: dict[Measurement, Measurement] = {}
    refused: list[str] = []
    for row in rows:
        if why := _impossible(case, row, stands):
            where = f"{row.metric}@{row.phase} of step {row.repeat}"
            refused.append(f"{row.instrument} has recorded {why} for {where}")
        else:
            stands[_without_value(row)] = row
    whole = whole and not (refused or isinstance(case, Script))
    return [*stands.values(), *(_zeros([*stands.values()]) if whole else ())], refused


def _impossible(case: Subject, row: Measurement, stands: Container[Measurement]) -> str:
    """Why a row of a case, beside its valid ones, is impossible; empty if it is possible."""
    for each in OWN_FIELDS:
        value = getattr(row, each.name)
        if isinstance(value, bool) or not isinstance(value, _TYPES[str(each.type)]):
            return f"the {each.name} {value!r}"
    wrong = {
        f"a number of {row.case.id}": row.case != case,
        f"the phase {row.phase!r}": row.phase not in (STEP, *ALL_PHASES),
        f"the repeat {row.repeat}": row.repeat < 0,
        f"the rank {row.rank}": row.rank < 0,
    }
    why = next((what for what, is_so in wrong.items() if is_so), "")
    why = why or impossible_number(row.metric, row.value, row.unit)
    return why or (f"a second value, {row.value}," if _without_value(row) in stands else "")


def impossible_number(metric: str, value: float, unit: str) -> str:
    """Why a metric, its value or unit is impossible; empty if possible."""
    known = METRICS.get(metric)
    if not known and not is_counter(metric):
        return "an undefined metric"
    if known and unit != known.unit:
        return f"the unit {unit!r}"
    is_finite = abs(value) <= sys.float_info.max
    return "" if is_finite and (value >= 0 or not known or known.signed) else f"the value {value}"


def _zeros(rows: Sequence[Measurement]) -> Iterator[Measurement]:
    """Zero rows for phases that a step lacks and others have, of metrics whose phases add up."""
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
    """A row without its value, as its identity."""
    return replace(row, value=0.0, unit="", tool="")


def as_rows(measurements: Iterable[Measurement]) -> list[dict[str, Any]]:
    """Measurements as a list of plain dictionaries."""
    return [measurement.as_row() for measurement in measurements]
