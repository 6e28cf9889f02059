"""The long table, with one row per measured or counted number. Each row is a `Measurement`."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, TypeAlias

from dpbench.core.case import ALL_PHASES, AXES
from dpbench.core.metrics import METRICS, is_counter
from dpbench.core.subject import Script, Subject

SCHEMA = 3
"""Version of the JSON documents. The version is raised when a field changes its meaning."""

READ = (2, SCHEMA)
"""The versions that can be read. Documents of version 2 have no packed lists."""

STEP = "step"
"""The value of ``phase`` in rows about the whole step."""

NO_HARDWARE = "logical (no hardware)"
"""The value of ``device`` in rows that were counted without hardware."""

Number: TypeAlias = int | float
"""The type of a value in a document. msgspec would turn an int into a float for ``float`` alone."""


@dataclass(frozen=True)
class Measurement:
    """One number about one case.

    Args:
        case: the case that was measured.
        instrument: the name of the instrument.
        phase: a phase of the step, or ``"step"``.
        metric: the name of the metric, e.g. ``dram_read_bytes``.
        value: the number, in ``unit``.
        unit: the unit of the metric, e.g. ``B``, ``s`` or ``1``. A counter that was requested by
            ncu's own name has the unit that ncu reports.
        repeat: the index of the step among the measured steps, from 0.
        device: the name of the GPU or CPU, or `NO_HARDWARE`.
        tool: the measuring programs with their versions, e.g. ``ncu 2025.3.1``.
        rank: the rank of the measured process in a distributed step, from 0.
    """

    case: Subject
    instrument: str
    phase: str
    metric: str
    value: Number
    unit: str
    repeat: int
    device: str
    tool: str
    rank: int = 0

    def as_row(self) -> dict[str, Any]:
        """Return the row as plain JSON types, with the fields of the case first."""
        row = {**self.case.columns, **vars(self)}
        del row["case"]
        return row


_, *OWN_FIELDS = fields(Measurement)

OWN_COLUMNS = [field.name for field in OWN_FIELDS]
"""The columns of the long table that are not fields of the case."""

COLUMNS = [*AXES, *OWN_COLUMNS]
"""The columns of the long table, in order."""

IDENTITY = [column for column in COLUMNS if column not in ("value", "unit", "tool")]
"""The columns whose values identify one row of the long table."""

NUMBER = ["case", *(c for c in IDENTITY if c not in (*AXES, "rank", "repeat"))]
"""The columns whose values identify one row of a summary. A summary combines ranks and steps, so
``rank`` and ``repeat`` are not among these columns."""

PLACE = [column for column in NUMBER if column not in ("instrument", "metric")]
"""The columns of a summary that identify the case, the device and the phase of a row."""

OF_CASE = [column for column in PLACE if column != "phase"]
"""The columns of a summary that identify the case and the device of a row."""


_TYPES: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "Number": (int, float)}


def checked(
    case: Subject, rows: Iterable[Measurement], *, whole: bool = True
) -> tuple[list[Measurement], list[str]]:
    """Check the rows that an instrument recorded for a case.

    If a step lacks a phase that another step or rank has, a row with the value 0 is added for
    metrics whose phases add up to the step. After this, a missing row of one of these metrics means
    that a number was lost. No rows are added for a script, because its steps may have different
    phases. No rows are added either if a row was refused or ``whole`` is false.

    Returns:
        The valid rows with the added rows, and for each refused row the reason.
    """
    valid: dict[Measurement, Measurement] = {}
    refused: list[str] = []
    for row in rows:
        if why := _why_impossible(case, row, valid):
            where = f"{row.metric}@{row.phase} of step {row.repeat}"
            refused.append(f"{row.instrument} has recorded {why} for {where}")
        else:
            valid[_without_value(row)] = row
    whole = whole and not (refused or isinstance(case, Script))
    return [*valid.values(), *(_zeros([*valid.values()]) if whole else ())], refused


def _why_impossible(case: Subject, row: Measurement, valid: Container[Measurement]) -> str:
    """Return what is wrong with a row, or an empty string if the row is valid."""
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
    return why or (f"a second value, {row.value}," if _without_value(row) in valid else "")


def impossible_number(metric: str, value: float, unit: str) -> str:
    """Return what is wrong with a metric, its value or its unit, or an empty string.

    The units of counters by ncu's own names are not checked.
    """
    known = METRICS.get(metric)
    if not known and not is_counter(metric):
        return "an undefined metric"
    if known and unit != known.unit:
        return f"the unit {unit!r}"
    is_finite = abs(value) <= sys.float_info.max
    return "" if is_finite and (value >= 0 or not known or known.signed) else f"the value {value}"


def _zeros(rows: Sequence[Measurement]) -> Iterator[Measurement]:
    """Yield a row with the value 0 for each phase that a step lacks and another step or rank has.

    Only metrics whose phases add up to the step get such rows, and only in steps that have the
    metric for some phase.
    """
    not_summed = {metric.name for metric in METRICS.values() if not metric.adds_up}
    recorded = {_without_value(row) for row in rows}
    phases: dict[Measurement, dict[str, Measurement]] = defaultdict(dict)
    steps: dict[Measurement, set[tuple[int, int]]] = defaultdict(set)
    for row in rows:
        if row.phase != STEP and row.metric not in not_summed:
            alike = replace(_without_value(row), phase="", rank=0, repeat=0)
            phases[alike].setdefault(row.phase, row)
            steps[alike].add((row.rank, row.repeat))
    for alike, by_phase in phases.items():
        for row, (rank, repeat) in product(by_phase.values(), sorted(steps[alike])):
            zero = replace(row, value=0.0, rank=rank, repeat=repeat)
            if _without_value(zero) not in recorded:
                yield zero


def _without_value(row: Measurement) -> Measurement:
    return replace(row, value=0.0, unit="", tool="")
