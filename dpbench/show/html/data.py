"""What the page shows, as frames: runs under labels, one summary of all, each chart's rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from dpbench.case import ADDED, ALL_PHASES, AXES, BASELINE_TRAINER, Case, trained_in, unusual
from dpbench.results.frame import (
    CONFIGURATION,
    IN_CACHE_BYTES,
    of_one_instrument,
    summarise,
    with_logical,
    with_ratios,
)
from dpbench.results.rows import COLUMNS, STEP
from dpbench.show.tables import SHOWN_SHARE, in_order
from dpbench.show.view import Column, column, shown_by_default

UNMEASURED = "logical"
"""The instrument whose rows were counted without hardware; those of all others are measured."""

KEYS = ["run", "title", "device", *CONFIGURATION, "trainer"]
"""What tells a case on the page from every other."""

IN_CACHE = (
    "Warning: some steps move less than 1 GB. At that size the data stays in the L2 cache, and "
    "ratios of DRAM bytes mean nothing."
)

# --- runs ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """One run of the page, under a label.

    ``environment`` is software and hardware, and what else the document says of the run;
    ``cases`` are the fields of each, with ``error`` (None if it succeeded) and ``message``;
    ``frame`` is the long table.
    """

    label: str
    environment: Mapping[str, Any]
    cases: Sequence[Mapping[str, Any]]
    frame: pd.DataFrame

    @classmethod
    def of(cls, label: str, document: Mapping[str, Any]) -> Source:
        """The run of a document that was just made, or that `Run.load` has checked."""
        rows = [ADDED | row for row in document["rows"]]
        frame = pd.DataFrame(rows, columns=COLUMNS).astype({"value": float})
        cases = [ADDED | case for case in document.get("cases", ())] or [
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
    seen: Counter[str] = Counter()
    for name, document in documents:
        seen[name] += 1
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
    return summary.assign(title=_titles(summary, summary))


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
    return failed.assign(title=_titles(failed, summary))


def _subject(summary: pd.DataFrame) -> pd.DataFrame:
    """What the page is about: measured rows where there are any."""
    return summary[summary.measured] if summary.measured.any() else summary


def _titles(rows: pd.DataFrame, summary: pd.DataFrame) -> pd.Series[str]:
    """What tells a row's configuration from the others on the page, without batch and sequence."""
    trained = [trained_in(row) for row in rows[list(AXES)].to_dict("records")]
    title = pd.Series(trained, index=rows.index, dtype=object) + " " + rows.precision.astype(str)
    for name, default in (("attention", "sdpa"), ("model", "simple")):
        title = title.where(rows[name].isin([default, ""]), title + ", " + rows[name].astype(str))
    rest = [
        "".join(f", {a.replace('_', ' ')} {v}" for a, v in unusual(row).items())
        for row in rows[list(AXES)].to_dict("records")
    ]
    title = title + pd.Series(rest, index=rows.index, dtype=object)
    subject = _subject(summary)
    devices = set(subject.device)
    if len(devices) > 1:
        title = title.where(~rows.device.isin(devices), title + ", " + rows.device)
    again = subject.groupby([*AXES, "device"]).run.nunique() > 1
    if again.any():  # the same case in two runs: only the run's label tells them apart
        title = title + ", " + rows.run
    return title


def has_case_of(rows: pd.DataFrame, others: pd.DataFrame) -> pd.Series[bool]:
    """Which rows are of a case of which the others have a row."""
    cases, known = (pd.MultiIndex.from_frame(frame[list(AXES)]) for frame in (rows, others))
    return pd.Series(cases.isin(known), index=rows.index)


def cases_without_logical(sources: Iterable[Source]) -> list[Case]:
    """The measured cases of which no run has logical counts, each once."""
    parts = [source.frame[["instrument", *AXES]] for source in sources]
    rows = pd.concat(parts, ignore_index=True).drop_duplicates()
    without = rows[~has_case_of(rows, rows[rows.instrument == UNMEASURED])]
    return [Case.from_row(case) for case in without.drop_duplicates(list(AXES)).to_dict("records")]


# --- what each chart shows -------------------------------------------------------------------


@dataclass(frozen=True)
class Basis:
    """Which bytes a chart is about; measured and counted ones never share one.

    ``short`` is the name for an axis, ``premise`` where such a number comes from, in a word
    ``verb``.
    """

    metric: str
    name: str
    short: str
    premise: str
    verb: str = "measured"

    @property
    def measured(self) -> bool:
        """Whether hardware counted them."""
        return self.verb == "measured"


DRAM = Basis(
    "dram_bytes", "DRAM bytes", "DRAM GB per step (measured)", "measured by hardware counters"
)
LOGICAL = Basis(
    "logical_bytes",
    "Logical bytes",
    "logical GB per step (counted)",
    "counted operator by operator without hardware, not measured",
    "counted",
)


def basis_of(summary: pd.DataFrame) -> Basis | None:
    """Measured bytes where there are any, else counted ones, else None."""
    return next((basis for basis in (DRAM, LOGICAL) if basis.metric in set(summary.metric)), None)


def step_bytes(summary: pd.DataFrame, basis: Basis) -> pd.DataFrame:
    """The rows of a basis for whole steps."""
    return summary[(summary.metric == basis.metric) & (summary.phase == STEP)]


def cautions(summary: pd.DataFrame, basis: Basis) -> list[str]:
    """What must be said beside ratios of these bytes."""
    small = basis.measured and (step_bytes(summary, basis).value < IN_CACHE_BYTES).any()
    return [IN_CACHE] if small else []


def by_phase(summary: pd.DataFrame, basis: Basis) -> pd.DataFrame:
    """Bytes by case and phase, in the columns that `phases_of` lists, and for the ``step``.

    A phase is left out if no case moves `SHOWN_SHARE` of its step there; a case that was
    measured for the whole step only has NaN in its phases.
    """
    wide = _pivot(summary[summary.metric == basis.metric], "phase", "value", KEYS)
    if STEP not in wide:
        wide[STEP] = float("nan")
    shown = [name for name in phases_of(wide) if (wide[name] > SHOWN_SHARE * wide[STEP]).any()]
    ratio = step_bytes(summary, basis).set_index(KEYS).ratio
    return wide[[*KEYS, *shown, STEP]].join(ratio, on=KEYS)


def phases_of(wide: pd.DataFrame) -> list[str]:
    """The phases that a frame of `by_phase` has, in order."""
    return [name for name in ALL_PHASES if name in wide]


def ratios(summary: pd.DataFrame, basis: Basis) -> pd.DataFrame:
    """Whole-step rows of all trainers but the baseline, where there is a ratio."""
    rows = step_bytes(summary, basis)
    return rows[(rows.trainer != BASELINE_TRAINER) & rows.ratio.notna()]


def series(ratios: pd.DataFrame, along: str) -> Iterator[tuple[Any, Any, pd.DataFrame]]:
    """Ratios along one axis of the grid: title, the other axis's value, the rows.

    Only series in which some trainer has two points or more.
    """
    other = {"seq_len": "batch_size", "batch_size": "seq_len"}[along]
    for (title, value), rows in ratios.groupby(["title", other], sort=False):
        if (rows.groupby("trainer")[along].nunique() > 1).any():
            yield title, value, rows.sort_values(along, kind="stable")


def memory_against_bytes(summary: pd.DataFrame, basis: Basis) -> pd.DataFrame:
    """Bytes of a step (``value``) and ``peak`` memory of the same case, device and premise."""
    step = summary[(summary.phase == STEP) & (summary.measured == basis.measured)]
    peaks = step[step.metric == "peak_memory_bytes"].drop_duplicates(KEYS).set_index(KEYS).value
    moved = step[step.metric == basis.metric]
    return moved.join(peaks.rename("peak"), on=KEYS).dropna(subset="peak")


def measured_against_logical(summary: pd.DataFrame) -> pd.DataFrame:
    """Measured DRAM bytes of each step with the ``logical`` ones of the same case.

    ``over_logical`` is measured ÷ logical, as everywhere else; NaN where nothing was counted. A
    case that was counted in several runs has the counts of the first: they depend on nothing but
    the case and the versions that counted it.
    """
    counted = step_bytes(summary, LOGICAL).drop_duplicates(list(AXES))
    both = with_logical(pd.concat([step_bytes(summary, DRAM), counted]))
    return both[both.measured].dropna(subset="logical")


def case_columns() -> list[Column]:
    """What the table of cases shows of whole steps, where it was measured or counted."""
    usual = [*shown_by_default(logical=False), *shown_by_default(logical=True)]
    return list(dict.fromkeys([*usual, column("samples_per_second")]))


def by_case(summary: pd.DataFrame) -> pd.DataFrame:
    """One row per case and premise, with those of `case_columns` for which there are rows."""
    step = summary[summary.phase == STEP]
    keys = [*KEYS, "measured"]
    parts = [
        step.loc[step.metric == shown.metrics[0], [*keys, shown.kind]]
        .rename(columns={shown.kind: "number"})
        .assign(column=shown.name)
        for shown in case_columns()
    ]
    wide = _pivot(pd.concat(parts).sort_index(kind="stable"), "column", "number", keys)
    return wide[[*keys, *(shown.name for shown in case_columns() if shown.name in wide)]]


def _pivot(rows: pd.DataFrame, columns: str, values: str, index: list[str]) -> pd.DataFrame:
    """One row per case, in the order in which cases first come; the first of equals counts."""
    unique = rows.drop_duplicates([*index, columns])
    wide = unique.pivot(index=index, columns=columns, values=values).rename_axis(columns=None)
    return unique[index].drop_duplicates().join(wide, on=index).reset_index(drop=True)
