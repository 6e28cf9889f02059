"""Which rows of a summary share a table, what the table is called, and in which order they come."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from dpbench.case import ALL_PHASES, AXES
from dpbench.registry import TRAINERS
from dpbench.results.frame import CONFIGURATION
from dpbench.results.rows import STEP
from dpbench.show.view import Column, View, column

_PHASES = (*ALL_PHASES, STEP)
_ORDINARY = {"attention": "sdpa", "model": "simple"}
"""What goes without saying in a title."""

_PREFIXES = {"batch_size": "bs", "seq_len": "seq"}
"""How numbers are told apart in a row's label, as in `Case.id`."""


Row = dict[str, Any]
"""A row of a summary: its columns by name."""

Metrics = dict[str, Row]
"""The rows of one case and phase, by metric."""


@dataclass(frozen=True)
class Group:
    """Rows of a summary that share a table.

    Args:
        title: what they have in common.
        cases: by label, which tells the cases of this group apart, and by phase.
        phase: what the group's first table shows: whole steps, or the phase it is of.
        first_header: what stands above the labels.
        one_cell: whether they share a baseline.
    """

    title: str
    cases: dict[str, dict[str, Metrics]] = field(repr=False)
    phase: str
    first_header: str
    by_phase: bool
    one_cell: bool

    @property
    def shown(self) -> dict[str, Metrics]:
        """The cases that have rows of the group's phase, with these."""
        return self.at(self.phase)

    def at(self, phase: str) -> dict[str, Metrics]:
        """The cases that have rows of a phase, with these."""
        return {label: phases[phase] for label, phases in self.cases.items() if phase in phases}


def found(metrics: Metrics, wanted: Column) -> list[tuple[float, Row]]:
    """The numbers of a column in the rows of one case and phase, with the rows they are from."""
    rows = [metrics[name] for name in wanted.metrics if name in metrics]
    return [(row[wanted.kind], row) for row in rows if not math.isnan(row[wanted.kind])]


def _place(key: str, value: Any) -> Any:
    """By what values along a key are sorted: trainers as registered, phases as they come."""
    if key == "trainer":
        return TRAINERS.rank(value), value
    return _PHASES.index(value) if key == "phase" else value


def in_order(summary: pd.DataFrame) -> pd.DataFrame:
    """The rows by cell, and within a cell by trainer, the baseline first; phases stay put."""
    return summary.sort_values(
        [*CONFIGURATION, "device", "trainer"],
        key=lambda c: c.map(TRAINERS.rank) if c.name == "trainer" else c,
        kind="stable",
    )


def by_cell(summary: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Rows that share a baseline, with a title that says which and where they were measured."""
    keys = [*CONFIGURATION, "device"]
    for values, rows in summary.groupby(keys, sort=False):
        yield _title(dict(zip(keys, map(str, values), strict=True))), rows


def groups(summary: pd.DataFrame, view: View) -> Iterator[Group]:
    """The groups of a summary, in order, the rows of each in the order of the view."""
    keys = _keys(view)
    told_apart = [axis for axis in AXES if axis not in keys and _varies(summary, axis)]
    labels = told_apart or ["trainer"]
    grouped = in_order(summary).groupby(keys, sort=False)
    for values, rows in sorted(
        grouped, key=lambda item: [_place(k, v) for k, v in zip(keys, item[0], strict=True)]
    ):
        shared = dict(zip(keys, values, strict=True))
        phase = str(shared.get("phase", STEP))
        for axis in AXES:  # what is the same everywhere is said once
            if axis not in keys and axis not in labels:
                shared[axis] = rows[axis].iloc[0]
        yield Group(
            title=_title({key: str(value) for key, value in shared.items()}),
            cases=_sorted(_cases(rows, labels), view.sort, phase),
            phase=phase,
            first_header="trainer" if labels == ["trainer"] else "case",
            by_phase="phase" in keys,
            one_cell=set(CONFIGURATION) <= set(keys),
        )


def _cases(rows: pd.DataFrame, labels: Sequence[str]) -> dict[str, dict[str, Metrics]]:
    cases: dict[str, dict[str, Metrics]] = {}
    for row in rows.to_dict("records"):
        label = " ".join(f"{_PREFIXES.get(axis, '')}{row[axis]}" for axis in labels)
        phases = cases.setdefault(label, {})
        phases.setdefault(row["phase"], {}).setdefault(
            row["metric"], {str(name): value for name, value in row.items()}
        )
    return cases


def _keys(view: View) -> list[str]:
    """The columns of a summary that are the same in all rows of a table."""
    named = [k for name in view.group_by for k in (CONFIGURATION if name == "cell" else [name])]
    return list(dict.fromkeys([*(name for name in named if name != "device"), "device"]))


def _varies(summary: pd.DataFrame, axis: str) -> bool:
    """Whether an axis tells cases apart; trainer, batch and sequence are always said."""
    return axis in ("trainer", "batch_size", "seq_len") or summary[axis].nunique() > 1


def _title(shared: Mapping[str, str]) -> str:
    size = " ".join(shared[axis] for axis in ("model_size", "precision") if axis in shared)
    parts = [shared.get("trainer", ""), size]
    parts += [shared[axis] for axis, usual in _ORDINARY.items() if shared.get(axis, usual) != usual]
    for axis, word in (("batch_size", "batch"), ("seq_len", "sequence"), ("phase", "phase")):
        if axis in shared:
            parts.append(f"{word} {shared[axis]}")
    return ", ".join([*filter(None, parts), shared["device"] or "unknown device"])


def _sorted(
    cases: dict[str, dict[str, Metrics]], by: str | None, phase: str
) -> dict[str, dict[str, Metrics]]:
    """The cases sorted by an axis or by a column; those that have no number go last."""
    if by is None:
        return cases
    if by in AXES:
        return dict(sorted(cases.items(), key=lambda item: _place(by, _any_row(item[1])[by])))
    numbers = {label: _number(phases.get(phase, {}), by) for label, phases in cases.items()}
    return dict(sorted(cases.items(), key=lambda item: numbers[item[0]]))


def _number(metrics: Metrics, name: str) -> float:
    """The number of a column for one case, infinite where there is none."""
    return max((number for number, _ in found(metrics, column(name))), default=math.inf)


def _any_row(phases: Mapping[str, Metrics]) -> Row:
    return next(iter(next(iter(phases.values())).values()))
