"""The page's tables of text: trainers, cases, failures, environments, and every row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from dpbench.case import AXES
from dpbench.registry import TRAINERS
from dpbench.results.rows import COLUMNS
from dpbench.show.groups import in_order
from dpbench.show.html import data
from dpbench.show.html.data import Basis
from dpbench.show.html.parts import (
    CASE,
    GB,
    Cell,
    Column,
    DataTable,
    exact,
    milliseconds,
    times,
)
from dpbench.show.html.source import COUNTED, Source, fate
from dpbench.show.layout import ABSENT


def headline(sources: Sequence[Source], summary: pd.DataFrame) -> list[str]:
    """What the page is about, in sentences: cases, devices, premises, failures."""
    measured = summary[summary.measured]
    counted = summary[~summary.measured]
    sentences = []
    for rows, what in ((measured, "measured"), (counted, "counted without hardware")):
        if not rows.empty:
            cases = len(rows[["run", *AXES]].drop_duplicates())
            where = ", ".join(sorted(set(rows.device))) if what == "measured" else ""
            on = f" on {where}" if where else ""
            sentences.append(f"{cases} {'case' if cases == 1 else 'cases'} {what}{on}.")
    if not sentences:
        sentences.append("No number was measured or counted.")
    fates = Counter(fate(case["error"]) for source in sources for case in source.failures)
    for what, cases in sorted(fates.items()):
        sentences.append(f"{cases} {'case' if cases == 1 else 'cases'} {what}.")
    return sentences


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
    counts = counts.reset_index()
    columns = [
        Column("trainer", "trainer"),
        Column("cases", "cases"),
        Column("without a result", "failed"),
    ]
    ratios = data.ratios(summary, basis).groupby("trainer").ratio.agg(["min", "max"])
    peaks = data.memory_against_bytes(summary, basis).groupby("trainer").peak.max()
    counts = counts.join(ratios, on="trainer").join(peaks, on="trainer")
    columns += [
        Column(f"smallest {basis.name} ÷ standard", "min", times),
        Column(f"largest {basis.name} ÷ standard", "max", times),
        Column(f"largest peak memory, GB ({basis.verb})", "peak", GB),
    ]
    counts = counts.iloc[counts.trainer.map(TRAINERS.rank).argsort(kind="stable")]
    return DataTable.of("Trainers", counts, columns)


_HEADERS: dict[str, Column] = {
    "dram_read_bytes": Column("DRAM read, GB", "dram_read_bytes", GB),
    "dram_write_bytes": Column("DRAM write, GB", "dram_write_bytes", GB),
    "dram_bytes": Column("DRAM total, GB", "dram_bytes", GB),
    "dram_bytes/ratio": Column("DRAM ÷ standard", "dram_bytes/ratio", times),
    "logical_bytes": Column("logical, GB (counted)", "logical_bytes", GB),
    "logical_bytes/ratio": Column("logical ÷ standard", "logical_bytes/ratio", times),
    "l2_total_bytes": Column("L2 total, GB", "l2_total_bytes", GB),
    "l2_total_bytes/ratio": Column("L2 ÷ standard", "l2_total_bytes/ratio", times),
    "peak_memory_bytes": Column("peak memory, GB", "peak_memory_bytes", GB),
    "step_time_seconds": Column("step, ms", "step_time_seconds", milliseconds),
    "samples_per_second": Column("samples/s", "samples_per_second", "{:.2f}".format),
}


def cases(summary: pd.DataFrame, failed: pd.DataFrame) -> DataTable:
    """Whole steps, one line per case and premise; failed cases with their error."""
    wide = data.by_case(summary)
    if not failed.empty:
        names = ["run", "title", "device", *AXES, "error"]
        found = failed[names].rename(columns={"error": "failure"})
        wide = pd.concat([wide, found], ignore_index=True)
        keys = ["run", "title", *AXES]  # what was measured before the failure has its own line
        wide["failure"] = wide.groupby(keys).failure.transform("first")
        numbers = [name for name in wide if name in _HEADERS]
        empty = wide[numbers].isna().all(axis=1) & wide.duplicated(keys, keep=False)
        wide = in_order(wide[~empty])
    premise = wide.measured.map({True: "measured", False: "counted"})
    wide = wide.assign(premise=premise.where(premise.notna(), ABSENT))
    columns = [Column("run", "run")] if wide.run.nunique() > 1 else []
    columns += [*CASE, Column("premise", "premise")]
    columns += [column for name, column in _HEADERS.items() if name in wide]
    if "failure" in wide:
        columns.append(Column("error", "failure"))
    caption = "One step of each case: means over the steps, medians of times; exact when pointed at"
    return DataTable.of(caption, wide, columns)


def failures(failed: pd.DataFrame) -> DataTable | None:
    """The cases without a result and why, or None."""
    if failed.empty:
        return None
    columns = [Column("run", "run"), *CASE, Column("error", "error"), Column("message", "message")]
    return DataTable.of("Cases that failed or were skipped", in_order(failed), columns)


def every_row(sources: Sequence[Source]) -> DataTable:
    """The long table of all runs, exact; what is the same in all rows is in the caption."""
    frame = pd.concat([s.frame.assign(run=s.label) for s in sources], ignore_index=True)
    names = ["run", *COLUMNS]
    same = [n for n in names if n not in ("metric", "value") and frame[n].nunique() == 1]
    caption = "Every row of the runs, exact"
    if same and len(frame) > 1:
        caption += "; the same in all: " + ", ".join(f"{n} {frame[n].iloc[0]}" for n in same)
        names = [name for name in names if name not in same]
    writers = {"value": exact}
    return DataTable.of(
        caption,
        frame,
        [Column(name.replace("_", " "), name, writers.get(name, str)) for name in names],
    )


def environments(sources: Sequence[Source]) -> DataTable:
    """What each run was measured on and with, one column per run."""
    described = [dict(_about(source)) for source in sources]
    names = dict.fromkeys(name for found in described for name in found)
    rows = [
        [Cell(text, text) for text in (name, *(found.get(name, ABSENT) for found in described))]
        for name in names
    ]
    headers = ["", *(source.label for source in sources)]
    return DataTable("What it was measured on", headers, rows, [False] * len(headers))


def _about(source: Source) -> Iterator[tuple[str, str]]:
    for (instrument, device), rows in source.frame.groupby(["instrument", "device"], sort=True):
        how = "counted without hardware" if instrument == COUNTED else f"measured on {device}"
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
            yield name.removesuffix(" bytes"), f"{GB(value)} GB"
        elif isinstance(value, list):
            yield name, ", ".join(map(str, value)) or ABSENT
        else:
            yield name, str(value)
