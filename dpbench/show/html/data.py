"""The data of the page as frames: a summary of all runs, and whether its bytes were measured."""

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
"""The metric of bytes that is drawn, by basis."""

CASE = ["batch_size", "seq_len", "title", "trainer"]
"""The columns that identify a case in a chart. The title has its other axes."""

KEYS = ["run", "device", "basis", *CASE]
"""The columns that identify a case on the page."""


def labelled(documents: Iterable[tuple[str, Mapping[str, Any]]]) -> list[Run]:
    """Runs from documents and their names. A name that occurs again gets a number."""
    runs: list[Run] = []
    for name, document in documents:
        place = 1 + sum(run.path == Path(name) for run in runs)
        runs.append(Run(Path(name), document, f"{name} ({place})" if place > 1 else name))
    return runs


@dataclass(frozen=True)
class PageData:
    """The data that the charts of one page share.

    Args:
        runs: the runs of the page.
        expected: by metric, the expected range of its ratio to the standard trainer.
        ceilings: the measured rates of the card, if not those that dpbench knows.
    """

    runs: Sequence[Run]
    expected: Mapping[str, tuple[float, float]] = field(default_factory=expectations)
    ceilings: Roofs | None = None

    @cached_property
    def baseline(self) -> str:
        """The name of the trainer that ratios divide by; if runs differ, all such names."""
        return " or ".join(dict.fromkeys(run.baseline for run in self.runs))

    @cached_property
    def summary(self) -> pd.DataFrame:
        """One row per run, case, instrument, phase and metric, in the order of reading.

        The rows are the values and ratios of the runs' summaries. They have three more columns:
        ``run``, the name of the run; ``basis``, `MEASURED` or `COUNTED`; and ``title``, which names
        the configuration.
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
        """The cases that failed, with ``error``, ``run``, and ``title`` as in `summary`.

        ``device`` is the device that measured the other cases of the run.
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
        """`MEASURED`, or `COUNTED` if the runs have counted bytes and no measured ones."""
        return _basis(self.summary)

    @property
    def bytes_name(self) -> str:
        """The name of the bytes on the page's axes."""
        return METRICS[BYTES[self.basis]].short_header

    def step_bytes(self, basis: str) -> pd.DataFrame:
        """The bytes of whole steps with this basis: those measured, or those counted."""
        return self.summary[(self.summary.metric == BYTES[basis]) & (self.summary.phase == STEP)]

    @cached_property
    def ratios(self) -> pd.DataFrame:
        """The rows of whole steps that have a ratio, without those of the baseline."""
        rows = self.step_bytes(self.basis)
        return rows[(rows.trainer != rows.baseline) & rows.ratio.notna()]

    @cached_property
    def beside_logical(self) -> pd.DataFrame:
        """The measured bytes of each step, with the logical bytes of its case.

        If several runs have logical bytes of the case, those of the first run are taken.
        """
        counted = self.step_bytes(COUNTED).drop_duplicates(NUMBER)
        both = with_logical(pd.concat([self.step_bytes(MEASURED), counted]))
        return both.dropna(subset="logical")

    @cached_property
    def peaks(self) -> pd.DataFrame:
        """Peak memory of each case, measured or counted as the bytes of the page are."""
        rows = self.summary[self.summary.metric == "peak_memory_bytes"]
        rows = rows[(rows.phase == STEP) & (rows.basis == self.basis)]
        return rows.drop_duplicates(KEYS)


def pivot(rows: pd.DataFrame, columns: str) -> pd.DataFrame:
    """One row per case, in order of appearance, with a column for each value of ``columns``.

    Of several rows for the same place, the first is kept.
    """
    unique = rows.drop_duplicates([*KEYS, columns])
    if unique.empty:  # pandas with pyarrow cannot pivot an empty frame
        return unique[KEYS]
    wide = unique.pivot(index=KEYS, columns=columns, values="value").rename_axis(columns=None)
    return unique[KEYS].drop_duplicates().join(wide, on=KEYS).reset_index(drop=True)


def _basis(summary: pd.DataFrame) -> str:
    there = set(summary.metric)
    return COUNTED if BYTES[COUNTED] in there and BYTES[MEASURED] not in there else MEASURED


def _subject(summary: pd.DataFrame) -> pd.DataFrame:
    """The rows with the same basis as the page's bytes."""
    return summary[summary.basis == _basis(summary)]


def titles(rows: pd.DataFrame, summary: pd.DataFrame) -> pd.Series[str]:
    """The title of each row's configuration. It leaves out batch size and sequence length."""
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
