"""Runs as the page reads them: labelled, with one summary of all their rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from dpbench.case import AXES, Case
from dpbench.results.frame import CONFIGURATION, of_one_instrument, summarise, with_ratios
from dpbench.results.outcome import NOT_TRIED
from dpbench.results.rows import COLUMNS
from dpbench.show.groups import in_order

UNMEASURED = "logical"
"""The instrument whose rows were counted without hardware; those of all others are measured."""

KEYS = ["run", "title", "device", *CONFIGURATION, "trainer"]
"""What tells a case on the page from every other."""


def fate(error: str) -> str:
    """What became of a case with this error: ``skipped`` before it cost anything, or ``failed``."""
    return "skipped" if error == NOT_TRIED else "failed"


def cell_label(batch_size: int, seq_len: int) -> str:
    """How the page names a cell of the grid."""
    return f"batch {batch_size} × sequence {seq_len}"


@dataclass(frozen=True)
class Source:
    """One run of the page.

    Args:
        label: what the page calls it.
        environment: software and hardware, and what else the document says of the run.
        cases: each case's fields with ``error`` (None if it succeeded) and ``message``.
        frame: the long table, with the columns of `Measurement.as_row`.
    """

    label: str
    environment: Mapping[str, Any] = field(repr=False)
    cases: Sequence[Mapping[str, Any]] = field(repr=False)
    frame: pd.DataFrame = field(repr=False)

    @classmethod
    def of(cls, label: str, document: Mapping[str, Any]) -> Source:
        """The run of a document that was just made, or that `Run.load` has checked."""
        frame = pd.DataFrame(document["rows"], columns=COLUMNS).astype({"value": float})
        cases = document.get("cases") or [
            {**case, "error": None, "message": ""}
            for case in frame[list(AXES)].drop_duplicates().to_dict("records")
        ]
        about = {**document.get("environment", {}), **document.get("session", {})}
        for number, update in enumerate(document.get("updates", ()), 1):
            of = {"started": update.get("started"), "cases": list(update["cases"])}
            about[f"update {number}"] = {**of, **update["environment"]}
        return cls(label, about, cases, frame)

    @property
    def failures(self) -> list[Mapping[str, Any]]:
        """The cases that failed or were skipped, with their errors."""
        return [case for case in self.cases if case.get("error")]


def labelled(documents: Iterable[tuple[str, Mapping[str, Any]]]) -> list[Source]:
    """Documents under the names they came with; a name that comes again is numbered."""
    sources: list[Source] = []
    seen: dict[str, int] = {}
    for name, document in documents:
        seen[name] = seen.get(name, 0) + 1
        label = name if seen[name] == 1 else f"{name} ({seen[name]})"
        sources.append(Source.of(label, document))
    return sources


def summary_of(sources: Sequence[Source]) -> pd.DataFrame:
    """One row per run, case, instrument, phase and metric, in the order of reading.

    The columns are those of `with_ratios`, then ``run``, the source's label; ``measured``, False
    where the number was counted without hardware; and ``title``, which configuration it is. A
    ratio compares with the standard trainer of the same run.
    """
    parts = [
        in_order(with_ratios(of_one_instrument(summarise(source.frame)))).assign(run=source.label)
        for source in sources
        if not source.frame.empty
    ]
    if not parts:
        empty = {name: pd.Series(dtype=object) for name in (*COLUMNS, "run", "title")}
        return pd.DataFrame(empty).assign(measured=False, ratio=0.0, spread=0.0)
    summary = pd.concat(parts, ignore_index=True)
    summary["measured"] = summary.instrument != UNMEASURED
    summary["title"] = _titles(summary, summary)
    return summary


def has_case_of(rows: pd.DataFrame, others: pd.DataFrame) -> pd.Series[bool]:
    """Which rows are of a case of which the others have a row."""
    cases, known = (pd.MultiIndex.from_frame(frame[list(AXES)]) for frame in (rows, others))
    return pd.Series(cases.isin(known), index=rows.index)


def cases_without_logical(sources: Iterable[Source]) -> list[Case]:
    """The measured cases of which no run has logical counts, each once."""
    parts = [source.frame[["instrument", *AXES]] for source in sources]
    rows = pd.concat(parts, ignore_index=True).drop_duplicates()
    without = rows[~has_case_of(rows, rows[rows.instrument == UNMEASURED])]
    cases = without[list(AXES)].drop_duplicates().to_dict("records")
    return [Case.from_row(case) for case in cases]


def failures_of(sources: Sequence[Source], summary: pd.DataFrame) -> pd.DataFrame:
    """The cases that failed or were skipped, one row each.

    With the case's fields, ``run``, ``error`` and ``message``; ``device`` is where the others of
    the run were measured; ``title`` as in the summary.
    """
    failed = pd.DataFrame(
        [{"run": source.label, **case} for source in sources for case in source.failures],
        columns=["run", *AXES, "error", "message"],
    )
    devices = _subject(summary).drop_duplicates("run").set_index("run").device
    failed["device"] = [devices.get(run, "") for run in failed.run]
    failed["title"] = _titles(failed, summary)
    return failed


def _subject(summary: pd.DataFrame) -> pd.DataFrame:
    """What the page is about: measured rows where there are any."""
    return summary[summary.measured] if summary.measured.any() else summary


def _titles(rows: pd.DataFrame, summary: pd.DataFrame) -> pd.Series[str]:
    """What tells a row's configuration from the others on the page, without batch and sequence."""
    title = rows.model_size.astype(str) + " " + rows.precision.astype(str)
    for name, default in (("attention", "sdpa"), ("model", "simple")):
        title = title.where(rows[name] == default, title + ", " + rows[name].astype(str))
    subject = _subject(summary)
    devices = set(subject.device)
    if len(devices) > 1:
        title = title.where(~rows.device.isin(devices), title + ", " + rows.device)
    again = subject.groupby([*AXES, "device"]).run.nunique() > 1
    if again.any():  # the same case in two runs: only the run's label tells them apart
        title = title + ", " + rows.run
    return title
