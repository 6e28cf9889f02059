"""The data of the page as frames: a summary of all runs, and which bytes it is about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from dpbench.core.case import AXES
from dpbench.core.metrics import METRICS, expectations
from dpbench.core.subject import SCRIPT
from dpbench.results.roofline import Roofs
from dpbench.results.rows import NO_HARDWARE, NUMBER, OF_CASE, STEP
from dpbench.results.run import Run
from dpbench.results.summary import with_logical
from dpbench.show.groups import in_order, title_parts

MEASURED, COUNTED = "measured", "counted"
"""Where a number comes from; measured and counted bytes never share a chart."""

BYTES = {MEASURED: "dram_bytes", COUNTED: "logical_bytes"}
"""The metric that is drawn, by basis."""

CASE = ["batch_size", "seq_len", "title", "trainer"]
"""The columns that identify a case in a chart; its other non-default options are in the title."""

KEYS = ["run", "device", "basis", *CASE]
"""The columns that identify a case on the page."""


def labelled(documents: Iterable[tuple[str, Mapping[str, Any]]]) -> list[Run]:
    """Documents as runs under their names; a repeated name gets a number."""
    runs: list[Run] = []
    for name, document in documents:
        place = 1 + sum(run.path == Path(name) for run in runs)
        runs.append(Run(Path(name), document, f"{name} ({place})" if place > 1 else name))
    return runs


@dataclass(frozen=True)
class PageData:
    """What the charts of one page have in common: the frames, and which bytes they are about.

    ``expected`` has each metric's expected range of its ratio to standard, ``ceilings`` the card's
    measured rates, if not the known ones.
    """

    runs: Sequence[Run]
    expected: Mapping[str, tuple[float, float]] = field(default_factory=expectations)
    ceilings: Roofs | None = None

    @cached_property
    def baseline(self) -> str:
        """The name of the trainer that ratios divide by."""
        return " or ".join(dict.fromkeys(run.baseline for run in self.runs))

    @cached_property
    def summary(self) -> pd.DataFrame:
        """One row per run, case, instrument, phase and metric, in the order of reading.

        The values and ratios of each run's summary, with ``run``, its name; ``basis``; and
        ``title``, which configuration it is.
        """
        runs = [run for run in self.runs if not run.frame.empty] or self.runs[:1]
        parts = []
        for run in runs:
            rows = run.summary[run.summary.preferred & run.summary.kind.isin(["value", "ratio"])]
            parts.append(in_order(rows[rows.value.notna()]).assign(run=run.name))
        summary = pd.concat(parts, ignore_index=True)
        counted = summary.device == NO_HARDWARE
        summary["basis"] = counted.map({True: COUNTED, False: MEASURED})
        return summary.assign(title=titles(summary, summary))

    @cached_property
    def failed(self) -> pd.DataFrame:
        """The cases that failed: ``error``, ``run``, and a ``title`` as in `summary`.

        ``device`` is where the others of the run were measured.
        """
        rows = [
            {**o.case.columns, **vars(o), "run": run.name}
            for run in self.runs
            for o in run.outcomes
            if o.error
        ]
        failed = pd.DataFrame(rows, columns=["run", *AXES, "error"])
        devices = _subject(self.summary).drop_duplicates("run").set_index("run").device
        failed = failed.assign(device=[devices.get(run, "") for run in failed.run])
        return failed.assign(title=titles(failed, self.summary))

    @cached_property
    def basis(self) -> str:
        """Whether the page is about measured bytes, or counted ones if there are no others."""
        return _basis(self.summary)

    @property
    def bytes_name(self) -> str:
        """The name of the bytes on the page's axes."""
        return METRICS[BYTES[self.basis]].short_header

    def step_bytes(self, basis: str) -> pd.DataFrame:
        """The bytes of whole steps that were measured, or those that were counted."""
        return self.summary[(self.summary.metric == BYTES[basis]) & (self.summary.phase == STEP)]

    @cached_property
    def ratios(self) -> pd.DataFrame:
        """Whole-step rows of all trainers but the baseline, where there is a ratio."""
        rows = self.step_bytes(self.basis)
        return rows[(rows.trainer != rows.baseline) & rows.ratio.notna()]

    @cached_property
    def beside_logical(self) -> pd.DataFrame:
        """Measured steps with the logical bytes of the case, from the first run that has them."""
        counted = self.step_bytes(COUNTED).drop_duplicates(NUMBER)
        both = with_logical(pd.concat([self.step_bytes(MEASURED), counted]))
        return both.dropna(subset="logical")

    @cached_property
    def peaks(self) -> pd.DataFrame:
        """Peak memory of each case, by the same basis as the bytes."""
        rows = self.summary[self.summary.metric == "peak_memory_bytes"]
        rows = rows[(rows.phase == STEP) & (rows.basis == self.basis)]
        return rows.drop_duplicates(KEYS)


def pivot(rows: pd.DataFrame, columns: str) -> pd.DataFrame:
    """One row per case in order of appearance; of duplicates the first is kept."""
    unique = rows.drop_duplicates([*KEYS, columns])
    if unique.empty:  # pandas with pyarrow cannot pivot it
        return unique[KEYS]
    wide = unique.pivot(index=KEYS, columns=columns, values="value").rename_axis(columns=None)
    return unique[KEYS].drop_duplicates().join(wide, on=KEYS).reset_index(drop=True)


def _basis(summary: pd.DataFrame) -> str:
    there = set(summary.metric)
    return COUNTED if BYTES[COUNTED] in there and BYTES[MEASURED] not in there else MEASURED


def _subject(summary: pd.DataFrame) -> pd.DataFrame:
    """The rows with the basis of the page's bytes."""
    return summary[summary.basis == _basis(summary)]


def titles(rows: pd.DataFrame, summary: pd.DataFrame) -> pd.Series[str]:
    """The title of each row's configuration, without batch size and sequence length."""
    axes = [axis for axis in AXES if axis not in ("trainer", "batch_size", "seq_len")]
    parts = [", ".join(title_parts(row)) or SCRIPT for row in rows[axes].to_dict("records")]
    title = pd.Series(parts, index=rows.index, dtype=object)
    subject = _subject(summary)
    devices = set(subject.device)
    if len(devices) > 1:
        title = title.where(~rows.device.isin(devices), title + ", " + rows.device)
    again = subject.groupby(OF_CASE, sort=False).run.nunique() > 1
    if again.any():  # the same case in two runs: only the run's label tells them apart
        title = title + ", " + rows.run
    return title
