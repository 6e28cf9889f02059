"""Which tables there are of a run; how they look is in `layout`, what is wanted in `view`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from dpbench.case import ALL_PHASES, AXES, BASELINE_TRAINER
from dpbench.metrics import EXPECTED_BY, METRICS, ratio_name
from dpbench.results.frame import (
    CONFIGURATION,
    IN_CACHE_BYTES,
    of_one_instrument,
    summarise,
    throughputs,
    with_logical,
    with_ratios,
)
from dpbench.results.rows import STEP
from dpbench.show.groups import Group, Metrics, found, groups, in_order
from dpbench.show.layout import ABSENT, Table, gigabytes, three_digits
from dpbench.show.view import Column, View, column, rates, shown_by_default

BUSY = "gpu_busy_share"

LAUNCH_BOUND = 0.7
"""A step whose GPU is busy for less than this part of its time waits for its launches."""

SHOWN_SHARE = 1e-3
"""A phase gets a column if it moves at least this share of the step."""


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
    cell, case = [*CONFIGURATION, "device"], [*AXES, "device"]
    moves_little = (summary.metric == "dram_bytes") & (summary.value < IN_CACHE_BYTES)
    return summary.assign(
        has_baseline=_holds_for_any(summary, summary.trainer == BASELINE_TRAINER, cell),
        in_cache=_holds_for_any(summary, moves_little & (summary.phase == STEP), case),
    )


def _holds_for_any(summary: pd.DataFrame, holds: pd.Series[bool], by: list[str]) -> pd.Series[bool]:
    """Whether something holds for any row with the same values along ``by``."""
    return holds.groupby([summary[name] for name in by]).transform("any")


def tables(frame: pd.DataFrame, view: View | None = None) -> list[Table]:
    """Every table of a run: by cell, the step and its phases; then throughput, and the rest.

    A view with columns gets one table a group, of these columns and nothing else.
    """
    frame = frame[frame.instrument != "torch_profiler"]  # its tables: results.profile_report
    return [] if frame.empty else tables_of_summary(complete(frame), view or View())


def tables_of_summary(summary: pd.DataFrame, view: View) -> list[Table]:
    """The same, from what `complete` made."""
    listed: list[Table] = []
    for group in groups(summary, view):
        listed += [
            *_step_table(group, _shown_columns(group, view), view),
            *([] if view.columns or group.by_phase else _detail(group)),
        ]
    if view.columns:
        return listed
    return [*listed, *_other_metrics(in_order(summary))]


def _detail(group: Group) -> Iterator[Table]:
    yield from _phase_table(group, "dram_bytes", "DRAM")
    yield from _phase_table(group, "logical_bytes", "logical")
    yield from _busy_table(group)
    yield from against_logical(group)
    yield from _throughput_table(group)


# --- one number a case and column ------------------------------------------------------------


def _shown_columns(group: Group, view: View) -> list[Column]:
    """The columns that were asked for, or else those of the group's instrument.

    A group of one phase leaves out what is known of whole steps only, and a group that has
    none of what was asked for (logical bytes of hardware, say) all of it.
    """
    cases = group.shown.values()
    logical = any("logical_bytes" in metrics for metrics in cases)
    chosen = view.columns or shown_by_default(logical=logical)
    filled = [shown for shown in chosen if any(found(metrics, shown) for metrics in cases)]
    if group.by_phase and not view.columns:
        return filled
    if not view.columns:  # not every chip and instrument says how busy the GPU was
        return [shown for shown in chosen if shown in filled or shown.name != BUSY]
    return list(chosen) if filled else []


def _cell(metrics: Metrics, shown: Column) -> str:
    """One case's number in a column, for people; `ABSENT` where there is none."""
    numbers = found(metrics, shown)
    if not numbers:
        return ABSENT
    if shown.kind == "spread":
        return f"{max(number for number, _ in numbers):.2%}"
    value, row = numbers[0]
    if shown.kind != "value":
        return f"{value:.2f}"
    if "__" in shown.name:  # as the tool gives it
        return f"{value:.6g} {row['unit']}"
    if shown.name.endswith("_share"):
        return f"{value:.0%}"
    if shown.name == "samples_per_second":
        return three_digits(value)
    return f"{value * 1e3:.1f}" if row["unit"] == "s" else gigabytes(value)


def _lines(cases: Mapping[str, Metrics], columns: Iterable[Column]) -> list[list[str]]:
    columns = list(columns)
    return [[label, *(_cell(metrics, c) for c in columns)] for label, metrics in cases.items()]


# --- the step --------------------------------------------------------------------------------


def _step_table(group: Group, columns: list[Column], view: View) -> list[Table]:
    if not columns or not group.shown:
        return []
    in_bytes = any(c.kind == "value" and c.name.endswith("_bytes") for c in columns)
    title = f"{group.title}: {'GB per step' if in_bytes else 'per step'}"
    headers = [group.first_header] + [shown.header for shown in columns]
    cells = _lines(group.shown, columns)
    return [Table(title, headers, cells, tuple(_notes(group, columns, view)))]


def _notes(group: Group, columns: list[Column], view: View) -> Iterator[str]:
    """What a reader must know to read the numbers right."""
    ratios = {c.metrics[0] for c in columns if c.kind == "ratio"}
    if ratios:
        yield from _without_baseline(group)
    for metric, limits in view.expected.items():
        if metric in ratios and group.phase == STEP:
            yield from _expectation(group, metric, limits)
    if not any(c.kind == "spread" for c in columns):
        yield from _spread(group, columns)
    if any(c.name.startswith("dram_") for c in columns) and _any(group, "in_cache"):
        yield "WARNING: at this size the data stays in the L2 cache; DRAM ratios mean nothing."
    if group.phase == STEP and any(c.name == BUSY for c in columns):
        yield from _launch_bound(group)


def _any(group: Group, flag: str) -> bool:
    return any(row[flag] for metrics in group.shown.values() for row in metrics.values())


def _without_baseline(group: Group) -> Iterator[str]:
    missing = [
        label
        for label, metrics in group.shown.items()
        if not any(row["has_baseline"] for row in metrics.values())
    ]
    said = f"the {BASELINE_TRAINER!r} trainer was not measured for"
    if len(missing) == len(group.shown):
        yield f"No ratio: {said} {'this cell' if group.one_cell else 'these cells'}."
    elif missing:
        yield f"No ratio for {', '.join(missing)}: {said} their cells."


def _expectation(group: Group, metric: str, limits: tuple[float, float]) -> Iterator[str]:
    low, high = limits
    ratios = {
        label: metrics[metric]["ratio"]
        for label, metrics in group.shown.items()
        if metric in metrics and metrics[metric]["trainer"] != BASELINE_TRAINER
    }
    known = {label: ratio for label, ratio in ratios.items() if not math.isnan(ratio)}
    if known:
        outside = [f"{label} {r:.2f}" for label, r in known.items() if not low <= r <= high]
        names = ", ".join(outside) or "none"
        name = METRICS[metric].short_header
        yield f"{name} {EXPECTED_BY}: {low:g} to {high:g} x standard; outside: {names}."


def _launch_bound(group: Group) -> Iterator[str]:
    idle = [
        label
        for label, metrics in group.shown.items()
        if BUSY in metrics and metrics[BUSY]["value"] < LAUNCH_BOUND
    ]
    if idle:
        yield (
            f"Busy below {LAUNCH_BOUND:.0%}: the step of {', '.join(idle)} waits for its launches; "
            f"bytes do not explain its time."
        )


def _spread(group: Group, columns: list[Column]) -> Iterator[str]:
    """The largest spread of what is shown, with the case and the number of steps it is over."""
    parts = []
    for shown in columns:
        if shown.kind != "value" or shown.metrics[0] not in column("spread").metrics:
            continue
        spreads = {
            label: (number, row["repeats"])
            for label, metrics in group.shown.items()
            for number, row in found(metrics, replace(shown, kind="spread"))
        }
        if spreads:
            label, (worst, steps) = max(spreads.items(), key=lambda item: item[1][0])
            name = shown.header.replace("\n", " ").removesuffix(" ms")
            parts.append(f"{name} {worst:.2%} ({label}, {steps:.0f} steps)")
    if parts:
        yield f"Largest spread, (max - min) / value: {', '.join(parts)}."


# --- phases ----------------------------------------------------------------------------------


def _phases_shown(group: Group, metric: str) -> list[str]:
    """The phases in which any of the cases moves enough to be worth a column."""
    most = {
        phase: max((m[metric]["value"] for m in group.at(phase).values() if metric in m), default=0)
        for phase in (*ALL_PHASES, STEP)
    }
    smallest = max(most.values()) * SHOWN_SHARE
    return [phase for phase in ALL_PHASES if most[phase] > smallest]


def _phase_table(group: Group, metric: str, name: str) -> Iterator[Table]:
    """Bytes by case and phase, with the ratio to the same phase of the baseline."""
    value, ratio = column(metric), column(ratio_name(metric))
    phases = _phases_shown(group, metric)
    cells = []
    for label, case in _having(group, value).items():
        line = [label]
        for phase in phases:
            metrics = case.get(phase, {})
            share = _cell(metrics, ratio)
            line.append(_cell(metrics, value) + ("" if share == ABSENT else f" ({share})"))
        cells.append(line)
    if phases:
        title = f"{group.title}: {name} GB by phase (÷ standard)"
        yield Table(title, [group.first_header, *phases], cells)


def _busy_table(group: Group) -> Iterator[Table]:
    """For which part of each phase's time the GPU did anything, by case."""
    busy = column(BUSY)
    cases = _having(group, busy)
    phases = _phases_shown(group, "gpu_elapsed_cycles")
    cells = [
        [label, *(_cell(case.get(phase, {}), busy) for phase in (*phases, STEP))]
        for label, case in cases.items()
    ]
    if cells and phases:
        note = "Phases are synchronized at their borders, the whole step is not."
        headers = [group.first_header, *phases, STEP]
        yield Table(f"{group.title}: busy by phase", headers, cells, (note,))


def _having(group: Group, shown: Column) -> dict[str, dict[str, Metrics]]:
    """The cases with a number of a column, in whatever phase."""
    return {
        label: phases
        for label, phases in group.cases.items()
        if any(found(metrics, shown) for metrics in phases.values())
    }


def against_logical(group: Group) -> Iterator[Table]:
    """How often the hardware moves what an ideal unfused step moves once, where both are known.

    By case: DRAM and logical bytes of the step, and their quotient by phase and for the step.
    """
    times = column("dram_over_logical")
    phases = [*_phases_shown(group, "dram_bytes"), STEP]
    cells = []
    for label, case in _having(group, times).items():
        step = case.get(STEP, {}).get("dram_bytes")
        totals = [gigabytes(step[c]) for c in ("value", "logical")] if step else [ABSENT, ABSENT]
        cells.append([label, *totals, *(_cell(case.get(phase, {}), times) for phase in phases)])
    if cells:
        headers = [group.first_header, "DRAM\nGB", "logical\nGB", *phases]
        yield Table(f"{group.title}: DRAM measured ÷ logical", headers, cells, AGAINST_LOGICAL)


AGAINST_LOGICAL = (
    "Logical: counted without hardware, each operator reading its inputs and writing its "
    "outputs once.",
    "Above 1 the hardware reads them again, below 1 the L2 cache keeps some of them.",
)


# --- throughput and other counters -----------------------------------------------------------


def _throughput_table(group: Group) -> Iterator[Table]:
    """Bytes per second of unprofiled step time, by case."""
    headed = [(metric.header, rate) for metric, rate in rates() if metric.throughput]
    cases = group.shown
    filled = [(h, c) for h, c in headed if any(found(metrics, c) for metrics in cases.values())]
    if filled:
        shown = [column for _, column in filled]
        having = {k: m for k, m in cases.items() if any(found(m, c) for c in shown)}
        headers = [group.first_header, *(header for header, _ in filled)]
        note = "Counted bytes ÷ step time of the unprofiled process."
        yield Table(f"{group.title}: GB/s", headers, _lines(having, shown), (note,))


def _other_metrics(summary: pd.DataFrame) -> list[Table]:
    """Counters that were asked for by their own names, as the tool gives them."""
    step = summary[(summary.phase == STEP) & (summary.unit != "B/s")]
    cells = [
        [_case_label(row), str(row["metric"]), f"{row['value']:.6g} {row['unit']}"]
        for row in step[step.metric.str.contains("__")].to_dict("records")
    ]
    return [Table("Other counters, per step", ["case", "counter", "value"], cells)] if cells else []


def _case_label(case: Mapping[Any, Any]) -> str:
    return f"{case['trainer']} bs{case['batch_size']} seq{case['seq_len']}"
