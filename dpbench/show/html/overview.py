"""The page's tables of text: trainers, cases, failures, environments, and every row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from dpbench.case import AXES
from dpbench.metrics import unit
from dpbench.registry import TRAINERS
from dpbench.results.rows import COLUMNS
from dpbench.show.groups import in_order
from dpbench.show.html import data
from dpbench.show.html.data import Basis
from dpbench.show.html.parts import CASE, Cell, DataTable, Writer, exact, milliseconds, times
from dpbench.show.html.source import UNMEASURED, Source, fate
from dpbench.show.layout import ABSENT, gigabytes
from dpbench.show.view import Column


def headline(sources: Sequence[Source], summary: pd.DataFrame) -> list[str]:
    """What the page is about, in sentences: cases, devices, premises, failures."""
    measured = summary[summary.measured]
    counts = Counter(
        {
            f"measured on {', '.join(sorted(set(measured.device)))}": _cases_in(measured),
            "counted without hardware": _cases_in(summary[~summary.measured]),
        }
    )
    fates = Counter(fate(case["error"]) for source in sources for case in source.failures)
    said = [(n, what) for what, n in (*counts.items(), *sorted(fates.items())) if n]
    sentences = [f"{n} {'case' if n == 1 else 'cases'} {what}." for n, what in said]
    return sentences if counts.total() else ["No number was measured or counted.", *sentences]


def _cases_in(summary: pd.DataFrame) -> int:
    return len(summary[["run", *AXES]].drop_duplicates())


def trainers(sources: Sequence[Source], summary: pd.DataFrame, basis: Basis) -> DataTable:
    """By trainer: cases, how many have no result, smallest and largest ratio, peak memory."""
    cases = pd.DataFrame(
        [
            {**{axis: case[axis] for axis in AXES}, "failed": bool(case.get("error"))}
            for source in sources
            for case in source.cases
        ],
        columns=[*AXES, "failed"],
    )
    each = cases.groupby(list(AXES), sort=False, as_index=False).failed.any()
    counts = each.groupby("trainer", sort=False).failed.agg(cases="size", failed="sum")
    ratios = data.ratios(summary, basis).groupby("trainer").ratio.agg(["min", "max"])
    peaks = data.memory_against_bytes(summary, basis).groupby("trainer").peak.max()
    table = counts.join(ratios).join(peaks).reset_index()
    table = table.iloc[table.trainer.map(TRAINERS.rank).argsort(kind="stable")]
    headers = {
        "trainer": "trainer",
        "cases": "cases",
        "failed": "without a result",
        "min": f"smallest {basis.name} ÷ standard",
        "max": f"largest {basis.name} ÷ standard",
        "peak": f"largest peak memory, GB ({basis.verb})",
    }
    return DataTable.of("Trainers", table, headers)


def cases(summary: pd.DataFrame, failed: pd.DataFrame) -> DataTable:
    """Whole steps, one line per case and premise; failed cases with their error."""
    wide = data.by_case(summary)
    columns = [column for column in data.case_columns() if column.name in wide]
    numbers = {column.name: _header(column) for column in columns}
    if not failed.empty:
        wide = _with_errors(wide, failed, list(numbers))
    premise = wide.measured.map({True: "measured", False: "counted"})
    wide = wide.assign(premise=premise.where(premise.notna(), ABSENT))
    headers = {
        **({"run": "run"} if wide.run.nunique() > 1 else {}),
        **CASE,
        "premise": "premise",
        **numbers,
        **({} if failed.empty else {"error": "error"}),
    }
    caption = "One step of each case: means over the steps, medians of times; exact when pointed at"
    return DataTable.of(caption, wide, headers, **{c.name: _writer(c) for c in columns})


def _with_errors(wide: pd.DataFrame, failed: pd.DataFrame, numbers: list[str]) -> pd.DataFrame:
    """The cases and those that failed; what was measured before a failure has its own line."""
    keys = ["run", "title", *AXES]
    wide = pd.concat([wide, failed[[*keys, "device", "error"]]], ignore_index=True)
    wide["error"] = wide.groupby(keys).error.transform("first")
    empty = wide[numbers].isna().all(axis=1) & wide.duplicated(keys, keep=False)
    return in_order(wide[~empty])


def _header(column: Column) -> str:
    """The header of a column of the tables, on one line, with its unit."""
    header = column.header.replace("\n", " ")
    header = header.replace("÷ std", "÷ standard").replace("mem.", "memory")
    return f"{header}, GB" if _writer(column) is gigabytes else header


def _writer(column: Column) -> Writer:
    """How its numbers are written."""
    if column.kind != "value":
        return times
    by_unit: dict[str, Writer] = {"B": gigabytes, "s": milliseconds}
    return by_unit.get(unit(column.name), "{:.2f}".format)


def failures(failed: pd.DataFrame) -> DataTable | None:
    """The cases without a result and why, or None."""
    if failed.empty:
        return None
    headers = {"run": "run", **CASE, "error": "error", "message": "message"}
    return DataTable.of("Cases that failed or were skipped", in_order(failed), headers)


def every_row(sources: Sequence[Source]) -> DataTable:
    """The long table of all runs, exact; what is the same in all rows is in the caption."""
    frame = pd.concat([s.frame.assign(run=s.label) for s in sources], ignore_index=True)
    names = ["run", *COLUMNS]
    same = [n for n in names if n not in ("metric", "value") and frame[n].nunique() == 1]
    caption = "Every row of the runs, exact"
    if same and len(frame) > 1:
        caption += "; the same in all: " + ", ".join(f"{n} {frame[n].iloc[0]}" for n in same)
        names = [name for name in names if name not in same]
    headers = {name: name.replace("_", " ") for name in names}
    return DataTable.of(caption, frame, headers, value=exact)


def environments(sources: Sequence[Source]) -> DataTable:
    """What each run was measured on and with, one column per run."""
    described = [dict(_about(source)) for source in sources]
    names = dict.fromkeys(name for about in described for name in about)
    rows = [
        [Cell(text, text) for text in (name, *(about.get(name, ABSENT) for about in described))]
        for name in names
    ]
    headers = ["", *(source.label for source in sources)]
    return DataTable("What it was measured on", headers, rows, [False] * len(headers))


def _about(source: Source) -> Iterator[tuple[str, str]]:
    for (instrument, device), rows in source.frame.groupby(["instrument", "device"], sort=True):
        how = "counted without hardware" if instrument == UNMEASURED else f"measured on {device}"
        yield f"rows of {instrument}", f"{len(rows)}, {how}: {'; '.join(sorted(set(rows.tool)))}"
    yield "cases", f"{len(source.cases)}, {len(source.failures)} without a result"
    yield from _flat(source.environment)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested values as name and text, e.g. ``gpu driver``."""
    for key, value in values.items():
        name = f"{prefix}{str(key).replace('_', ' ')}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name} ")
        elif value is None:
            yield name, ABSENT
        elif str(key).endswith("_bytes") and isinstance(value, int | float):
            yield name.removesuffix(" bytes"), f"{gigabytes(value)} GB"
        elif isinstance(value, list):
            yield name, ", ".join(map(str, value)) or ABSENT
        else:
            yield name, str(value)
