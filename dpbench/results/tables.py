"""Compact tables of a summary, as text for a terminal or as Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
from tabulate import tabulate

from dpbench.case import BASELINE_TRAINER, OUTSIDE, PHASES
from dpbench.registry import TRAINERS
from dpbench.results.frame import (
    CONFIGURATION,
    EXPECTED_RATIOS,
    summarise,
    throughputs,
    with_ratios,
)
from dpbench.results.rows import STEP

COLUMNS = 80
ABSENT = "-"
SHOWN_SHARE = 1e-3
"""A phase gets a column if it moves at least this share of the step."""

IN_CACHE_BYTES = 1e9
"""Below this, a step's data stays in the L2 cache (60 MB on an H200) between kernels, and
ratios of DRAM bytes say nothing."""


@dataclass(frozen=True)
class Table:
    """Text cells under a title; ``notes`` are said below."""

    title: str
    headers: list[str]
    cells: list[list[str]]
    notes: tuple[str, ...] = ()

    def as_text(self) -> str:
        """For a terminal of 80 columns."""
        body = self._body("simple", self.headers, self.cells)
        notes = [
            textwrap.fill(note, COLUMNS, break_long_words=False, break_on_hyphens=False)
            for note in self.notes
        ]
        return "\n".join([self.title, "", body, *notes])

    def as_markdown(self) -> str:
        """A heading and a GitHub table."""
        headers = [header.replace("\n", " ") for header in self.headers]
        # A cell is broken inside a name; and GitHub takes what is in angle brackets for HTML.
        cells = [[c.replace("\n", "").replace("<", "\\<") for c in row] for row in self.cells]
        body = self._body("github", headers, cells)
        return "\n\n".join([f"### {self.title}", body, *self.notes])

    def _body(self, style: str, headers: list[str], cells: list[list[str]]) -> str:
        align = ["left"] + ["right"] * (len(self.headers) - 1)
        return tabulate(cells, headers, tablefmt=style, colalign=align, disable_numparse=True)


def tables(frame: pd.DataFrame) -> list[Table]:
    """Every table of a run: by cell, the step and its phases; then throughput, and the rest."""
    if frame.empty:
        return []
    summary = in_order(with_ratios(summarise(frame)))
    found: list[Table] = []
    for cell, rows in by_cell(summary):
        found += [
            _step_table(cell, rows),
            *_phase_table(cell, rows, "dram_bytes", "DRAM"),
            *_phase_table(cell, rows, "logical_bytes", "logical"),
            *_throughput_table(cell, rows),
        ]
    return [*found, *_other_metrics(summary)]


def in_order(summary: pd.DataFrame) -> pd.DataFrame:
    """The rows by cell, and within a cell by trainer, the baseline first; phases stay put."""
    rank = {name: position for position, name in enumerate(TRAINERS)}
    return summary.sort_values(
        [*CONFIGURATION, "device", "trainer"],
        key=lambda c: c.map(lambda name: rank.get(name, len(rank))) if c.name == "trainer" else c,
        kind="stable",
    )


def by_cell(summary: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Rows that share a baseline, with a title that says which and where they were measured."""
    for values, rows in summary.groupby([*CONFIGURATION, "device"], sort=False):
        cell = dict(zip([*CONFIGURATION, "device"], map(str, values), strict=True))
        extra = [cell[k] for k, v in (("attention", "sdpa"), ("model", "simple")) if cell[k] != v]
        what = ", ".join([f"{cell['model_size']} {cell['precision']}", *extra])
        where = cell["device"] or "unknown device"
        yield f"{what}, batch {cell['batch_size']}, sequence {cell['seq_len']}, {where}", rows


MEASURED = [
    ("DRAM\nread", "dram_read_bytes", "value"),
    ("DRAM\nwrite", "dram_write_bytes", "value"),
    ("DRAM\ntotal", "dram_bytes", "value"),
    ("DRAM\n÷ std", "dram_bytes", "ratio"),
    ("L2\ntotal", "l2_total_bytes", "value"),
    ("L2\n÷ std", "l2_total_bytes", "ratio"),
    ("peak\nmem.", "peak_memory_bytes", "value"),
    ("step\nms", "step_time_seconds", "value"),
]
COUNTED = [
    ("logical\nread", "logical_read_bytes", "value"),
    ("logical\nwrite", "logical_write_bytes", "value"),
    ("logical\ntotal", "logical_bytes", "value"),
    ("logical\n÷ std", "logical_bytes", "ratio"),
    ("peak\nmem.", "peak_memory_bytes", "value"),
]
"""Header, metric and whether its value or its ratio: of hardware, and of logical counting. The
two never share a table, for their rows name different devices."""


def _step_table(title: str, rows: pd.DataFrame) -> Table:
    step = rows[rows.phase == STEP]
    columns = COUNTED if (step.metric == "logical_bytes").any() else MEASURED
    cells = [
        [str(trainer), *(_cell(group, metric, column) for _, metric, column in columns)]
        for trainer, group in step.groupby("trainer", sort=False)
    ]
    headers = ["trainer"] + [header for header, _, _ in columns]
    return Table(f"{title}: GB per step", headers, cells, tuple(_notes(step)))


def _notes(step: pd.DataFrame) -> Iterator[str]:
    """What a reader must know to read the numbers right."""
    if BASELINE_TRAINER not in set(step.trainer):
        yield f"No ratio: the {BASELINE_TRAINER!r} trainer was not measured for this cell."
    for metric, name in (("dram_bytes", "DRAM"), ("l2_total_bytes", "L2")):
        low, high = EXPECTED_RATIOS[metric]
        ratios = step[(step.metric == metric) & (step.trainer != BASELINE_TRAINER)]
        outside = ratios[(ratios.ratio < low) | (ratios.ratio > high)]
        if not ratios.ratio.dropna().empty:
            names = ", ".join(
                f"{t} {r:.2f}" for t, r in zip(outside.trainer, outside.ratio, strict=True)
            )
            yield f"{name} expected {low:g} to {high:g} x standard; outside: {names or 'none'}."
    if (step[step.metric == "dram_bytes"].value < IN_CACHE_BYTES).any():
        yield "WARNING: at this size the data stays in the L2 cache; DRAM ratios mean nothing."


def _phase_table(title: str, rows: pd.DataFrame, metric: str, name: str) -> list[Table]:
    """Bytes by trainer and phase, with the ratio to the same phase of the baseline."""
    counted = rows[rows.metric == metric]
    smallest = counted.value.max() * SHOWN_SHARE
    phases = [p for p in (*PHASES, OUTSIDE) if (counted[counted.phase == p].value > smallest).any()]
    cells = []
    for trainer, group in counted.groupby("trainer", sort=False):
        line = [str(trainer)]
        for phase in phases:
            found = group[group.phase == phase]
            value = _cell(found, metric, "value")
            ratio = _cell(found, metric, "ratio")
            line.append(value if ratio == ABSENT else f"{value} ({ratio})")
        cells.append(line)
    if not phases:
        return []
    return [Table(f"{title}: {name} GB by phase (÷ standard)", ["trainer", *phases], cells)]


def _throughput_table(title: str, rows: pd.DataFrame) -> list[Table]:
    """Bytes per second of unprofiled step time, by trainer."""
    rates = throughputs(rows)
    names = {
        "dram_read_throughput": "DRAM\nread",
        "dram_write_throughput": "DRAM\nwrite",
        "dram_throughput": "DRAM\ntotal",
        "l2_read_throughput": "L2\nread",
        "l2_write_throughput": "L2\nwrite",
        "global_load_throughput": "global\nload",
        "global_store_throughput": "global\nstore",
    }
    shown = [name for name in names if (rates.metric == name).any()]
    cells = [
        [str(trainer), *(_cell(group, name, "value") for name in shown)]
        for trainer, group in rates.groupby("trainer", sort=False)
    ]
    if not cells:
        return []
    note = "Counted bytes ÷ step time of the unprofiled process."
    return [Table(f"{title}: GB/s", ["trainer", *(names[n] for n in shown)], cells, (note,))]


def _other_metrics(summary: pd.DataFrame) -> list[Table]:
    """Counters that were asked for by their own names, as the tool gives them."""
    extra = summary[summary.metric.str.contains("__") & (summary.phase == STEP)]
    cells = [
        [_case_label(row), str(row["metric"]), f"{row['value']:.6g} {row['unit']}"]
        for row in extra.to_dict("records")
    ]
    return [Table("Other counters, per step", ["case", "counter", "value"], cells)] if cells else []


def _case_label(case: Mapping[Any, Any]) -> str:
    return f"{case['trainer']} bs{case['batch_size']} seq{case['seq_len']}"


def _cell(rows: pd.DataFrame, metric: str, column: str) -> str:
    found = rows.loc[rows.metric == metric, column]
    if found.empty or pd.isna(found.iloc[0]):
        return ABSENT
    value = float(found.iloc[0])
    if column == "ratio":
        return f"{value:.2f}"
    if metric == "step_time_seconds":
        return f"{value * 1e3:.1f}"
    return gigabytes(value)


def gigabytes(value: float) -> str:
    """Bytes (or bytes per second) in units of 10⁹, with three digits or more."""
    scaled = value / 1e9
    if scaled < 0.1:
        return f"{scaled:.3g}"
    digits = 1 if scaled >= 10 else 2 if scaled >= 1 else 4
    return f"{scaled:.{digits}f}"


def as_text(found: Iterable[Table]) -> str:
    """Tables one below the other."""
    return "\n\n".join(table.as_text() for table in found)


def as_markdown(found: Iterable[Table]) -> str:
    """Tables one below the other, as Markdown."""
    return "\n\n".join(table.as_markdown() for table in found) + "\n"
