"""The outcomes of cases, and the JSON document that has all outcomes of a run."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dpbench.core.case import AXES, BASELINE_TRAINER
from dpbench.core.metrics import METRICS
from dpbench.core.registry import TRAINERS
from dpbench.core.subject import SCRIPT, Subject
from dpbench.results.kernels import Entry, KernelCount, MemoryLine, OperatorCount, pack
from dpbench.results.rows import NO_HARDWARE, NUMBER, SCHEMA, Measurement

if TYPE_CHECKING:
    import pandas as pd

COMPLETE = "complete"
INTERRUPTED = "interrupted"
STATUSES = (COMPLETE, INTERRUPTED)
"""The possible states of a session. Until a session ends, its state is ``interrupted``."""

REGRESSED, UNJUDGED = "regressed", "unjudged"
"""The verdicts on a complete session that failed: a limit was exceeded, or could not be checked."""

LISTS: dict[str, type[Measurement] | type[Entry]] = {
    "rows": Measurement,
    "operators": OperatorCount,
    "kernels": KernelCount,
    "memory_lines": MemoryLine,
}
"""The fields of `Outcome` that are top-level lists in a document, with the class of the entries.
Each entry has the fields of its case, too."""

DERIVED = ("ratios", "measured_over_logical", "throughputs")
"""The lists of a document that are computed from its rows, see `derived`."""

NUMBERED = ("operators", "kernels", "memory_lines")
"""The lists whose entries contain the index of their outcome. Rows contain no index, because the
case and the instrument of a row determine the outcome."""

NOT_SAVED = ("case", *LISTS, "log_tail", "details")
"""The fields of `Outcome` that are not in the entry of its case in a document."""


@dataclass(frozen=True)
class Outcome:
    """The result of measuring one case, or the error that prevented a result.

    Args:
        case: the case.
        rows: the measured or counted numbers, including numbers from before an error.
        seconds: the duration of the measurement.
        error: the class name of the error, or None.
        message: the error's message.
        log: the path of the measured process's log, if it was kept.
        log_tail: the last lines of the log.
        instruments: the names of the instruments that should measure the case.
        operators: the counts of each operator.
        kernels: the counts of each kernel.
        memory_lines: the source lines that allocated the memory in use at the peak.
        notes: what logical counting assumed or did not count.
        examples: the number of examples in each recorded step of a script, if its data loaders
            yielded equally many batches in each step; otherwise empty.
        extra_info: additional values that tests recorded.
        tests: the tests that requested the case, each with its id as ``test`` and its ``params``.
        labels: the labels of the trainer, see `TrainerBase`.
        imported: digests of the files and variables that were read, see `dpbench.child.imported`.
        details: what the measured process tells its parent besides; not saved.
    """

    case: Subject
    rows: tuple[Measurement, ...] = field(repr=False)
    seconds: float = 0.0
    error: str | None = None
    message: str = ""
    log: str | None = None
    log_tail: str = ""
    instruments: tuple[str, ...] = ()
    operators: tuple[OperatorCount, ...] = field(default=(), repr=False)
    kernels: tuple[KernelCount, ...] = field(default=(), repr=False)
    memory_lines: tuple[MemoryLine, ...] = field(default=(), repr=False)
    notes: tuple[str, ...] = ()
    examples: tuple[int, ...] = ()
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    tests: tuple[Mapping[str, Any], ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    imported: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def asked(self) -> list[tuple[Subject, str]]:
        """The case, paired with each of its instruments."""
        return [(self.case, name) for name in self.instruments]

    @property
    def by(self) -> set[str]:
        """The instruments that returned rows."""
        return {row.instrument for row in self.rows}

    @classmethod
    def failed(cls, case: Subject, error: Exception) -> Outcome:
        """Return the outcome of a case whose measurement raised an error."""
        return cls(case, ()).with_error(error)

    def with_error(self, error: Exception) -> Outcome:
        """Return the outcome with the class and the message of an error, and the error's log."""
        log = getattr(error, "log", None)
        failed = replace(self, error=type(error).__name__, message=str(error))
        return replace(failed, log=str(log)) if isinstance(log, Path) else failed

    def with_case(self, case: Subject) -> Outcome:
        """Return the outcome under the name that a case has in this process."""
        return replace(self, case=case, rows=tuple(replace(row, case=case) for row in self.rows))

    def joined(self, other: Outcome) -> Outcome:
        """Return the outcome of the same case that has the numbers of this and another outcome."""
        failed = other if other.error and not self.error else self
        return replace(
            self,
            rows=self.rows + other.rows,
            error=failed.error,
            message=failed.message,
            log=failed.log,
            log_tail=failed.log_tail,
            operators=self.operators + other.operators,
            kernels=self.kernels + other.kernels,
            memory_lines=self.memory_lines + other.memory_lines,
            notes=tuple(dict.fromkeys(self.notes + other.notes)),
            examples=other.examples if self.examples in ((), other.examples) else (),
            labels={**self.labels, **other.labels},
            imported={**self.imported, **other.imported},
        )

    @classmethod
    def of_ranks(cls, outcomes: Sequence[Outcome]) -> Outcome:
        """Return the outcome of all ranks, in which each row names its rank.

        Operators and other lists are those of rank 0. Examples are added up. ``details["ranks"]``
        has the details of each rank.
        """
        rows = [replace(row, rank=n) for n, each in enumerate(outcomes) for row in each.rows]
        notes = dict.fromkeys(note for each in outcomes for note in each.notes)
        ranks = [each.details for each in outcomes]
        details = {**outcomes[0].details, "ranks": ranks}
        examples = tuple(map(sum, zip(*(each.examples for each in outcomes), strict=False)))
        first = replace(outcomes[0], rows=tuple(rows), notes=tuple(notes), details=details)
        return replace(first, examples=examples)

    def as_json(self) -> dict[str, Any]:
        """Return the outcome as plain JSON types, which another process can read."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Outcome:
        """Invert `as_json`. A field that is missing gets the default value."""
        return msgspec.convert(data, cls)

    def as_saved(self, number: int) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
        """Return the entry of a document about the outcome with this index, and its `LISTS`.

        The fields of the case come first in the entry, and in each entry of the lists.
        """
        case = dict(self.case.columns)
        own = {k: v for k, v in self.as_json().items() if k not in NOT_SAVED}
        entry = case | {k: [*v] if isinstance(v, tuple) else v for k, v in own.items()}
        for name in ("examples", "extra_info", "tests", "labels", "imported"):
            if not entry[name]:
                del entry[name]
        lists = {
            name: [case | each.as_row() | {"outcome": number} for each in getattr(self, name)]
            for name in NUMBERED
        }
        return entry, {"rows": [row.as_row() for row in self.rows], **lists}

    @classmethod
    def from_saved(cls, entry: Mapping[str, Any], **lists: Sequence[Mapping[str, Any]]) -> Outcome:
        """Invert `as_saved`."""
        rows = [*map(with_subject, lists.pop("rows"))]
        return msgspec.convert({**with_subject(entry), **lists, "rows": rows}, cls)


def with_subject(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a run with the entry ``case``, from which msgspec makes the subject."""
    is_script = row["workload"] == SCRIPT
    return {**row, "case": [row["trainer"], row["batch_size"]] if is_script else row}


def merge_duplicates(outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
    """Merge outcomes of the same case, so that each number occurs once.

    Of several outcomes with the same case and instruments, the first is kept. If that outcome
    failed, the first outcome that has rows and did not fail is kept instead. The kept outcome gets
    the tests and ``extra_info`` of all these outcomes. If outcomes of one case have different but
    overlapping instruments, only the first rows of each instrument are kept. Operators and memory
    lines are kept for the first outcome that has operators.
    """
    merged: dict[Hashable, Outcome] = {}
    for outcome in outcomes:
        key = (outcome.case, outcome.instruments) if outcome.instruments else len(merged)
        if (known := merged.setdefault(key, outcome)) is outcome:
            continue
        tests = [*known.tests, *(test for test in outcome.tests if test not in known.tests)]
        extra_info = {**known.extra_info, **outcome.extra_info}
        kept = outcome if known.error and outcome.rows and not outcome.error else known
        merged[key] = replace(kept, tests=tuple(tests), extra_info=extra_info)
    instruments: dict[Subject, set[str]] = {}
    counted: set[Subject] = set()
    for outcome in merged.values():
        previous = instruments.setdefault(outcome.case, set())
        rows = tuple(row for row in outcome.rows if row.instrument not in previous)
        operators = () if outcome.case in counted else outcome.operators
        lines = outcome.memory_lines if operators else ()
        yield replace(outcome, rows=rows, operators=operators, memory_lines=lines)
        previous |= {row.instrument for row in rows}
        if operators:
            counted.add(outcome.case)


def document(
    outcomes: Sequence[Outcome],
    environment: Mapping[str, Any],
    session: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the JSON document of a run, as plain JSON types.

    Args:
        outcomes: the outcomes of all cases.
        environment: the software and machine, see `dpbench.results.conditions.environment`.
        session: the grid, settings and status, see `dpbench.results.conditions.new_run`.
    """
    saved = [outcome.as_saved(number) for number, outcome in enumerate(outcomes)]
    lists = {name: [entry for _, own in saved for entry in own[name]] for name in LISTS}
    return {
        "schema": SCHEMA,
        "environment": dict(environment),
        "session": dict(session or {}),
        "summary": trainer_summary(outcomes),
        "metrics": METRICS.definitions({row["metric"] for row in lists["rows"]}),
        "cases": [entry for entry, _ in saved],
        "devices": sorted({row["device"] for row in lists["rows"]}),
        **lists,
    }


def baseline_of(session: Mapping[str, Any]) -> str:
    """Return the trainer that the ratios of a session divide by."""
    return str(session.get("grid", {}).get("baseline", BASELINE_TRAINER))


def derived(summary: pd.DataFrame) -> dict[str, Any]:
    """Return ratios, quotients of measured and logical numbers, and throughputs.

    These numbers are for programs that read a document without dpbench.
    """
    rows = summary.rename(columns={"baseline": "to"})
    own, rates = (rows[rows.kind == kind] for kind in ("value", "throughput"))
    by = [*AXES, *NUMBER[1:], "unit", "value"]
    ratios = own[own.ratio.notna() & (own.trainer != own.to)]
    against = own.dropna(subset="over_logical")
    sources = rates.instrument + " bytes / " + rates.timed_by + " seconds"
    return {
        "ratios": _records(ratios[[*by, "ratio"]]),
        "measured_over_logical": _records(against[[*by, "logical", "over_logical"]]),
        "throughputs": _records(rates.assign(instrument=sources)[by]),
    }


def _records(frame: pd.DataFrame) -> list[dict[Hashable, Any]]:
    """Return the rows of a frame as plain JSON types with all digits. NaN becomes None."""
    columns = [[v if v == v else None for v in frame[name].tolist()] for name in frame]
    return [dict(zip(frame, row, strict=True)) for row in zip(*columns, strict=True)]


def trainer_summary(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Summarise the outcomes of each trainer and set of instruments.

    Returns:
        For each trainer and set of instruments: how many cases succeeded and failed, the failures,
        and the largest peak memory of all cases. ``peak_memory_bytes`` was measured, and
        ``logical_peak_memory_bytes`` was counted without hardware. An unknown peak is None.
    """
    groups: dict[tuple[str, tuple[str, ...]], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.case.trainer, outcome.instruments), []).append(outcome)
    lines = []
    for trainer, instruments in sorted(groups, key=lambda group: TRAINERS.rank(group[0])):
        group = groups[trainer, instruments]
        failures = [
            {"case": o.case.id, "error": o.error, "message": o.message, "log": o.log}
            for o in group
            if o.error
        ]
        ok = len(group) - len(failures)
        rows = [r for o in group for r in o.rows if r.metric == "peak_memory_bytes"]
        measured = [row.value for row in rows if row.device != NO_HARDWARE]
        counted = [row.value for row in rows if row.device == NO_HARDWARE]
        lines.append(
            {
                "trainer": trainer,
                "instruments": list(instruments),
                "ok": ok,
                "failed": len(failures),
                "success_rate": ok / len(group),
                "peak_memory_bytes": max(measured, default=None),
                "logical_peak_memory_bytes": max(counted, default=None),
                "failures": failures,
            }
        )
    return lines


def document_text(document: Mapping[str, Any]) -> str:
    """Write a document as JSON text, with a line for each field and for each entry of its lists.

    Lists of entries with the same fields are packed, see `Packed`.
    """
    fields = [f" {json.dumps(name)}: {_lines(name, value)}" for name, value in document.items()]
    return "{\n" + ",\n".join(fields) + "\n}\n"


def _lines(name: str, value: Any) -> str:
    if not (isinstance(value, list) and value):
        return json.dumps(value)
    if name in (*LISTS, *DERIVED):
        return document_text(msgspec.to_builtins(pack(value))).rstrip()
    entries = (json.dumps(entry, separators=(",", ": ")) for entry in value)
    return "[\n" + ",\n".join(f"  {entry}" for entry in entries) + "\n ]"
