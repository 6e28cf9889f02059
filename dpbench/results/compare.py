"""The numbers of two runs side by side. `dpbench.results.gate` judges them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

import pandas as pd

from dpbench.case import AXES, Case
from dpbench.errors import ConfigurationError
from dpbench.metrics import RATIO
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


@dataclass(frozen=True)
class Pairs:
    """The numbers of two runs, and those that stand side by side.

    Args:
        old: of the one, as `numbers` gives them.
        new: of the other.
        changes: the columns `CHANGES`; ``old`` and ``new`` are the places of a pair's two numbers
            in these tables, ``new`` NaN where the number is not there any more.
    """

    old: pd.DataFrame
    new: pd.DataFrame
    changes: pd.DataFrame


def pairs(before: Run, after: Run, *, across: bool = False) -> Pairs:
    """The numbers of two runs, side by side where case and instrument agree.

    ``across`` puts beside each other also what different devices or instruments measured. The
    columns ``device`` and ``instrument`` then say ``X -> Y``, and logical bytes stand beside DRAM
    bytes.
    """
    old, new = before.numbers, after.numbers
    shared = set(old.instrument) & set(new.instrument) if across else None
    left = _side(old.rename_axis("old"), shared)
    right = _side(new.rename_axis("new"), shared)
    measured = [*AXES, "source"]
    keys = [*measured, "phase", "quantity"]
    for side in (left, right):
        if side[side.source != ""].duplicated(keys).any():
            raise ConfigurationError("a run has one case on several devices: no one value of it")
    left = left.merge(right[measured].drop_duplicates(), on=measured)
    right = right[[*keys, "instrument", "device", "value", "new"]]
    joined = left.merge(right, on=keys, how="left", suffixes=("", "_new"))
    joined = joined[(joined.source != "") | joined.new.notna()]
    for column in ("instrument", "device"):
        there, here = joined[column], joined[f"{column}_new"]
        joined[column] = there.where((there == here) | here.isna(), there + " -> " + here)
    joined = joined.rename(columns={"value": "before", "value_new": "after"})
    joined["change"] = joined.after - joined.before
    joined["relative"] = joined.change / joined.before.abs().where(joined.before != 0)
    joined.loc[(joined.before == 0) & (joined.change == 0), "relative"] = 0.0
    return Pairs(old, new, joined[[*CHANGES, "old", "new"]].reset_index(drop=True))


def _side(numbers: pd.DataFrame, shared: Collection[str] | None) -> pd.DataFrame:
    """Numbers with what two must have in common to be a pair, besides case and phase.

    ``shared`` are the instruments that both runs have, if others may be compared, too.
    """
    side = numbers.reset_index()
    if shared is None:
        return side.assign(source=side.instrument + " on " + side.device, quantity=side.metric)
    apart = ~side.instrument.isin(shared)
    as_dram = side.metric.str.replace("^logical_", "dram_", regex=True)
    return side.assign(
        source=side.instrument.mask(apart, ""), quantity=side.metric.mask(apart, as_dram)
    )


def without_baseline(changes: pd.DataFrame) -> pd.Series[bool]:
    """Which rows are ratios that are not there any more: their baseline, or the number, is gone."""
    return changes.metric.str.endswith(RATIO) & changes.after.isna()


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


def _moved(run: Run, case: Case, metric: str, parts: str) -> dict[tuple[str, str], float]:
    """Bytes of a step by phase and name of a kernel or operator."""
    found: dict[tuple[str, str], float] = defaultdict(float)
    for outcome in run.outcomes:
        if outcome.case != case:
            continue
        if parts == "operators":
            for operator in outcome.operators:
                found[operator.phase, operator.operator] += operator.total_bytes
            continue
        steps = len({kernel.repeat for kernel in outcome.kernels})
        for kernel in outcome.kernels:
            moved = kernel.l2_bytes if "l2_" in metric else kernel.dram_bytes
            found[kernel.phase, kernel.kernel] += moved / steps
    return found
