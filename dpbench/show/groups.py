"""Groups the cases that share a table, orders them, and makes the title of the table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from dpbench.core.case import ALL_PHASES, AXES, trained_in, unusual
from dpbench.core.metric import Metric
from dpbench.core.registry import TRAINERS
from dpbench.core.subject import SCRIPT
from dpbench.results.rows import OF_CASE, STEP
from dpbench.show.layout import ABSENT, BYTES, Table, byte_unit, gigabytes, three_digits
from dpbench.show.view import NAME, OF_TESTS, PARAM, TableOptions, column

CONFIGURATION = [axis for axis in AXES if axis != "trainer"]
"""The axes whose values a case shares with its baseline: all axes but the trainer."""


WIDE_SPREAD = 0.1
"""If the spread of a time over its steps is larger, the shortest and longest time are shown."""


@dataclass(frozen=True)
class Group:
    """Cases that share a table.

    ``frame`` has their rows in the order that the view asks for. Its column ``label`` tells the
    cases apart. ``phase`` is the phase of the first table: `STEP`, or the group's own phase.
    """

    title: str
    frame: pd.DataFrame
    phase: str
    first_header: str

    @cached_property
    def shown(self) -> pd.DataFrame:
        """The rows of the group's phase."""
        return self.frame[self.frame.phase == self.phase]

    @cached_property
    def numbers(self) -> dict[tuple[str, str], dict[str, tuple[Any, ...]]]:
        """For each phase and metric: the value, unit, spread, least and most by label."""
        numbers: dict[tuple[str, str], dict[str, tuple[Any, ...]]] = defaultdict(dict)
        columns = ["phase", "metric", "label", "value", "unit", "spread", "least", "most"]
        for phase, metric, label, *number in self.frame[columns].itertuples(index=False):
            numbers[phase, metric][label] = tuple(number)
        return numbers

    @cached_property
    def unit(self) -> str:
        """The unit of bytes in this group's tables: kB, MB or GB."""
        rows = self.shown[(self.shown.unit == "B") & self.shown.kind.isin(["value", "logical"])]
        return byte_unit(rows.value.max()) if len(rows) else "GB"

    def texts(self, shown: Metric, phase: str | None = None) -> dict[str, str]:
        """The texts of a column by label. Cases without a number are left out."""
        numbers = self.numbers.get((phase or self.phase, shown.name), {})
        return {label: self._written(shown, *number) for label, number in numbers.items()}

    def _written(
        self, shown: Metric, value: float, unit: str, spread: float, least: float, most: float
    ) -> str:
        """A number as text, in the form of its column."""
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
        """A table with a line for each label, as a list; empty without columns or lines.

        Args:
            title: what follows the group's title.
            columns: by header, the texts of the column by label.
            notes: the lines below the table.
            labels: the cases to show; by default those with a text in some column.
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
    """Rows sorted by cell and device, then by trainer as registered. Phases keep their order."""
    return ordered(summary, [*configuration, "device", "trainer"])


def ordered(rows: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Rows sorted by these columns: trainers as registered, phases as they follow in a step."""
    phases = [*ALL_PHASES, STEP]

    def places(column: pd.Series[Any]) -> pd.Series[Any]:
        if column.name == "trainer":
            return column.map(TRAINERS.rank)
        return column.map(phases.index) if column.name == "phase" else column

    return rows.sort_values(keys, key=places, kind="stable")


def titled(
    rows: pd.DataFrame, shared: Sequence[str] = CONFIGURATION
) -> Iterator[tuple[str, pd.DataFrame]]:
    """Groups of rows that share these axes and the device, each with its title."""
    keys = [*shared, "device"]
    for values, group in rows.groupby(keys, sort=False):
        yield title_of(dict(zip(keys, values, strict=True))), group


def groups(summary: pd.DataFrame, view: TableOptions) -> Iterator[Group]:
    """The groups of a summary in order. The view says how the cases of a group are ordered."""
    named = [k for name in view.group_by for k in (CONFIGURATION if name == "cell" else [name])]
    keys = list(dict.fromkeys([*(name for name in named if name != "device"), "device"]))
    always = ("trainer", "batch_size", "seq_len")
    labels = [
        axis
        for axis in (*AXES, *OF_CASE[1:])
        if axis not in keys and (axis in always or summary[axis].nunique() > 1)
    ] or ["trainer"]
    rows = ordered(in_order(summary), keys)
    # Axes are written as in `Case.id`; other columns have their name as prefix.
    prefixes = {"batch_size": "bs", "seq_len": "seq"} | {
        column: f"{column} " for column in labels if column not in AXES
    }
    parts = [
        (prefixes.get(axis, "") + rows[axis].astype(str)).where(rows[axis].astype(bool), "")
        for axis in labels
    ]
    rows = rows.assign(label=[" ".join(filter(None, names)) for names in zip(*parts, strict=True)])
    for values, group in rows.groupby(keys, sort=False):
        shared = dict(zip(keys, values, strict=True))
        # Axes with one value are in the title, not in each label.
        shared |= {a: group[a].iloc[0] for a in AXES if a not in (*keys, *labels)}
        group = group.drop_duplicates(["label", "phase", "metric"])
        phase = str(shared.get("phase", STEP))
        if view.sort in AXES:
            group = ordered(group, [view.sort])
        elif view.sort == NAME:
            group = group.sort_values("label", kind="stable")
        elif view.sort is not None:  # cases without this number come last
            by = column(view.sort)
            sorting = group[(group.metric == by.name) & (group.phase == phase)]
            places = group.label.map(sorting.set_index("label").value)
            group = group.loc[places.sort_values(kind="stable").index]
        yield Group(title_of(shared), group, phase, "trainer" if labels == ["trainer"] else "case")


def title_of(shared: Mapping[str, Any]) -> str:
    """A title that names what rows have in common: axes, tests, phase and device."""
    parts = title_parts(shared)
    return ", ".join([*parts, shared["device"] or "unknown device"])


def title_parts(shared: Mapping[Any, Any]) -> list[str]:
    """The parts of the title of such rows, without the device."""
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
