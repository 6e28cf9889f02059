"""The operators, kernels and functions whose bytes changed most between two runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from dpbench.core.metrics import METRICS
from dpbench.core.subject import Subject
from dpbench.results.kernels import in_ranges, numbers, unnumbered
from dpbench.results.rows import NO_HARDWARE, STEP
from dpbench.results.run import Run

MOST = 5
"""The most operators, kernels or functions that are listed for one case that regressed."""

SHARE = 0.02
"""An operator, kernel or function is listed if its bytes changed by more than this share of the
largest change in the list."""

WHERE = ["phase", "name", "module"]
"""The columns that identify an operator, kernel or function in both runs. The source line is not
among these columns, because an edit higher up in the file changes the number of the line."""


def largest_changes(
    before: Run, after: Run, case: Subject, regression: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """List the kernels or operators of a case whose bytes changed most, the largest change first.

    For a measured metric, the list has kernels if both runs recorded kernels of the case.
    Otherwise, the list has operators.

    Returns:
        A dictionary for each kernel or operator, with ``trainer``, ``phase``, ``name``,
        ``module``, ``line`` and ``bytes``. ``bytes`` is negative for a decrease. Kernels have DRAM
        bytes and no module or line. Operators have bytes that were counted without hardware. The
        list is empty if the metric that regressed is not a sum of bytes, or if this metric was
        measured and has no counterpart in logical counting. It is also empty if neither kernels nor
        operators of the case were recorded in both runs.
    """
    metric = METRICS.find(regression["of"] or regression["metric"])
    counted = regression["device"] == NO_HARDWARE
    if not (metric and metric.unit == "B" and metric.adds_up and (counted or metric.logical)):
        return []
    if not counted and len(changed := kernel_changes(before, after, case)):
        return _largest(case, changed, regression["phase"])
    column = (counted and metric.source) or "total_bytes"
    return _largest(case, operator_changes(before, after, case, column), regression["phase"])


def changes_of_all(before: Run, after: Run, compared: pd.DataFrame) -> list[dict[str, Any]]:
    """List what changed most in all cases of two runs: operators, phases and memory.

    Args:
        before: the first run.
        after: the second run.
        compared: the numbers of both runs, see `dpbench.results.gate.pairs`. Phases are listed
            by their DRAM bytes, because counted bytes are those of operators.

    Returns:
        A dictionary for each change, with the fields of `largest_changes`.
    """
    cases = dict.fromkeys(each.case for each in after.outcomes)
    by_operator = (_largest(c, operator_changes(before, after, c), STEP) for c in cases)
    phases = compared[(compared.metric == "dram_bytes") & (compared.phase != STEP)]
    phases = phases[phases.relative.abs() > SHARE].rename(columns={"change": "bytes"})
    phases = phases.assign(name="dram_bytes", module="", line="")
    found = [change for changes in by_operator for change in changes]
    columns = ["trainer", *WHERE, "line", "bytes"]
    found += [dict(zip(columns, row, strict=True)) for row in phases[columns].to_numpy()]
    memory = [change for case in cases for change in grown_memory(before, after, case)]
    return sorted(found, key=lambda change: -abs(change["bytes"]))[:MOST] + memory


def grown_memory(before: Run, after: Run, case: Subject) -> list[dict[str, Any]]:
    """List the functions whose memory changed most. Memory is taken at the peak of a step.

    The entries have the same fields as in `largest_changes`. The list is empty if one of the runs
    did not record the memory of the case by source line, or if both have the same peak. If the
    peaks are in different phases, the list has one entry, for the peak.
    """
    found = _largest(case, _changes(*(_of_memory(run, case) for run in (before, after))), STEP)
    (old, was), (new, now) = (_peak(run, case) for run in (before, after))
    if was != now:
        moved = f"memory at the peak, which moved from {was} to {now}"
        return [{**each, "phase": STEP, "name": moved, "bytes": new - old} for each in found[:1]]
    return [{**each, "name": f"memory of {each['name']}"} for each in found if new != old]


def _peak(run: Run, case: Subject) -> tuple[float, str]:
    """Return the largest counted memory of a case's phases, and the phase."""
    rows = (row for each in run.outcomes if each.case == case for row in each.rows)
    peaks = (r for r in rows if (r.metric, r.device) == ("peak_memory_bytes", NO_HARDWARE))
    return max(((row.value, row.phase) for row in peaks if row.phase != STEP), default=(0.0, ""))


def operator_changes(
    before: Run, after: Run, case: Subject, column: str = "total_bytes"
) -> pd.DataFrame:
    """Compare the bytes of each operator of a case in two runs, the largest change first.

    Returns:
        A row for each phase, operator and module, with the columns `WHERE` and ``line``, and with
        ``before``, ``after`` and ``change`` in bytes per step. There are no rows if one of the runs
        did not count the operators of the case.
    """
    return _changes(*(_of_operators(run, case, column) for run in (before, after)))


def kernel_changes(before: Run, after: Run, case: Subject) -> pd.DataFrame:
    """Compare the DRAM bytes of each kernel of a case in two runs, the largest change first.

    The columns are the same as in `operator_changes`, but ``module`` and ``line`` are empty.
    """
    return _changes(*(_of_kernels(run, case) for run in (before, after)))


def _of_operators(run: Run, case: Subject, column: str) -> pd.DataFrame:
    entries = (o for each in run.outcomes if each.case == case for o in each.operators)
    return _frame((o.phase, o.operator, o.module, o.line, getattr(o, column)) for o in entries)


def _of_kernels(run: Run, case: Subject) -> pd.DataFrame:
    entries = [k for each in run.outcomes if each.case == case for k in each.kernels]
    steps = len({each.repeat for each in entries})
    return _frame((k.phase, k.kernel, "", "", k.dram_bytes / steps) for k in entries)


def _of_memory(run: Run, case: Subject) -> pd.DataFrame:
    entries = (m for each in run.outcomes if each.case == case for m in each.memory_lines)
    return _frame((m.phase, re.sub(r":\d+", "", m.line), "", "", m.held_bytes) for m in entries)


def _frame(rows: Iterable[tuple[str, str, str, str, float]]) -> pd.DataFrame:
    return pd.DataFrame([*rows], columns=[*WHERE, "line", "bytes"])


def _changes(old: pd.DataFrame, new: pd.DataFrame) -> pd.DataFrame:
    """Add up the bytes with equal values in the columns `WHERE`, and compare the sums.

    ``line`` is the source line with the most bytes, taken from the new run if the new run has the
    operator, otherwise from the old run. Modules are ignored unless both runs recorded modules.
    Layers of one kind that all changed, or all did not change, are added up.
    """
    if old.empty or new.empty:
        return pd.DataFrame(columns=[*WHERE, "line", "before", "after", "change"])
    if not (old.module.any() and new.module.any()):
        old, new = old.assign(module=""), new.assign(module="")
    before, after = (
        side.sort_values("bytes").groupby(WHERE).agg({"bytes": "sum", "line": "last"})
        for side in (old, new)
    )
    both = before.merge(after, how="outer", on=WHERE, suffixes=("_before", "_after"))
    both["line"] = both.line_after.where(both.line_after.notna(), both.line_before)
    both = both.rename(columns={"bytes_before": "before", "bytes_after": "after"})
    both = both[["line", "before", "after"]].fillna({"before": 0, "after": 0})
    both["change"] = both.after - both.before
    both = both.reset_index().sort_values("change", key=abs, ascending=False, kind="stable")
    layers = ["phase", "name", both.module.map(unnumbered), both.change != 0]
    how: dict[str, Any] = {"phase": "first", "name": "first", "module": _layers, "line": "first"}
    how |= dict.fromkeys(("before", "after", "change"), "sum")
    folded = both.groupby(layers, sort=False, as_index=False).agg(how)
    return folded.sort_values("change", key=abs, ascending=False, kind="stable")


def _layers(modules: pd.Series[str]) -> str:
    """Name the layers of one kind that changed, e.g. ``blocks.3.up`` or ``blocks.0-23.up``."""
    names = in_ranges(sorted(modules, key=numbers))
    return unnumbered(modules.iloc[0]) if ", " in names else names


def _largest(case: Subject, changes: pd.DataFrame, phase: str) -> list[dict[str, Any]]:
    """List the largest changes of a phase or, for `STEP`, of all phases."""
    of_phase = changes[(changes.phase == phase) | (phase == STEP)].head(MOST)
    most = of_phase.change.abs().max()
    least = max(SHARE * most, 0.5)  # means over different numbers of steps are rounded
    of_phase = of_phase[of_phase.change.abs() > least].rename(columns={"change": "bytes"})
    listed = of_phase[[*WHERE, "line", "bytes"]].to_dict("records")
    return [{"trainer": case.trainer, **{str(k): v for k, v in each.items()}} for each in listed]
