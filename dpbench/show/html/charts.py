"""The charts of the page: ratios, bytes, times, flame graph and ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pandas as pd

from dpbench.core.case import ALL_PHASES, AXES
from dpbench.core.errors import ConfigurationError
from dpbench.results.roofline import (
    additional,
    find_ceilings,
    time_breakdown,
)
from dpbench.results.rows import NO_HARDWARE, NUMBER, OF_CASE, PLACE, STEP
from dpbench.results.summary import IN_CACHE_BYTES
from dpbench.show.html.data import BYTES, CASE, COUNTED, KEYS, MEASURED, PageData, pivot, titles
from dpbench.show.html.figures import (
    NAMES,
    NEUTRAL,
    PHASE_COLOURS,
    Chart,
    Json,
    bar_chart,
    plain,
    times,
)
from dpbench.show.layout import Shown, Table, gigabytes, step_milliseconds
from dpbench.show.roofline import (
    ABOUT_SHARES,
    ADDED_COLUMNS,
    HOW_TO_READ,
    TIME_COLUMNS,
    lacking,
    launch_bound_notes,
    roofs_in_words,
)
from dpbench.show.tables import CONFIGURATION, SHOWN_SHARE, ordered

RATIO_COLOURS = ("#0072B2", "#E69F00", "#8C8C8C")
"""The colours of bytes, time and memory in the chart of ratios."""

BY_OPERATOR = "counted operator by operator without hardware, not measured"

IN_CACHE = (
    "Warning: some steps move less than 1 GB. At that size much of the data stays in the L2 cache, "
    "so ratios of DRAM bytes mislead."
)


def ratios(data: PageData) -> Chart | None:
    """Draw the bytes, time and peak memory of a step as ratios to the baseline.

    This is the main result of the page.
    """
    basis, baseline = data.basis, data.baseline
    names = {
        BYTES[basis]: f"{data.bytes_name} bytes",
        "step_time_seconds": "time",
        "peak_memory_bytes": "peak memory",
    }
    rows = data.summary[(data.summary.phase == STEP) & data.summary.ratio.notna()]
    rows = rows[(rows.trainer != rows.baseline) & (rows.basis == basis)]
    wide = pivot(rows.assign(value=rows.ratio), "metric").rename(columns=names)
    colours = {
        name: c for name, c in zip(names.values(), RATIO_COLOURS, strict=True) if name in wide
    }
    if not colours:
        return None
    return bar_chart(
        "ratios",
        f"A step's bytes, time and memory ÷ {baseline}'s",
        BY_OPERATOR if basis == COUNTED else "measured",
        wide.assign(end=wide[[*colours]].max(axis="columns"), label=""),
        colours,
        f"÷ {baseline}",
        unit="×",
        line=1.0,
    )


def step_times(data: PageData) -> Chart | None:
    """Draw the time of a step by trainer, stacked by phase, if steps were timed."""
    rows = data.summary[data.summary.metric == "step_time_seconds"]
    wide = pivot(rows, "phase")
    if STEP not in wide:
        return None
    steps = wide[KEYS].merge(rows[rows.phase == STEP].drop_duplicates(KEYS), "left", KEYS)
    ends = [f" {step_milliseconds(seconds)} ms" for seconds in wide[STEP]]
    ratio_text = ["" if pd.isna(ratio) else f" ({times(ratio)})" for ratio in steps.ratio]
    shown = [name for name in ALL_PHASES if name in wide]
    return bar_chart(
        "times",
        "Time of a step by trainer and phase",
        "times of unprofiled steps; medians over the steps",
        wide.assign(end=wide[STEP], label=[*map(str.__add__, ends, ratio_text)], ratio=steps.ratio),
        {name: PHASE_COLOURS[name] for name in shown} or {STEP: PHASE_COLOURS[STEP]},
        "ms per step (measured)",
        unit="ms",
        columns={f"{STEP}, ms": (STEP, step_milliseconds), f"÷ {data.baseline}": ("ratio", times)},
        stacked=True,
    )


def bytes_by_phase(data: PageData) -> Chart | None:
    """Draw bytes by trainer, stacked by phase, with a panel for each cell of the grid.

    A phase is left out if it has at most `SHOWN_SHARE` of the step's bytes in all cases. A failed
    case without bytes has the name of its error instead of a bar.
    """
    step = data.step_bytes
    wide = pivot(data.summary[data.summary.metric.isin(step.metric)], "phase")
    shown = [n for n in ALL_PHASES if n in wide and (wide[n] > SHOWN_SHARE * wide[STEP]).any()]
    if not shown:
        return None
    wide["ratio"] = wide[KEYS].merge(step, how="left").ratio
    if len(data.failed):
        failed = data.failed[[*CASE, "error"]]
        wide = ordered(pd.concat([wide, failed]).drop_duplicates(CASE), CASE)
    name = f"{data.bytes_name} bytes"
    return bar_chart(
        "phases",
        f"{name[0].upper()}{name[1:]} by trainer and phase",
        BY_OPERATOR if data.basis == COUNTED else "measured by hardware counters",
        wide.assign(end=wide[STEP], label=list(map(_end_of_bar, wide.to_dict("records")))),
        {name: PHASE_COLOURS[name] for name in shown},
        f"{data.bytes_name} GB per step ({data.basis})",
        columns={f"{STEP}, GB": (STEP, gigabytes), f"÷ {data.baseline}": ("ratio", times)},
        notes=[*_about_ratios(data)],
        stacked=True,
    )


def _end_of_bar(row: Mapping[Any, Any]) -> str:
    """Return the text at the end of a bar. For a failed case, the text is the name of the error."""
    if isinstance(row.get("error"), str):
        return f" failed: {plain(row['error'])}"
    ratio = "" if pd.isna(row["ratio"]) else f" ({times(row['ratio'])})"
    return f" {gigabytes(row[STEP])}{ratio}"


def _about_ratios(data: PageData) -> Iterator[str]:
    """Yield the notes on the bytes that the page shows and on the ratios of these bytes."""
    baseline, step = data.baseline, data.step_bytes
    yield f"At the end of a bar: GB of the whole step, and the ratio to the step of {baseline}."
    limits = data.expected.get(step.metric.iloc[0])
    if limits and len(data.ratios):
        low, high = limits
        yield f"Expected range: {low:g} to {high:g} times {baseline}'s bytes."
    if data.basis == MEASURED and (step.value < IN_CACHE_BYTES).any():
        yield IN_CACHE


# --- time breakdown --------------------------------------------------------------------------

TIME_COLOURS = {
    "step": "#7F8790",
    "arithmetic": "#0072B2",
    "bytes": "#E69F00",
    "idle": "#CC79A7",
}


def time(data: PageData) -> Chart | None:
    """Draw the time of each step, the least times for operations and bytes, and the idle time."""
    table, notes = _breakdown(data)
    basis = (
        "times of unprofiled steps; least times for counted operations and for measured DRAM bytes "
        "at measured ceilings, two bounds that overlap; idle time by hardware counters"
    )
    if table.empty:
        nothing = Table("Time breakdown", [], [], tuple(notes))
        return Chart("time", basis, nothing) if notes else None
    steps = table[table.phase == STEP]
    bars = {part: steps[f"{part}_seconds"] for part in TIME_COLOURS if part != STEP}
    bars[STEP] = steps.seconds
    chart = bar_chart(
        "time",
        "Time breakdown",
        basis,
        steps.assign(**bars, end=pd.DataFrame(bars).max(axis="columns"), label=""),
        TIME_COLOURS,
        "ms",
        unit="ms",
    )
    notes += [HOW_TO_READ, ABOUT_SHARES.format(data.baseline)]
    notes += [*launch_bound_notes(table), *lacking(table)]
    columns: dict[str, Shown] = {**NAMES, "phase": ("phase", str), **TIME_COLUMNS, **ADDED_COLUMNS}
    columns = {header.replace("\n", " "): shown for header, shown in columns.items()}
    return replace(chart, table=Table.of(chart.table.title, table, columns, notes))


def _breakdown(data: PageData) -> tuple[pd.DataFrame, list[str]]:
    """Divide the times of all runs into parts. Operations may be counted in another run.

    Returns:
        A table and notes. The table has the steps, and the phases that take more than `SHOWN_SHARE`
        of the time of their step, with the title of each configuration. A device without step times
        or DRAM bytes is left out. The notes have the roofs of devices, and name devices without
        known roofs.
    """
    tables, errors, roof_notes = [], [], []
    all_rows = pd.concat([run.summary for run in data.runs], ignore_index=True)
    counted = all_rows[all_rows.device == NO_HARDWARE].drop_duplicates(NUMBER)
    for run in data.runs:
        measured = run.summary[run.summary.device != NO_HARDWARE]
        for device, rows in measured.groupby("device", sort=False):
            if not {"step_time_seconds", "dram_read_bytes"} <= {*rows.metric}:
                continue
            try:
                roofs = data.ceilings or find_ceilings(str(device))
                table = time_breakdown(pd.concat([rows, counted], ignore_index=True), roofs)
            except ConfigurationError as error:
                errors.append(f"{device}: {error}.")
                continue
            added = additional(table, run.baseline).assign(phase=STEP).drop(columns=[*AXES])
            tables.append(table.merge(added, "left", PLACE).assign(run=run.name))
            roof_notes.append(roofs_in_words(roofs, sorted(set(table.precision))))
    if not tables:
        return pd.DataFrame(), errors
    table = pd.concat(tables, ignore_index=True)
    longest = table.groupby(["run", *OF_CASE], sort=False).seconds.transform("max")
    table = table[table.seconds > SHOWN_SHARE * longest]
    table = table.assign(title=titles(table, data.summary))
    table = ordered(table, [*CONFIGURATION, "device", "trainer", "phase"])
    return table, [*errors, *dict.fromkeys(roof_notes if len(table) else ())]


# --- flame graph -----------------------------------------------------------------------------

SMALLEST_BOX = 0.0005
"""A box is drawn if its share of the bytes of the step is larger than this."""

OUTSIDE_MODULES = "outside of modules"

FLAME_HEIGHT = 420

FLAME_COLUMNS: dict[str, Shown] = {
    "case": ("case", str),
    "phase": ("phase", str),
    "module": ("module", str),
    "operator": ("operator", str),
    "line": ("line", str),
    "GB": ("bytes", gigabytes),
}

FLAME_NOTE = (
    "The width of a box shows its bytes. Below a phase are its modules, below a module its "
    "operators, and below an operator the source lines that ran it. Click a box to show it alone, "
    "and click the top box to go up one level. Operators of backward have the modules and lines of "
    "forward. Boxes that are too small to draw leave an empty space."
)


def flames(data: PageData) -> Chart | None:
    """Draw a flame graph for each case whose operators have modules or source lines."""
    panels, lines = {}, []
    for run in data.runs:
        for outcome in run.outcomes:
            if any(each.module or each.line for each in outcome.operators):
                of_run = f", {run.name}" if len(data.runs) > 1 else ""
                name = f"{outcome.case.id}{of_run}"
                sizes: Counter[tuple[str, ...]] = Counter()
                for each in outcome.operators:
                    module = each.module or OUTSIDE_MODULES
                    sizes[each.phase, module, each.operator, each.line] += int(each.total_bytes)
                least = SMALLEST_BOX * sizes.total()
                panels[name] = _icicle(_boxes(sizes, least))
                lines += [(name, *place, size) for place, size in sizes.items() if size > least]
    if not panels:
        return None
    names = [name for name, _ in FLAME_COLUMNS.values()]
    rows = pd.DataFrame(lines, columns=names).sort_values("bytes", ascending=False, kind="stable")
    table = Table.of("Bytes by module, operator and source line", rows, FLAME_COLUMNS, [FLAME_NOTE])
    return Chart("flames", BY_OPERATOR, table, panels)


def _boxes(sizes: Mapping[tuple[str, ...], int], least: float) -> dict[tuple[str, ...], int]:
    """Return a dictionary from the path of each box to the bytes of the box.

    The path of the step is ``()``. Paths below the step have a phase, each module that contains the
    operator, the operator, and the source line. Boxes of at most ``least`` bytes are left out.
    """
    boxes: Counter[tuple[str, ...]] = Counter()
    for (phase, module, *rest), size in sizes.items():
        place = phase, *accumulate(module.split("."), "{}.{}".format), *rest
        for depth in range(len(place) + 1):
            boxes[place[:depth]] += size
    return {place: size for place, size in boxes.items() if size > least or not place}


def _icicle(boxes: Mapping[tuple[str, ...], int]) -> Json:
    number = {place: str(at) for at, place in enumerate(boxes)}
    trace = {
        "type": "icicle",
        "ids": [*number.values()],
        "labels": [plain(place[-1], longest=60) if place else "step" for place in boxes],
        "parents": [number[place[:-1]] if place else "" for place in boxes],
        "values": [*boxes.values()],
        "branchvalues": "total",
        "sort": True,
        "tiling": {"orientation": "v"},
        "marker": {"colors": [PHASE_COLOURS.get(p[0], NEUTRAL) if p else NEUTRAL for p in boxes]},
        "texttemplate": "%{label}",
        "hovertemplate": "%{label}<br>%{value:.3s}B, %{percentRoot:.1%} of the step<extra></extra>",
        "pathbar": {"visible": False},
    }
    layout = {
        "height": FLAME_HEIGHT,
        "margin": {"t": 4, "r": 4, "b": 4, "l": 4},
        "uniformtext": {"minsize": 10, "mode": "hide"},
    }
    return {"data": [trace], "layout": layout}
