"""The data of the page as frames: a summary of all runs, failures and ratios."""

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
from dpbench.results.rows import NO_HARDWARE, OF_CASE, STEP
from dpbench.results.run import Run
from dpbench.show.tables import in_order, title_parts

MEASURED, COUNTED = "measured", "counted"
"""The values of the column ``basis``: a number was measured, or was counted without hardware. Most
charts of bytes show only numbers with the basis `PageData.basis`."""

BYTES = {MEASURED: "dram_bytes", COUNTED: "logical_bytes"}
"""The metric that charts of bytes show, for each basis."""

CASE = ["batch_size", "seq_len", "title", "trainer"]
"""The columns that identify a case in a chart. The title names the values of the other axes."""

KEYS = ["run", "device", "basis", *CASE]
"""The columns that identify a case on the page."""


def labelled(documents: Iterable[tuple[str, Mapping[str, Any]]]) -> list[Run]:
    """Make runs from documents and their names. A name that occurs again gets a number."""
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
        expected: for each metric, the expected range of its ratio to the baseline.
        ceilings: the measured highest rates (roofs) of the card. If None, uses the roofs that
            dpbench has.
    """

    runs: Sequence[Run]
    expected: Mapping[str, tuple[float, float]] = field(default_factory=expectations)
    ceilings: Roofs | None = None

    @cached_property
    def baseline(self) -> str:
        """The trainer that ratios divide by. Different baselines of several runs are joined."""
        return " or ".join(dict.fromkeys(run.baseline for run in self.runs))

    @cached_property
    def summary(self) -> pd.DataFrame:
        """The values and ratios of all runs, from one instrument for each number.

        The runs come one after the other, each with rows in the order of `in_order`. Three columns
        are added: ``run``, the name of the run; ``basis``, `MEASURED` or `COUNTED`; and ``title``,
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
        """The cases that failed, with ``error``, and with ``run`` and ``title`` as in `summary`.

        ``device`` is the first device of other cases of the same run, or empty if there is none.
        """
        rows = [
            {**o.case.columns, **vars(o), "run": run.name}
            for run in self.runs
            for o in run.outcomes
            if o.error
        ]
        failed = pd.DataFrame(rows, columns=["run", *AXES, "error"])
        drawn = self.summary[self.summary.basis == self.basis]
        devices = drawn.drop_duplicates("run").set_index("run").device
        failed = failed.assign(device=[devices.get(run, "") for run in failed.run])
        return failed.assign(title=titles(failed, self.summary))

    @cached_property
    def basis(self) -> str:
        """`MEASURED`, or `COUNTED` if the runs have counted bytes and no measured bytes."""
        return _basis(self.summary)

    @property
    def bytes_name(self) -> str:
        """The name of the bytes in titles and on axes: DRAM or logical."""
        return METRICS[BYTES[self.basis]].short_header

    @property
    def step_bytes(self) -> pd.DataFrame:
        """The rows with the bytes of whole steps, which are measured or counted, see `basis`."""
        rows = self.summary[self.summary.phase == STEP]
        return rows[rows.metric == BYTES[self.basis]]

    @cached_property
    def ratios(self) -> pd.DataFrame:
        """The rows of `step_bytes` that have a ratio, without the rows of the baseline."""
        rows = self.step_bytes
        return rows[(rows.trainer != rows.baseline) & rows.ratio.notna()]


def pivot(rows: pd.DataFrame, columns: str) -> pd.DataFrame:
    """Return one row per case, in order of appearance, with a column for each value of ``columns``.

    If several rows have the same case and the same value of ``columns``, the first row is used.
    """
    unique = rows.drop_duplicates([*KEYS, columns])
    if unique.empty:  # pandas with pyarrow cannot pivot an empty frame
        return unique[KEYS]
    wide = unique.pivot(index=KEYS, columns=columns, values="value").rename_axis(columns=None)
    return unique[KEYS].drop_duplicates().join(wide, on=KEYS).reset_index(drop=True)


def _basis(summary: pd.DataFrame) -> str:
    metrics = set(summary.metric)
    return COUNTED if BYTES[COUNTED] in metrics and BYTES[MEASURED] not in metrics else MEASURED


def titles(rows: pd.DataFrame, summary: pd.DataFrame) -> pd.Series[str]:
    """Return the title of each row's configuration, without batch size and sequence length.

    The title names the device if charts have several devices. It names the run if several runs have
    the same case.
    """
    axes = [axis for axis in AXES if axis not in ("trainer", "batch_size", "seq_len")]
    parts = [", ".join(title_parts(row)) or SCRIPT for row in rows[axes].to_dict("records")]
    title = pd.Series(parts, index=rows.index, dtype=object)
    drawn = summary[summary.basis == _basis(summary)]
    devices = set(drawn.device)
    if len(devices) > 1:
        title = title.where(~rows.device.isin(devices), title + ", " + rows.device)
    in_several_runs = drawn.groupby(OF_CASE, sort=False).run.nunique() > 1
    if in_several_runs.any():
        title = title + ", " + rows.run
    return title
