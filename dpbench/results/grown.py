"""What grew: the operators or kernels that move more bytes in one run than in another."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from dpbench.case import Case
from dpbench.results.rows import STEP
from dpbench.results.run import Run

MOST = 5
"""How many are named."""

SHARE = 0.02
"""Of what changed most, the part below which nothing is named."""

_MOVED = re.compile(r"(kernel_)?(dram|l2|logical|global)_")
"""Metrics that operators and kernels add up to."""


def grown(before: Run, after: Run, case: Case, changed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The operators, or else the kernels, of a case that changed most between two runs.

    Args:
        before: a run.
        after: a run.
        case: of both.
        changed: ``metric`` and ``phase`` of a number that changed.

    Returns:
        ``trainer``, ``phase``, ``name`` and ``bytes`` (negative for what shrank) of each, the
        largest first. Nothing if one of the runs did not look so closely.
    """
    metric, phase = str(changed["metric"]), changed["phase"]
    if not _MOVED.match(metric):
        return []
    for moved in [_by_operator] if metric.startswith("logical") else [_by_kernel, _by_operator]:
        old, new = (moved(run, case, metric) for run in (before, after))
        if old and new:
            break
    else:
        return []
    change = {
        key: new.get(key, 0.0) - old.get(key, 0.0)
        for key in {**old, **new}
        if phase in (key[0], STEP)
    }
    largest = sorted(change, key=lambda key: (-abs(change[key]), key))[:MOST]
    return [
        {"trainer": case.trainer, "phase": key[0], "name": key[1], "bytes": change[key]}
        for key in largest
        if abs(change[key]) > SHARE * abs(change[largest[0]])
    ]


def _by_operator(run: Run, case: Case, metric: str) -> dict[tuple[str, str], float]:
    """Logical bytes by phase and operator."""
    found: dict[tuple[str, str], float] = defaultdict(float)
    for outcome in run.outcomes:
        if outcome.case == case:
            for count in outcome.operators:
                found[count.phase, count.operator] += count.total_bytes
    return found


def _by_kernel(run: Run, case: Case, metric: str) -> dict[tuple[str, str], float]:
    """DRAM bytes (L2 bytes for a metric of L2) of a step by phase and kernel."""
    found: dict[tuple[str, str], float] = defaultdict(float)
    for outcome in run.outcomes:
        if outcome.case == case:
            steps = len({count.repeat for count in outcome.kernels})
            for count in outcome.kernels:
                moved = count.l2_bytes if "l2_" in metric else count.dram_bytes
                by = f" ({count.operator})" if count.operator else ""
                found[count.phase, f"{count.kernel}{by}"] += moved / steps
    return found
