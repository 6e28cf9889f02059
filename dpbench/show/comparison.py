"""Tables of the changes between two runs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from dpbench.core.case import AXES
from dpbench.core.files import printable
from dpbench.core.metrics import METRICS
from dpbench.core.registry import TRAINERS
from dpbench.core.subject import subject_from
from dpbench.results.gate import Comparison
from dpbench.results.rows import NUMBER, STEP
from dpbench.show.layout import ABSENT, BYTES, Table, byte_unit, three_digits, written
from dpbench.show.tables import title_parts

MOST_LINES = 40
"""The most lines in a list of numbers that exceeded a limit."""

HEADERS = ["metric", "phase", "before", "after", "change", "limit"]
"""The headers of the columns for which `change_cells` returns texts."""


def comparison_tables(
    comparison: Comparison,
    title: str = "",
    against: str = "",
    *,
    shown: Sequence[tuple[str, str]] = (),
) -> list[Table]:
    """Make a table of changes for each configuration, instrument and device.

    The tables show the main metrics of the step (or ``shown``), and every number that has a limit.

    Args:
        comparison: the changes, and the numbers that have limits.
        title: the beginning of each table's title.
        against: the name of the reference, for the end of each title.
        shown: pairs (metric, phase) to show instead of the main metrics.
    """
    keys = [*AXES, *NUMBER[1:]]
    changes = comparison.changes
    judged = pd.DataFrame(comparison.judged, columns=None if comparison.judged else keys)
    known = pd.MultiIndex.from_frame(changes[keys]).isin(pd.MultiIndex.from_frame(judged[keys]))
    places = pd.MultiIndex.from_frame(changes[["metric", "phase"]])
    rows = changes[places.isin(shown or [(name, STEP) for name in _main_metrics()]) & ~known]
    if not judged.empty:
        rows = pd.concat([rows, judged], ignore_index=True)
    tables = []
    cells_by = [key for key in keys if key not in ("trainer", "metric", "phase")]
    for key, group in rows.groupby(cells_by):
        cell = dict(zip(cells_by, key, strict=True))
        steps = "steps of tests" if group.trainer.str.contains("::").any() else "steps of a script"
        what = ", ".join(title_parts(cell)) or steps
        with_what = f", against {against}" if against else ""
        name = f"{title}{what}, {cell['instrument']} on {cell['device']}{with_what}"
        cells = []
        ordered = group.sort_values(["trainer", "metric"], kind="stable", key=_rank)
        for row in ordered.to_dict("records"):
            metric, phase, *rest = change_cells(row)
            cells.append([row["trainer"], metric + (f"@{phase}" if phase != STEP else ""), *rest])
        tables.append(Table(name, ["trainer", HEADERS[0], *HEADERS[2:]], cells))
    return tables


def _rank(names: pd.Series[str]) -> pd.Series[int]:
    """Return sort keys: trainers in the order of registration, or main metrics before others."""
    if names.name == "trainer":
        return names.map({name: TRAINERS.rank(name) for name in names.unique()})
    main = _main_metrics()
    return names.map(lambda name: [*main, name].index(name))


def _main_metrics() -> list[str]:
    """Return the metrics that are shown even if no limit was checked for them."""
    return [name for name, metric in METRICS.every().items() if "change" in metric.shown]


def change_cells(row: Mapping[Any, Any]) -> list[str]:
    """Return the cells of a line about one changed number, in the order of `HEADERS`."""
    limit = written(row.get("threshold"), lambda limit: str(limit).rpartition(":")[2])
    checked = {True: f"{limit} exceeded", False: limit, None: "not checked"}
    return [
        str(row["metric"]),
        str(row["phase"]),
        amount(row["before"], row["unit"], row["after"]),
        amount(row["after"], row["unit"], row["before"]),
        written(row["relative"], "{:+.2%}".format),
        limit if limit == ABSENT else checked[row.get("regressed", False)],
    ]


def regression_text(regressions: Iterable[Mapping[str, Any]]) -> str:
    """Describe the regressions that failed a test, with a table for each case."""
    by_case: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in regressions:
        by_case[f"{subject_from(row).id}, against {row['reference']}"].append(row)
    parts = []
    for title, rows in by_case.items():
        parts += [Table(title, HEADERS, [*map(change_cells, rows)]).as_text(), grown_text(rows)]
    return "\n\n".join(filter(None, parts))


def exceeded_lines(regressions: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line for each number that exceeded its limit, the largest relative change first.

    There are at most `MOST_LINES` lines. If more numbers exceeded their limit, the last line counts
    the numbers that have no line.
    """
    worst = sorted(regressions, key=lambda row: -abs(row["relative"] or math.inf))
    lines = []
    for row in worst:
        metric, phase, before, after, change, limit = change_cells(row)
        number = f"{metric}@{phase} of {subject_from(row).id}"
        line = f"{number}: {before} -> {after}, {change}, limit {limit}"
        for largest in row.get("largest_changes", ())[:1]:
            line += f"; most by {change_text(largest)}"
        lines.append(line)
    more = len(lines) - MOST_LINES
    return [*lines[: MOST_LINES - 1], f"and {more + 1} more"] if more > 0 else lines


def grown_text(
    regressions: Iterable[Mapping[str, Any]], largest: Iterable[Mapping[str, Any]] = ()
) -> str:
    """List, one on each line, the largest changes of operators, kernels and functions.

    A line is, for example, ``dpsgd clip: aten.clone +85.9 GB, in blocks.*.mlp (model.py:24
    forward)``. The changes of regressions come first.

    Args:
        regressions: the regressions of a comparison, with the largest changes of each.
        largest: further changes, see `dpbench.results.changes.changes_of_all`.
    """
    changes = [change for row in regressions for change in row.get("largest_changes", ())]
    changes += largest
    lines = [f"  {each['trainer']} {each['phase']}: {change_text(each)}" for each in changes]
    return printable("\n".join(["What changed most:", *dict.fromkeys(lines)])) if lines else ""


def change_text(change: Mapping[str, Any]) -> str:
    """Write by how many bytes an operator, kernel or function changed, with module and line."""
    sign = "-" if change["bytes"] < 0 else "+"
    where = "several modules" if change["module"] == "*" else change["module"]
    module = f", in {'module ' * where[:1].isdigit()}{where}" if where else ""
    line = f" ({change['line']})" if change["line"] else ""
    return f"{change['name']} {sign}{amount(abs(change['bytes']), 'B')}{module}{line}"


OPERATIONS = (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("kFLOP", 1e3))
"""The units of arithmetic, each with its size in operations."""


def amount(value: float, unit: str, beside: float = 0.0) -> str:
    """Write a value with its unit. Bytes are in kB to GB, FLOP in kFLOP to TFLOP, and times in ms.

    The unit of bytes is chosen for the larger of ``value`` and ``beside``, so that two numbers side
    by side have the same unit.
    """
    if pd.isna(value):
        return ABSENT
    if unit == "B":
        unit = byte_unit(max(value, 0.0 if pd.isna(beside) else beside))
        return f"{three_digits(value / BYTES[unit])} {unit}"
    if unit == "FLOP":
        unit, size = next(each for each in OPERATIONS if value >= each[1] or each[0] == "kFLOP")
        return f"{three_digits(value / size)} {unit}"
    if unit == "s":
        return f"{value * 1e3:.1f} ms"
    return f"{value:.4g}" if unit == "1" else f"{value:.4g} {unit}"
