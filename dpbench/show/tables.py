"""Which tables there are of a run: the cases in groups, and what is said of each group."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from dpbench.case import ALL_PHASES, AXES, BASELINE_TRAINER, SCRIPT, Case, trained_in, unusual
from dpbench.metrics import EXPECTED_BY, METRICS, ratio_name
from dpbench.registry import TRAINERS
from dpbench.results.frame import (
    CONFIGURATION,
    IN_CACHE_BYTES,
    of_one_instrument,
    summarise,
    throughputs,
    with_logical,
    with_ratios,
)
from dpbench.results.roofline import BUSY, LAUNCH_BOUND
from dpbench.results.rows import STEP
from dpbench.show.layout import ABSENT, Table, gigabytes, three_digits
from dpbench.show.view import (
    NAME,
    OF_TESTS,
    PARAM,
    Column,
    View,
    column,
    rates,
    shown_by_default,
)

SHOWN_SHARE = 1e-3
"""A phase gets a column if it moves at least this share of the step."""

AGAINST_LOGICAL = (
    "Logical: counted without hardware, each operator reading its inputs and writing its "
    "outputs once.",
    "Above 1 the hardware reads them again, below 1 the L2 cache keeps some of them.",
)

Row = dict[Any, Any]
"""A row of a summary: its columns by name."""


def complete(frame: pd.DataFrame) -> pd.DataFrame:
    """The summary of a long table with everything that a table can show.

    Throughputs included; with the columns of `with_ratios` and `with_logical`. ``spread`` is NaN
    where there was one step; ``has_baseline`` says whether standard training was measured in
    the cell, ``in_cache`` whether the case moves so little that DRAM ratios mean nothing.
    """
    summary = of_one_instrument(summarise(frame))
    rates = throughputs(summary)
    if not rates.empty:
        summary = pd.concat([summary, rates], ignore_index=True)
    summary["spread"] = summary.spread.where(summary.repeats > 1)
    summary = with_logical(with_ratios(summary))
    dram_step = (summary.metric == "dram_bytes") & (summary.phase == STEP)
    return summary.assign(
        has_baseline=_in_any(summary.trainer == BASELINE_TRAINER, summary, CONFIGURATION),
        in_cache=_in_any(dram_step & (summary.value < IN_CACHE_BYTES), summary, AXES),
    )


def _in_any(holds: pd.Series[bool], rows: pd.DataFrame, by: Iterable[str]) -> pd.Series[bool]:
    """Whether something holds for any row with the same values along ``by`` and device."""
    return holds.groupby([rows[name] for name in (*by, "device")]).transform("any")


def tables(frame: pd.DataFrame, view: View | None = None) -> list[Table]:
    """Every table of a run: by cell, the step and its phases; then throughput, and the rest.

    A view with columns gets one table a group, of these columns and nothing else.
    """
    # Tables of these: `show.profile`, `show.timeline`.
    frame = frame[~frame.instrument.isin(["torch_profiler", "nsys"])]
    if frame.empty:
        return []
    view = view or View()
    summary = view.under_tests(complete(frame))
    listed: list[Table] = []
    for group in groups(summary, view):
        listed += _step_table(group, view)
        if not (view.columns or group.by_phase):
            listed += _phase_table(group, "dram_bytes", "DRAM GB")
            listed += _phase_table(group, "logical_bytes", "logical GB")
            if any(row["workload"] == SCRIPT for row in group.rows.values()):
                listed += _phase_table(group, "step_time_seconds", "ms")
            listed += _busy_table(group)
            listed += [*against_logical(group), *_throughput_table(group)]
    return listed if view.columns else [*listed, *_other_metrics(in_order(summary))]


# --- groups ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Cases that share a table.

    ``rows`` are theirs, by label (which tells them apart), phase and metric; ``labels`` are in the
    order of the view. ``phase`` is what the first table shows: whole steps, or the phase that the
    group is of; ``one_cell`` whether the cases share a baseline.
    """

    title: str
    rows: dict[tuple[str, str, str], Row]
    labels: list[str]
    phase: str
    first_header: str
    by_phase: bool
    one_cell: bool

    @property
    def shown(self) -> dict[str, list[Row]]:
        """The cases that have rows of the group's phase, with these."""
        cases: dict[str, list[Row]] = {label: [] for label in self.labels}
        for (label, phase, _), row in self.rows.items():
            if phase == self.phase:
                cases[label].append(row)
        return {label: rows for label, rows in cases.items() if rows}

    def find(self, label: str, shown: Column, phase: str | None = None) -> list[Row]:
        """The rows of a case that have a number for a column."""
        rows = (self.rows.get((label, phase or self.phase, name)) for name in shown.metrics)
        return [row for row in rows if row and not math.isnan(row[shown.kind])]

    def having(self, *columns: Column, phases: Iterable[str] = (*ALL_PHASES, STEP)) -> list[str]:
        """The cases with a number of any of these columns in any of these phases."""
        wanted = [(c, phase) for c in columns for phase in phases]
        return [label for label in self.labels if any(self.find(label, *w) for w in wanted)]

    def cell(self, label: str, shown: Column, phase: str | None = None) -> str:
        """A case's number in a column, for people; `ABSENT` where there is none."""
        rows = self.find(label, shown, phase)
        if not rows:
            return ABSENT
        value, unit = rows[0][shown.kind], rows[0]["unit"]
        if shown.kind == "spread":
            return f"{max(row['spread'] for row in rows):.2%}"
        if shown.kind != "value":
            return f"{value:.2f}"
        if "__" in shown.name:  # as the tool gives it
            return f"{value:.6g} {unit}"
        if shown.name.endswith("_share"):
            return f"{value:.0%}"
        if shown.name == "samples_per_second":
            return three_digits(value)
        return f"{value * 1e3:.1f}" if unit == "s" else gigabytes(value)


def in_order(summary: pd.DataFrame) -> pd.DataFrame:
    """The rows by cell, and within a cell by trainer, the baseline first; phases stay put."""
    return _sorted(summary, [*CONFIGURATION, "device", "trainer"])


def _sorted(rows: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Rows by these columns: trainers as registered, phases as they come in a step."""
    phases = [*ALL_PHASES, STEP]

    def places(column: pd.Series[Any]) -> pd.Series[Any]:
        if column.name == "trainer":
            return column.map(TRAINERS.rank)
        return column.map(phases.index) if column.name == "phase" else column

    return rows.sort_values(keys, key=places, kind="stable")


def by_cell(summary: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Rows that share a baseline, with a title that says which and where they were measured."""
    keys = [*CONFIGURATION, "device"]
    for values, rows in summary.groupby(keys, sort=False):
        yield title_of(dict(zip(keys, values, strict=True))), rows


def groups(summary: pd.DataFrame, view: View) -> Iterator[Group]:
    """The groups of a summary, in order, the cases of each in the order of the view."""
    named = [k for name in view.group_by for k in (CONFIGURATION if name == "cell" else [name])]
    keys = list(dict.fromkeys([*(name for name in named if name != "device"), "device"]))
    always = ("trainer", "batch_size", "seq_len")
    labels = [
        axis
        for axis in AXES
        if axis not in keys and (axis in always or summary[axis].nunique() > 1)
    ] or ["trainer"]
    rows = _sorted(in_order(summary), keys)
    prefixes = {"batch_size": "bs", "seq_len": "seq"}  # as in `Case.id`
    parts = [
        (prefixes.get(axis, "") + rows[axis].astype(str)).where(rows[axis].astype(bool), "")
        for axis in labels
    ]
    rows = rows.assign(label=[" ".join(filter(None, names)) for names in zip(*parts, strict=True)])
    for values, group in rows.groupby(keys, sort=False):
        shared = dict(zip(keys, values, strict=True))
        # What is the same everywhere is said once.
        shared |= {a: group[a].iloc[0] for a in AXES if a not in (*keys, *labels)}
        if view.sort in AXES:
            group = _sorted(group, [view.sort])
        made = Group(
            title=title_of(shared),
            rows={(r["label"], r["phase"], r["metric"]): r for r in group[::-1].to_dict("records")},
            labels=list(dict.fromkeys(group.label)),
            phase=str(shared.get("phase", STEP)),
            first_header="trainer" if labels == ["trainer"] else "case",
            by_phase="phase" in keys,
            one_cell=set(CONFIGURATION) <= set(keys),
        )
        yield replace(made, labels=_by_column(made, view.sort))


def _by_column(group: Group, name: str | None) -> list[str]:
    """The labels by the numbers of a column; those that have none go last."""
    if name is None or name in AXES:
        return group.labels
    if name == NAME:
        return sorted(group.labels)
    shown = column(name)
    numbers = {
        label: max((row[shown.kind] for row in group.find(label, shown)), default=math.inf)
        for label in group.labels
    }
    return sorted(group.labels, key=lambda label: numbers[label])


def title_of(shared: Mapping[str, Any]) -> str:
    """What some rows share, in words; the usual attention and model go without saying."""
    if shared.get("workload") == SCRIPT:
        return str(shared["device"])
    size = " ".join(filter(None, (trained_in(shared), shared.get("precision"))))
    of_test = [str(shared[k]) for k in shared if k in OF_TESTS or str(k).startswith(PARAM)]
    parts = [*of_test, shared.get("trainer", ""), size]
    usual = {"attention": "sdpa", "model": "simple"}
    parts += [shared[axis] for axis, name in usual.items() if shared.get(axis) not in (name, None)]
    parts += [f"{axis.replace('_', ' ')} {value}" for axis, value in unusual(shared).items()]
    words = {"batch_size": "batch", "seq_len": "sequence", "phase": "phase"}
    parts += [f"{word} {shared[axis]}" for axis, word in words.items() if shared.get(axis)]
    return ", ".join([*filter(None, parts), shared["device"] or "unknown device"])


# --- the step --------------------------------------------------------------------------------


def _step_table(group: Group, view: View) -> Iterator[Table]:
    columns = _columns(group, view)
    labels = list(group.shown)
    if columns and labels:
        in_bytes = any(c.kind == "value" and c.name.endswith("_bytes") for c in columns)
        yield Table(
            f"{group.title}: {'GB per step' if in_bytes else 'per step'}",
            [group.first_header, *(shown.header for shown in columns)],
            [[label, *(group.cell(label, shown) for shown in columns)] for label in labels],
            tuple(_notes(group, columns, view)),
        )


def _columns(group: Group, view: View) -> list[Column]:
    """The columns that were asked for, or else those of the group's instrument.

    A group of one phase leaves out what is known of whole steps only, and a group that has
    none of what was asked for (logical bytes of hardware, say) all of it.
    """
    logical = any(
        (phase, metric) == (group.phase, "logical_bytes") for _, phase, metric in group.rows
    )
    chosen = view.columns or shown_by_default(logical=logical)
    filled = [shown for shown in chosen if group.having(shown, phases=[group.phase])]
    if group.by_phase and not view.columns:
        return filled
    if not view.columns:  # not every chip and instrument says how busy the GPU was
        return [shown for shown in chosen if shown in filled or shown.name != BUSY]
    return list(chosen) if filled else []


def _notes(group: Group, columns: list[Column], view: View) -> Iterator[str]:
    """What a reader must know to read the numbers right."""
    cases = group.shown
    ratios = {c.metrics[0]: c for c in columns if c.kind == "ratio"}
    alone = [label for label, rows in cases.items() if not any(r["has_baseline"] for r in rows)]
    said = f"the {BASELINE_TRAINER!r} trainer was not measured for"
    if ratios and len(alone) == len(cases):
        yield f"No ratio: {said} {'this cell' if group.one_cell else 'these cells'}."
    elif ratios and alone:
        yield f"No ratio for {', '.join(alone)}: {said} their cells."
    for metric, (low, high) in view.expected.items():
        if metric in ratios and group.phase == STEP:
            found = [(label, row) for label in cases for row in group.find(label, ratios[metric])]
            known = {k: row["ratio"] for k, row in found if row["trainer"] != BASELINE_TRAINER}
            outside = [f"{label} {r:.2f}" for label, r in known.items() if not low <= r <= high]
            if known:
                name, names = METRICS[metric].short_header, ", ".join(outside) or "none"
                yield f"{name} {EXPECTED_BY}: {low:g} to {high:g} x standard; outside: {names}."
    if not any(c.kind == "spread" for c in columns) and (spreads := _spreads(group, columns)):
        yield f"Largest spread, (max - min) / value: {', '.join(spreads)}."
    in_cache = any(row["in_cache"] for rows in cases.values() for row in rows)
    if in_cache and any(c.name.startswith("dram_") for c in columns):
        yield "WARNING: at this size the data stays in the L2 cache; DRAM ratios mean nothing."
    if group.phase == STEP and any(c.name == BUSY for c in columns):
        rows = [row for label in cases for row in group.find(label, column(BUSY))]
        if idle := [row["label"] for row in rows if row["value"] < LAUNCH_BOUND]:
            yield (
                f"Busy below {LAUNCH_BOUND:.0%}: the step of {', '.join(idle)} waits for its "
                f"launches; bytes do not explain its time."
            )


def _spreads(group: Group, columns: list[Column]) -> list[str]:
    """The largest spread of each column, with the case and the number of steps it is over."""
    parts = []
    for shown in columns:
        if shown.kind != "value" or shown.metrics[0] not in column("spread").metrics:
            continue
        spread = replace(shown, kind="spread")
        rows = [row for label in group.labels for row in group.find(label, spread)]
        if rows:
            worst = max(rows, key=lambda row: row["spread"])
            name = shown.header.replace("\n", " ").removesuffix(" ms")
            steps = f"{worst['repeats']:.0f} steps"
            parts.append(f"{name} {worst['spread']:.2%} ({worst['label']}, {steps})")
    return parts


# --- phases ----------------------------------------------------------------------------------


def _phases_shown(group: Group, metric: str) -> list[str]:
    """The phases in which any of the cases moves enough to be worth a column."""
    most = dict.fromkeys((*ALL_PHASES, STEP), 0.0)
    for (_, phase, name), row in group.rows.items():
        if name == metric:
            most[phase] = max(most[phase], row["value"])
    return [phase for phase in ALL_PHASES if most[phase] > max(most.values()) * SHOWN_SHARE]


def _phase_table(group: Group, metric: str, name: str) -> Iterator[Table]:
    """Bytes by case and phase, with the ratio to the same phase of the baseline."""
    value, ratio = column(metric), column(ratio_name(metric))
    phases = _phases_shown(group, metric)
    cells = []
    for label in group.having(value):
        numbers = [(group.cell(label, value, p), group.cell(label, ratio, p)) for p in phases]
        cells.append([label, *(n if r == ABSENT else f"{n} ({r})" for n, r in numbers)])
    if phases:
        title = f"{group.title}: {name} by phase (÷ standard)"
        yield Table(title, [group.first_header, *phases], cells)


def _busy_table(group: Group) -> Iterator[Table]:
    """For which part of each phase's time the GPU did anything, by case."""
    busy, phases = column(BUSY), _phases_shown(group, "gpu_elapsed_cycles")
    cells = [
        [label, *(group.cell(label, busy, phase) for phase in (*phases, STEP))]
        for label in group.having(busy)
    ]
    if cells and phases:
        note = "Phases are synchronized at their borders, the whole step is not."
        headers = [group.first_header, *phases, STEP]
        yield Table(f"{group.title}: busy by phase", headers, cells, (note,))


def against_logical(group: Group) -> Iterator[Table]:
    """How often the hardware moves what an ideal unfused step moves once, where both are known.

    By case: DRAM and logical bytes of the step, and their quotient by phase and for the step.
    """
    times = column("dram_over_logical")
    phases = [*_phases_shown(group, "dram_bytes"), STEP]
    cells = []
    for label in group.having(times):
        step = group.rows.get((label, STEP, "dram_bytes"))
        totals = [gigabytes(step[c]) for c in ("value", "logical")] if step else [ABSENT, ABSENT]
        cells.append([label, *totals, *(group.cell(label, times, phase) for phase in phases)])
    if cells:
        headers = [group.first_header, "DRAM\nGB", "logical\nGB", *phases]
        yield Table(f"{group.title}: DRAM measured ÷ logical", headers, cells, AGAINST_LOGICAL)


# --- throughput and other counters -----------------------------------------------------------


def _throughput_table(group: Group) -> Iterator[Table]:
    """Bytes per second of unprofiled step time, by case."""
    headers = {rate: metric.header for metric, rate in rates() if metric.throughput}
    shown = [rate for rate in headers if group.having(rate, phases=[STEP])]
    if shown:
        cells = [
            [label, *(group.cell(label, rate) for rate in shown)]
            for label in group.having(*shown, phases=[STEP])
        ]
        note = "Counted bytes ÷ step time of the unprofiled process."
        first = [group.first_header]
        yield Table(f"{group.title}: GB/s", first + [headers[r] for r in shown], cells, (note,))


def _other_metrics(summary: pd.DataFrame) -> list[Table]:
    """Counters that were asked for by their own names, as the tool gives them."""
    step = summary[(summary.phase == STEP) & (summary.unit != "B/s")]
    cells = [
        [
            Case.from_row(row).id,
            str(row["metric"]),
            f"{row['value']:.6g} {row['unit']}",
        ]
        for row in step[step.metric.str.contains("__")].to_dict("records")
    ]
    return [Table("Other counters, per step", ["case", "counter", "value"], cells)] if cells else []
