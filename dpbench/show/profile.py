"""What the PyTorch profiler recorded of a case, as tables and as one text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from dpbench.case import ALL_PHASES, AXES
from dpbench.metrics import METRICS, Metric
from dpbench.results.frame import summarise, to_frame
from dpbench.results.rows import STEP, Measurement
from dpbench.show.layout import ABSENT, Table, as_text, gigabytes

TOP = 20
"""Operators in a table."""

SHAPES_WIDTH = 60

REPORT_WIDTH = 120
"""A report is a file, not a terminal."""


def profile_tables(frame: pd.DataFrame) -> list[Table]:
    """For each profiled case of a long table: time, memory and copies by phase."""
    profiled = frame[frame.instrument == "torch_profiler"]
    if profiled.empty:
        return []
    summary = summarise(profiled)
    return [
        _phases(f"{_title(rows.iloc[0])}: PyTorch profiler, per step", rows)
        for _, rows in summary.groupby([*AXES, "device"], sort=False)
    ]


def _title(row: pd.Series[Any]) -> str:
    usual = {"attention": "sdpa", "model": "simple"}
    extra = [f" {row[axis]}" for axis, name in usual.items() if row[axis] != name]
    what = f"{row['trainer']}, {row['model_size']} {row['precision']}{''.join(extra)}"
    return f"{what}, batch {row['batch_size']}, sequence {row['seq_len']}, {row['device']}"


def _phases(title: str, summary: pd.DataFrame) -> Table:
    """Time, memory and copies by phase, one line a phase."""
    found = summary.pivot(index="phase", columns="metric", values="value")
    found = found.reindex([p for p in (*ALL_PHASES, STEP) if p in found.index])
    shown = [m for m in METRICS.had_by("torch_profiler") if m.name in found and found[m.name].any()]
    cells = [
        [str(phase), *(_number(line.get(m.name), m.unit) for m in shown)]
        for phase, line in found.iterrows()
    ]
    note = ""
    if "device_time_seconds" in found:
        ratio = found.cpu_time_seconds[STEP] / found.device_time_seconds[STEP]
        note = f"CPU time ÷ GPU time: {ratio:.2f}. GPU time is counted where it was launched."
    return Table(title, ["phase", *(_header(m) for m in shown)], cells, (note,) if note else ())


def _header(metric: Metric) -> str:
    return metric.header + (" GB" if metric.unit == "B" else "")


def _number(value: Any, unit: str) -> str:
    if value is None or pd.isna(value):
        return ABSENT
    return gigabytes(float(value)) if unit == "B" else f"{float(value) * 1e3:.2f}"


def copies_table(launches: Sequence[Mapping[str, Any]], steps: int) -> list[Table]:
    """Copies and memsets by phase and by the operator that asked for them; none on the CPU."""
    copies = pd.DataFrame([launch for launch in launches if launch["kind"] != "kernel"])
    if copies.empty:
        return []
    copies = copies.sort_values("bytes", ascending=False, kind="stable")
    cells = [
        [
            f"{line['phase']}: {line['name'].partition(' (')[0]}",
            f"{line['count'] / steps:g}",
            gigabytes(line["bytes"] / steps),
            line["operator"] or ABSENT,
            line["called_by"] or ABSENT,
        ]
        for line in copies.head(TOP).to_dict("records")
    ]
    headers = ["copy", "count", "GB", "operator", "called by"]
    note = "A copy on the device reads its bytes and writes them; a memset only writes."
    return [Table("Copies and memsets, per step", headers, cells, (note,))]


def profile_report(
    record: Mapping[str, Any],
    rows: Iterable[Measurement],
    launches: Sequence[Mapping[str, Any]],
    operators: Sequence[Mapping[str, Any]],
    threshold: float,
) -> str:
    """The text report of one profiled case.

    Args:
        record: what ran and where.
        rows: its rows.
        launches: what the device did, folded; sums over the recorded steps.
        operators: sums by operator, and by operator and input shapes, of each cycle; their
            ``kind`` is ``operator``, ``call`` (of CUDA), ``kernel`` or ``annotation``.
        threshold: milliseconds of a step from which an operator is a bottleneck.
    """
    frame = to_frame(rows)
    steps = int(frame.repeat.nunique())
    schedule = ", ".join(f"{name} {value}" for name, value in record["schedule"].items())
    head = f"torch {record['torch']}, {record['device']}; schedule: {schedule}"
    everything = _per_step(operators, steps)
    per_step = everything[everything.kind == "operator"]
    by_name = per_step[per_step.input_shapes.isna()]
    by_shape = per_step[per_step.input_shapes.notna()]
    calls = everything[everything.input_shapes.isna()]
    device, column = ("GPU", "device") if record["device"] != "cpu" else ("CPU", "cpu")
    found = [
        *profile_tables(frame),
        *copies_table(launches, steps),
        _bottlenecks(by_name, device, threshold),
        _by(by_name, "self_device_seconds", "Operators by GPU time"),
        _by(calls, "self_cpu_seconds", "Operators and CUDA calls by CPU time"),
        _by(by_name, f"self_{column}_memory_bytes", f"Operators by {device} memory"),
        _by(by_shape, f"self_{column}_seconds", f"Operators and input shapes by {device} time"),
    ]
    text = as_text((table for table in found if table.cells), REPORT_WIDTH)
    return f"{head}\n\n{text}\n"


def _per_step(operators: Sequence[Mapping[str, Any]], steps: int) -> pd.DataFrame:
    """Operators and calls over all cycles, as means over the steps."""
    frame = pd.DataFrame(operators)
    frame = frame[frame.kind.isin(["operator", "call"])]
    frame["name"] = frame.name.str.replace("::engine::evaluate_function:", ":", regex=False)
    keys = ["name", "kind", "input_shapes"]
    summed = frame.groupby(keys, dropna=False, sort=False).sum()
    return (summed / steps).reset_index()


def _by(operators: pd.DataFrame, column: str, title: str) -> Table:
    """The operators with the most of something, per step."""
    chosen = operators[operators[column] > 0].nlargest(TOP, column)
    on_gpu = bool((operators.self_device_seconds > 0).any())
    memory = "self_device_memory_bytes" if on_gpu else "self_cpu_memory_bytes"
    headers = ["operator", "calls", "self\nCPU ms", "CPU ms", "memory\nMB", "GFLOP"]
    if on_gpu:
        headers[2:2] = ["self\nGPU ms", "GPU ms"]
    cells = []
    for line in chosen.to_dict("records"):
        shapes = line["input_shapes"]
        name = line["name"] if pd.isna(shapes) else f"{line['name']} {shapes}"[:SHAPES_WIDTH]
        gpu = [f"{line[c] * 1e3:.2f}" for c in ("self_device_seconds", "device_seconds")]
        cells.append(
            [
                name,
                f"{line['calls']:g}",
                *(gpu if on_gpu else []),
                f"{line['self_cpu_seconds'] * 1e3:.2f}",
                f"{line['cpu_seconds'] * 1e3:.2f}",
                f"{line[memory] / 1e6:.1f}",
                f"{line['flops'] / 1e9:.1f}" if line["flops"] else ABSENT,
            ]
        )
    return Table(f"{title}, per step", headers, cells)


def _bottlenecks(operators: pd.DataFrame, device: str, threshold: float) -> Table:
    """Operators that alone take at least ``threshold`` milliseconds of a step."""
    column = "self_device_seconds" if device == "GPU" else "self_cpu_seconds"
    total = operators[column].sum()
    chosen = operators[operators[column] * 1e3 >= threshold].sort_values(column, ascending=False)
    cells = [
        [line["name"], f"{line[column] * 1e3:.2f}", f"{line[column] / total:.1%}"]
        for line in chosen.to_dict("records")
    ]
    title = f"Bottlenecks: operators with {threshold:g} ms of a step or more on the {device}"
    return Table(title, ["operator", f"{device} ms", "share"], cells or [["none", ABSENT, ABSENT]])
