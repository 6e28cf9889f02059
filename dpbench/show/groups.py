"""The groups of cases that share a table, the order of cases, and the titles of tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from dpbench.core.case import ALL_PHASES, AXES, trained_in, unusual
from dpbench.core.metrics import Metric
from dpbench.core.registry import TRAINERS
from dpbench.core.subject import SCRIPT
from dpbench.results.rows import OF_CASE, STEP
from dpbench.show.layout import ABSENT, BYTES, Table, byte_unit, gigabytes, three_digits
from dpbench.show.view import NAME, OF_TESTS, PARAM, TableOptions, column

CONFIGURATION = [axis for axis in AXES if axis != "trainer"]
"""All axes but the trainer. A case has the same values of these axes as its baseline."""


UNCLEAR_ALONE = ("micro_batches", "activation_checkpointing", "gpus", "compile")
"""Axes whose values, such as ``2`` or ``on``, need the name of the axis in a label."""

WIDE_SPREAD = 0.1
"""If the longest and the shortest time of a step differ by more than this share of the value,
tables show both times instead of the value."""


@dataclass(frozen=True)
class Group:
    """Cases that share a table.

    Args:
        title: the beginning of the titles of the group's tables.
        frame: the rows of the cases, in the order of the table's lines. The column ``label`` names
            the case of a row.
        phase: the phase of the first table. The phase is `STEP` unless cases are grouped by phase.
        first_header: the header of the first column.
    """

    title: str
    frame: pd.DataFrame
    phase: str
    first_header: str

    @cached_property
    def shown(self) -> pd.DataFrame:
        """The rows whose phase is `Group.phase`."""
        return self.frame[self.frame.phase == self.phase]

    @cached_property
    def numbers(self) -> dict[tuple[str, str], dict[str, tuple[Any, ...]]]:
        """For each phase and metric, a tuple (value, unit, spread, least, most) by label."""
        numbers: dict[tuple[str, str], dict[str, tuple[Any, ...]]] = defaultdict(dict)
        columns = ["phase", "metric", "label", "value", "unit", "spread", "least", "most"]
        for phase, metric, label, *number in self.frame[columns].itertuples(index=False):
            numbers[phase, metric][label] = tuple(number)
        return numbers

    @cached_property
    def unit(self) -> str:
        """The unit of bytes in the group's tables, which fits the largest number: kB, MB or GB."""
        rows = self.shown[(self.shown.unit == "B") & self.shown.kind.isin(["value", "logical"])]
        return byte_unit(rows.value.max()) if len(rows) else "GB"

    def texts(self, shown: Metric, phase: str | None = None) -> dict[str, str]:
        """Return the texts of a column by label, without cases that lack the number."""
        numbers = self.numbers.get((phase or self.phase, shown.name), {})
        return {label: self._written(shown, *number) for label, number in numbers.items()}

    def _written(
        self, shown: Metric, value: float, unit: str, spread: float, least: float, most: float
    ) -> str:
        if unit == "B" and shown.form == "giga":
            return three_digits(value / BYTES[self.unit])
        if shown.form == "ms" and shown.kind == "value" and spread > WIDE_SPREAD:
            return "–".join(_WRITERS["ms"](end) for end in (least, most))
        return f"{value:.6g} {unit}" if shown.form == "as is" else _WRITERS[shown.form](value)

    def table(
        self,
        title: str,
        columns: Mapping[str, Mapping[str, str]],
        notes: Iterable[str] = (),
        labels: Iterable[str] | None = None,
    ) -> list[Table]:
        """Make a table with a line for each label.

        Args:
            title: the second part of the title, after the group's title.
            columns: for each header, the texts of the column by label.
            notes: the notes below the table.
            labels: the labels to show. If None, uses all labels with a text in some column.

        Returns:
            A list of one table, or an empty list if the table has no columns or lines.
        """
        cases = self.frame.label.unique()
        if labels is None:
            labels = [case for case in cases if any(case in texts for texts in columns.values())]
        cells = [[x, *(texts.get(x, ABSENT) for texts in columns.values())] for x in labels]
        headers = [self.first_header, *columns]
        table = Table(f"{self.title}: {title}", headers, cells, tuple(notes))
        return [table] if columns and cells else []


_WRITERS: dict[str, Callable[[float], str]] = {
    "ratio": "{:.2f}".format,
    "spread": "{:.2%}".format,
    "percent": "{:.0%}".format,
    "ms": lambda seconds: f"{seconds * 1e3:.1f}",
    "giga": gigabytes,
    "number": three_digits,
}


def in_order(summary: pd.DataFrame, configuration: list[str] = CONFIGURATION) -> pd.DataFrame:
    """Sort rows by configuration and device, then by trainer in the order of registration.

    Rows with equal configuration, device and trainer keep their order.
    """
    return ordered(summary, [*configuration, "device", "trainer"])


def ordered(rows: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Sort rows by columns.

    Trainers are in the order of registration, and phases in the order of a step.
    """
    phases = [*ALL_PHASES, STEP]

    def places(column: pd.Series[Any]) -> pd.Series[Any]:
        if column.name == "trainer":
            return column.map(TRAINERS.rank)
        return column.map(phases.index) if column.name == "phase" else column

    return rows.sort_values(keys, key=places, kind="stable")


def titled(
    rows: pd.DataFrame, shared: Sequence[str] = CONFIGURATION
) -> Iterator[tuple[str, pd.DataFrame]]:
    """Group rows by the axes ``shared`` and the device. Yield the title and rows of each group."""
    keys = [*shared, "device"]
    for values, group in rows.groupby(keys, sort=False):
        yield title_of(dict(zip(keys, values, strict=True))), group


def groups(summary: pd.DataFrame, view: TableOptions) -> Iterator[Group]:
    """Yield the groups of a summary, with cases in the order that the view requests."""
    named = [k for name in view.group_by for k in (CONFIGURATION if name == "cell" else [name])]
    keys = list(dict.fromkeys([*(name for name in named if name != "device"), "device"]))
    always = ("trainer", "batch_size", "seq_len")
    labels = [
        axis
        for axis in (*AXES, *OF_CASE[1:])
        if axis not in keys and (axis in always or summary[axis].nunique() > 1)
    ] or ["trainer"]
    rows = ordered(in_order(summary), keys)
    prefixes = {"batch_size": "bs", "seq_len": "seq"}
    prefixes |= {axis: f"{axis}=" for axis in UNCLEAR_ALONE}
    prefixes |= {column: f"{column} " for column in labels if column not in AXES}
    parts = [
        (prefixes.get(axis, "") + rows[axis].astype(str)).where(rows[axis].astype(bool), "")
        for axis in labels
    ]
    rows = rows.assign(label=[" ".join(filter(None, names)) for names in zip(*parts, strict=True)])
    for values, group in rows.groupby(keys, sort=False):
        shared = dict(zip(keys, values, strict=True))
        # The title also names axes that are in no label, because these axes have one value each.
        shared |= {a: group[a].iloc[0] for a in AXES if a not in (*keys, *labels)}
        group = group.drop_duplicates(["label", "phase", "metric"])
        phase = str(shared.get("phase", STEP))
        if view.sort in AXES:
            group = ordered(group, [view.sort])
        elif view.sort == NAME:
            group = group.sort_values("label", kind="stable")
        elif view.sort is not None:
            by = column(view.sort)
            sorting = group[(group.metric == by.name) & (group.phase == phase)]
            places = group.label.map(sorting.set_index("label").value)
            group = group.loc[places.sort_values(kind="stable").index]
        yield Group(title_of(shared), group, phase, "trainer" if labels == ["trainer"] else "case")


def title_of(shared: Mapping[str, Any]) -> str:
    """Make a title from the axes, tests, phase and device that rows share."""
    parts = title_parts(shared)
    return ", ".join([*parts, shared["device"] or "unknown device"])


def title_parts(shared: Mapping[Any, Any]) -> list[str]:
    """Return the parts of `title_of`, without the device."""
    if shared.get("workload") == SCRIPT:
        batch = f"batch {shared['batch_size']}" if shared.get("batch_size") else ""
        return [*filter(None, (shared.get("trainer"), batch))]
    size = " ".join(filter(None, (trained_in(shared), shared.get("precision"))))
    of_test = [str(shared[k]) for k in shared if k in OF_TESTS or str(k).startswith(PARAM)]
    parts = [*of_test, shared.get("trainer", ""), size]
    usual = {"attention": "sdpa", "model": "simple"}
    parts += [shared[axis] for axis, name in usual.items() if shared.get(axis) not in (name, None)]
    parts += [f"{axis.replace('_', ' ')} {value}" for axis, value in unusual(shared).items()]
    words = {"batch_size": "batch", "seq_len": "sequence", "phase": "phase"}
    parts += [f"{word} {shared[axis]}" for axis, word in words.items() if shared.get(axis)]
    return [*filter(None, parts)]
