"""The numbers of two runs side by side. `dpbench.results.gate` judges them."""

from __future__ import annotations

import re
from collections import Counter
from itertools import groupby
from operator import itemgetter
from typing import Any

import pandas as pd

from dpbench.case import AXES, Case
from dpbench.errors import ConfigurationError
from dpbench.results.rows import STEP
from dpbench.results.run import Run

KEYS = [*AXES, "instrument", "metric", "phase"]
CHANGES = [*KEYS, "device", "unit", "before", "after", "change", "relative"]
"""The columns of a comparison; ``change`` is after - before, ``relative`` that over before."""

MOST = 5
"""How many operators or kernels that grew are named."""

SHARE = 0.02
"""Of what changed most, the part below which nothing is named."""

_MOVED = re.compile(r"(kernel_)?(dram|l2|logical|global)_")
"""Metrics that operators and kernels add up to."""


def pairs(before: Run, after: Run, *, across: bool = False) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The numbers of two runs, side by side where case, instrument and device agree.

    ``across`` puts beside each other also what different devices or instruments measured. The
    columns ``device`` and ``instrument`` then say ``X -> Y``, and logical bytes stand beside DRAM
    bytes.

    Returns:
        Every number of the first run, with the columns `CHANGES` (``after`` is NaN where the other
        has no such number), and ``shared``: whether the other has the case by that instrument. And
        the numbers that only the other has.
    """
    measured = [*AXES, "source"]
    keys = [*measured, "phase", "quantity"]
    own = set(before.numbers.instrument) ^ set(after.numbers.instrument)
    left, right = (_side(run.numbers, across, own) for run in (before, after))
    for side in (left, right):
        if side[side.source != ""].duplicated(keys).any():
            raise ConfigurationError("a run has one case on several devices: no one value of it")
    right = right.rename_axis("place").reset_index()
    new = right[[*keys, "instrument", "device", "value", "place"]]
    both = left.merge(new, on=keys, how="left", suffixes=("", "_new"))
    cases = pd.MultiIndex.from_frame(right[measured])
    both["shared"] = pd.MultiIndex.from_frame(both[measured]).isin(cases)
    both["shared"] &= (both.source != "") | both.place.notna()
    for column in ("instrument", "device"):
        was, now = both[column], both[f"{column}_new"]
        both[column] = was.where((was == now) | now.isna(), was + " -> " + now)
    both = both.rename(columns={"value": "before", "value_new": "after"})
    both["change"] = both.after - both.before
    both["relative"] = both.change / both.before.abs().where(both.before != 0)
    both.loc[(both.before == 0) & (both.change == 0), "relative"] = 0.0
    return both[[*CHANGES, "shared"]], right[~right.place.isin(both.place)]


def _side(numbers: pd.DataFrame, across: bool, own: set[str]) -> pd.DataFrame:
    """Numbers with what two must have in common to be a pair, besides case and phase.

    ``own`` are the instruments that only one of the runs has.
    """
    if not across:
        source = numbers.instrument + " on " + numbers.device
        return numbers.assign(source=source, quantity=numbers.metric)
    apart = numbers.instrument.isin(own)
    as_dram = numbers.metric.str.replace("^logical_", "dram_", regex=True)
    return numbers.assign(
        source=numbers.instrument.mask(apart, ""), quantity=numbers.metric.mask(apart, as_dram)
    )


def check_comparable(before: Run, after: Run) -> None:
    """Refuse to compare numbers with different premises."""
    if not (before.sources and after.sources):
        raise ConfigurationError("a run without a single row has nothing to compare")
    instruments = [{name for _, name in run.sources} for run in (before, after)]
    agreed = {name for _, name in set(before.sources) & set(after.sources)}
    if not agreed or instruments[0] & instruments[1] != agreed:
        old, new = (
            "; ".join(
                f"{', '.join(name for _, name in pairs)} on {device}"
                for device, pairs in groupby(run.sources, key=itemgetter(0))
            )
            for run in (before, after)
        )
        raise ConfigurationError(
            f"{old} and {new} are different premises; to compare across them all the same, "
            f"ask for it (--across, --dpbench-compare-across)"
        )


def grown(before: Run, after: Run, case: Case, metric: str, phase: str) -> list[dict[str, Any]]:
    """The operators, or else the kernels, of a case that changed most between two runs.

    Each as ``trainer``, ``phase``, ``name`` and ``bytes`` (negative for what shrank), the largest
    first. Nothing if one of the runs did not look so closely.
    """
    if not _MOVED.match(metric):
        return []
    for parts in ["operators"] if metric.startswith("logical") else ["kernels", "operators"]:
        old, new = (_moved(run, case, metric, parts) for run in (before, after))
        if old and new:
            break
    else:
        return []
    change = {key: new[key] - old[key] for key in {**old, **new} if phase in (key[0], STEP)}
    largest = sorted(change, key=lambda key: (-abs(change[key]), key))[:MOST]
    return [
        {"trainer": case.trainer, "phase": key[0], "name": key[1], "bytes": change[key]}
        for key in largest
        if abs(change[key]) > SHARE * abs(change[largest[0]])
    ]


def _moved(run: Run, case: Case, metric: str, parts: str) -> Counter[tuple[str, str]]:
    """Bytes of a step by phase and name of a kernel or operator."""
    moved: Counter[tuple[str, str]] = Counter()
    for outcome in (o for o in run.outcomes if o.case == case):
        if parts == "operators":
            for operator in outcome.operators:
                moved[operator.phase, operator.operator] += operator.total_bytes
            continue
        steps = len({kernel.repeat for kernel in outcome.kernels})
        for kernel in outcome.kernels:
            by = f" ({kernel.operator})" if kernel.operator else ""
            size = kernel.l2_bytes if "l2_" in metric else kernel.dram_bytes
            moved[kernel.phase, f"{kernel.kernel}{by}"] += size / steps  # type: ignore[assignment]
    return moved
