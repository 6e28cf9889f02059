"""Holds `dpbench advise` to what was measured: every timed cell of the committed runs of one GPU.

    python -m bench.advice

prints predicted and measured times, and which method is named in each cell. Counting takes minutes.
Methods whose form at the time is no longer in dpbench are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pandas as pd

from bench.runs import RESULTS, run
from dpbench.advice.footprint import Counts, Footprint, steps_of
from dpbench.advice.predict import predict
from dpbench.core.case import BASELINE_TRAINER, Case
from dpbench.core.errors import ConfigurationError
from dpbench.core.registry import resolve
from dpbench.results.roofline import BUSY, LAUNCH_BOUND, find_card, reachable
from dpbench.results.rows import STEP
from dpbench.results.summary import of_one_instrument

WITHIN = 0.25
"""How far predicted and measured times may differ, where a step is not launch-bound."""

CLOSE = 0.05
"""How much more time than the best method the named one may take."""


def measured() -> pd.DataFrame:
    """The steps that were timed: case, seconds and busy share; the median over files."""
    parts = []
    for path in sorted(RESULTS.glob("h200-*.json")):
        rows = run(path).summary
        rows = rows[(rows.phase == STEP) & (rows.gpus == 1)] if len(rows) else rows
        parts += [of_one_instrument(rows)] if len(rows) else []
    rows = pd.concat(parts, ignore_index=True)
    rows = rows[rows.metric.isin(["step_time_seconds", BUSY])]
    wide = rows.pivot_table("value", "case", "metric", "median", sort=False).dropna()
    return wide.rename(columns={"step_time_seconds": "measured", BUSY: "busy"}).reset_index()


def resolved(cases: pd.Series[Any]) -> Iterator[Case | None]:
    """Each case as it can be counted today, or None."""
    for case in cases:
        try:
            yield resolve(case)
        except ConfigurationError:
            yield None


def held() -> pd.DataFrame:
    """Predicted beside measured times, with ``share``, predicted ÷ measured, and ``cell``."""
    steps = measured()
    today: list[Any] = [*resolved(steps.case)]
    steps = steps.assign(case=today).dropna(subset=["case"])
    card = reachable(find_card("h200"))
    seconds = [predict(_footprint(case), card).predicted for case in steps.case]
    return steps.assign(
        cell=[case.baseline.id for case in steps.case],
        trainer=[case.trainer for case in steps.case],
        predicted=seconds,
        share=[each / m for each, m in zip(seconds, steps.measured, strict=True)],
    )


def _footprint(case: Case) -> Footprint:
    """The counts of a case at its own batch size."""
    steps = [step for step in steps_of(case) if step[0].batch_size == case.batch_size]
    return Footprint(case, [Counts().of_step(*step) for step in steps])


def near(steps: pd.DataFrame) -> pd.Series[bool]:
    """Whether predicted and measured time are close, for steps that are not launch-bound."""
    steady = steps[steps.busy >= LAUNCH_BOUND]
    return (steady.share - 1).abs() <= WITHIN


def named(steps: pd.DataFrame) -> pd.DataFrame:
    """For each cell with several private methods: the named one, the best, and their time ratio."""
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
    """Print both tables and both shares."""
    steps = held()
    names = [re.sub(r"hf-[a-z-]+,|hidden_size.*heads=4,", "", case.id) for case in steps.case]
    table = steps.assign(case=names)[["case", "measured", "predicted", "share", "busy"]]
    print(table.to_string(index=False, float_format="{:.3f}".format))
    choices = named(steps)
    print(choices.to_string(index=False, float_format="{:.3f}".format))
    print(f"within {WITHIN:.0%}: {near(steps).mean():.3f} of {len(near(steps))} steps")
    good = choices.more <= 1 + CLOSE
    print(f"named within {CLOSE:.0%} of the best: {good.mean():.3f} of {len(good)} cells")


if __name__ == "__main__":
    main()
