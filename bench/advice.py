"""Compare `dpbench advise` with the published steps that were timed on one H200.

    python -m bench.advice

prints the predicted and the measured time of each case, and the method that `dpbench advise` would
name for each cell (cases that differ only in the trainer). Counting takes minutes. Cases that name
a trainer or another class that no longer exists are left out.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import pandas as pd

from bench.runs import RESULTS, run
from dpbench.advice.footprint import Counts, Footprint
from dpbench.advice.predict import predict
from dpbench.core.case import BASELINE_TRAINER, Case
from dpbench.core.errors import ConfigurationError
from dpbench.core.registry import resolve
from dpbench.results.roofline import BUSY, LAUNCH_BOUND, find_card, reachable
from dpbench.results.rows import STEP
from dpbench.results.summary import of_one_instrument

WITHIN = 0.25
"""Largest relative error of a predicted time that counts as good."""

CLOSE = 0.05
"""Largest excess of the named method's time over the fastest method's time that counts as good."""


def measured() -> pd.DataFrame:
    """Return each timed case, with the medians of its time and of its busy share over files."""
    parts = []
    for path in sorted(RESULTS.glob("h200-*.json.xz")):
        rows = run(path).summary
        if len(rows):
            parts.append(of_one_instrument(rows[(rows.phase == STEP) & (rows.gpus == 1)]))
    rows = pd.concat(parts, ignore_index=True)
    rows = rows[rows.metric.isin(["step_time_seconds", BUSY])]
    wide = rows.pivot_table("value", "case", "metric", "median", sort=False).dropna()
    return wide.rename(columns={"step_time_seconds": "measured", BUSY: "busy"}).reset_index()


def resolved(case: Case) -> Case | None:
    """Return the case with short names, or None if a class that the case names does not exist."""
    with suppress(ConfigurationError):
        return resolve(case)
    return None


def compared() -> pd.DataFrame:
    """Return the rows of `measured` with cell, trainer, predicted time and predicted ÷ measured."""
    steps = measured()
    cases: Any = [*map(resolved, steps.case)]
    steps = steps.assign(case=cases).dropna(subset=["case"])
    card = reachable(find_card("h200"))
    counted = [Footprint(case, [Counts().of_step(case)]) for case in steps.case]
    predicted = pd.Series([predict(each, card).predicted for each in counted], steps.index)
    return steps.assign(
        cell=[case.baseline.id for case in steps.case],
        trainer=[case.trainer for case in steps.case],
        predicted=predicted,
        share=predicted / steps.measured,
    )


def near(steps: pd.DataFrame) -> pd.Series[bool]:
    """Return True for each predicted time within `WITHIN`, without launch-bound steps."""
    steady = steps[steps.busy >= LAUNCH_BOUND]
    return (steady.share - 1).abs() <= WITHIN


def named(steps: pd.DataFrame) -> pd.DataFrame:
    """Return for each cell the named method, the fastest method, and the ratio of their times.

    The named method has the shortest predicted time. Cells in which fewer than two private methods
    were measured are left out.
    """
    private = steps[steps.trainer != BASELINE_TRAINER]
    lines = []
    for cell, methods in private.groupby("cell", sort=False):
        if len(methods) > 1:
            name = methods.sort_values("predicted").iloc[0]
            best = methods.sort_values("measured").iloc[0]
            more = name.measured / best.measured
            lines.append({"cell": cell, "named": name.trainer, "best": best.trainer, "more": more})
    return pd.DataFrame(lines)


def main() -> None:
    """Print a table of cases and a table of cells, and the share of each that is predicted well."""
    steps = compared()
    names = [re.sub(r"hf-[a-z-]+,|hidden_size.*heads=4,", "", case.id) for case in steps.case]
    choices = named(steps)
    shown = steps.assign(case=names)[["case", "measured", "predicted", "share", "busy"]]
    for table in (shown, choices):
        print(table.to_string(index=False, float_format="{:.3f}".format))
    print(f"within {WITHIN:.0%}: {near(steps).mean():.3f} of {len(near(steps))} steps")
    good = choices.more <= 1 + CLOSE
    print(f"named within {CLOSE:.0%} of the best: {good.mean():.3f} of {len(good)} cells")


if __name__ == "__main__":
    main()
