"""What the page shows, as frames: runs under labels, one summary of all, which bytes it is of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from dpbench.case import AXES, PHASES
from dpbench.metrics import EXPECTED_BY, expectations
from dpbench.results.frame import (
    CONFIGURATION,
    IN_CACHE_BYTES,
    of_one_instrument,
    summarise,
    with_logical,
    with_ratios,
)
from dpbench.results.rows import STEP
from dpbench.results.run import Run
from dpbench.show.tables import in_order, title_parts

UNMEASURED = "logical"
"""The instrument whose rows were counted without hardware; those of all others are measured."""

CELL = [axis for axis in CONFIGURATION if axis not in PHASES]
"""What a case shares with its baseline, but for the optimizer: a phase is called so, too."""

KEYS = ["run", "title", "device", *CELL, "trainer"]
"""What tells a case on the page from every other; its optimizer is in the title."""

IN_CACHE = (
    "Warning: some steps move less than 1 GB. At that size the data stays in the L2 cache, and "
    "ratios of DRAM bytes mean nothing."
)


def labelled(documents: Iterable[tuple[str, Mapping[str, Any]]]) -> list[Run]:
    """Documents as runs with the names they came with; a name that comes again is numbered."""
    runs: list[Run] = []
    seen: Counter[str] = Counter()
    for name, document in documents:
        seen[name] += 1
        label = name if seen[name] == 1 else f"{name} ({seen[name]})"
        runs.append(Run(Path(label), document, label))
    return runs


class Basis(NamedTuple):
    """Which bytes a chart is about; measured and counted ones never share one.

    ``short`` is the name for an axis, ``premise`` where such a number comes from, in a word
    ``verb``.
    """

    metric: str
    name: str
    short: str
    verb: str
    premise: str


_BY_COUNTERS = "measured by hardware counters"
_BY_OPERATOR = "counted operator by operator without hardware, not measured"
DRAM = Basis("dram_bytes", "DRAM bytes", "DRAM GB per step (measured)", "measured", _BY_COUNTERS)
LOGICAL = Basis(
    "logical_bytes", "Logical bytes", "logical GB per step (counted)", "counted", _BY_OPERATOR
)


@dataclass(frozen=True)
class Material:
    """What the charts of one page share: frames, colours, and which bytes they are about.

    ``expected`` says by metric between which ratios to standard the reader expects it.
    """

    runs: Sequence[Run]
    expected: Mapping[str, tuple[float, float]] = field(default_factory=expectations)

    @cached_property
    def baseline(self) -> str:
        """What ratios divide by, in words."""
        return " or ".join(dict.fromkeys(run.baseline for run in self.runs))

    @cached_property
    def summary(self) -> pd.DataFrame:
        """One row per run, case, instrument, phase and metric, in the order of reading.

        The columns are those of `with_ratios`, then ``run``, its name; ``measured``,
        False where the number was counted without hardware; and ``title``, which configuration it
        is. A ratio compares with the baseline of the same run.
        """
        runs = [run for run in self.runs if not run.frame.empty] or self.runs[:1]
        parts = [
            with_ratios(of_one_instrument(summarise(run.frame)), run.baseline).assign(run=run.name)
            for run in runs
        ]
        summary = pd.concat(map(in_order, parts), ignore_index=True)
        summary["measured"] = summary.instrument != UNMEASURED
        return summary.assign(title=_titles(summary, summary))

    @cached_property
    def outcomes(self) -> pd.DataFrame:
        """What became of each case: its fields, ``run``, and if it has no result ``error``."""
        rows = [
            {"run": run.name, **vars(outcome.case), **vars(outcome), "skipped": outcome.skipped}
            for run in self.runs
            for outcome in run.outcomes
        ]
        return pd.DataFrame(rows, columns=["run", *AXES, "error", "message", "skipped"])

    @cached_property
    def failed(self) -> pd.DataFrame:
        """The cases that failed or were skipped (their ``fate``), with a ``title`` as in `summary`.

        ``device`` is where the others of the run were measured.
        """
        failed = self.outcomes.dropna(subset="error")
        failed = failed.assign(fate=failed.skipped.map({True: "skipped", False: "failed"}))
        devices = _subject(self.summary).drop_duplicates("run").set_index("run").device
        failed["device"] = [devices.get(run, "") for run in failed.run]
        return failed.assign(title=_titles(failed, self.summary))

    @cached_property
    def basis(self) -> Basis:
        """Measured bytes, or counted ones where there are no others."""
        metrics = set(self.summary.metric)
        return LOGICAL if LOGICAL.metric in metrics and DRAM.metric not in metrics else DRAM

    def step_bytes(self, basis: Basis) -> pd.DataFrame:
        """The rows of a basis for whole steps."""
        return self.summary[(self.summary.metric == basis.metric) & (self.summary.phase == STEP)]

    @cached_property
    def ratios(self) -> pd.DataFrame:
        """Whole-step rows of all trainers but the baseline, where there is a ratio."""
        rows = self.step_bytes(self.basis)
        return rows[(rows.trainer != rows.baseline) & rows.ratio.notna()]

    @cached_property
    def of_ratios(self) -> list[str]:
        """What must be said beside ratios of these bytes."""
        said = []
        if len(self.ratios) and (limits := self.expected.get(self.basis.metric)):
            usual = "{}: {:g} to {:g} times {}'s bytes."
            said.append(usual.format(EXPECTED_BY.capitalize(), *limits, self.baseline))
        if self.basis is DRAM and (self.step_bytes(DRAM).value < IN_CACHE_BYTES).any():
            said.append(IN_CACHE)
        return said

    @cached_property
    def beside_logical(self) -> pd.DataFrame:
        """Measured steps with logical bytes of the case, whichever run has counted it first.

        Counts depend on nothing but the case and the versions that counted it.
        """
        counted = self.step_bytes(LOGICAL).drop_duplicates(list(AXES))
        both = with_logical(pd.concat([self.step_bytes(DRAM), counted]))
        return both[both.measured].dropna(subset="logical")

    @cached_property
    def peaks(self) -> pd.DataFrame:
        """Peak memory of each case, by the same premise as the bytes."""
        rows = self.summary[self.summary.metric == "peak_memory_bytes"]
        rows = rows[(rows.phase == STEP) & (rows.measured == (self.basis is DRAM))]
        return rows.drop_duplicates(KEYS)


def pivot(rows: pd.DataFrame, columns: str, values: str = "value") -> pd.DataFrame:
    """One row per case, in the order in which cases first come; the first of equals counts."""
    unique = rows.drop_duplicates([*KEYS, columns])
    if unique.empty:  # pandas with pyarrow cannot pivot it
        return unique[KEYS]
    wide = unique.pivot(index=KEYS, columns=columns, values=values).rename_axis(columns=None)
    return unique[KEYS].drop_duplicates().join(wide, on=KEYS).reset_index(drop=True)


def _subject(summary: pd.DataFrame) -> pd.DataFrame:
    """What the page is about: measured rows where there are any."""
    return summary[summary.measured] if summary.measured.any() else summary


def _titles(rows: pd.DataFrame, summary: pd.DataFrame) -> pd.Series[str]:
    """What tells a row's configuration from the others on the page, without batch and sequence."""
    axes = [axis for axis in AXES if axis not in ("trainer", "batch_size", "seq_len")]
    parts = [", ".join(title_parts(row)) for row in rows[axes].to_dict("records")]
    title = pd.Series(parts, index=rows.index, dtype=object)
    subject = _subject(summary)
    devices = set(subject.device)
    if len(devices) > 1:
        title = title.where(~rows.device.isin(devices), title + ", " + rows.device)
    again = subject.groupby([*AXES, "device"]).run.nunique() > 1
    if again.any():  # the same case in two runs: only the run's label tells them apart
        title = title + ", " + rows.run
    return title
