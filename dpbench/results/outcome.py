"""What became of each case, and the run as one document."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpbench.case import AXES, BASELINE_TRAINER, Case
from dpbench.files import write_text
from dpbench.gpu import Gpu
from dpbench.registry import TRAINERS
from dpbench.results.code_state import code_state
from dpbench.results.kernels import KernelCount
from dpbench.results.operators import OperatorCount
from dpbench.results.rows import SCHEMA, Measurement, as_rows
from dpbench.results.speed_of_light import KernelSpeed

if TYPE_CHECKING:
    import pandas as pd

COMPLETE = "complete"
INTERRUPTED = "interrupted"
STATUSES = (COMPLETE, INTERRUPTED)
"""How a session ended. A document says ``interrupted`` until its session is over."""


PARTS: dict[str, type[OperatorCount] | type[KernelCount] | type[KernelSpeed]] = {
    "operators": OperatorCount,
    "kernels": KernelCount,
    "speed_of_light": KernelSpeed,
}
"""The fields of an `Outcome`, and lists of a document, with an entry an operator or kernel."""


def belongs(part: str, instruments: Iterable[str]) -> bool:
    """Whether one of `PARTS` is of an outcome by these instruments: counted, or under ncu."""
    if part == "operators":
        return "logical" in instruments
    return any(name.startswith("ncu") for name in instruments)


NOT_TRIED = "DoesNotFit"
"""The error of a case that was skipped, `dpbench.instruments.fit.DoesNotFit`; others failed."""


@dataclass(frozen=True)
class Outcome:
    """What became of one case.

    ``error`` is the class of what went wrong, or None; rows measured before it are kept.
    ``instruments`` are the names of those that were to measure it; ``operators``, ``kernels`` and
    ``speed_of_light`` are what they saw each operator and kernel do, ``notes`` what they had to
    assume. ``extra_info`` is what its tests added.
    """

    case: Case
    rows: tuple[Measurement, ...] = field(repr=False)
    seconds: float
    error: str | None = None
    message: str = ""
    log: str | None = None
    log_tail: str = ""
    instruments: tuple[str, ...] = ()
    operators: tuple[OperatorCount, ...] = field(default=(), repr=False)
    kernels: tuple[KernelCount, ...] = field(default=(), repr=False)
    speed_of_light: tuple[KernelSpeed, ...] = field(default=(), repr=False)
    notes: tuple[str, ...] = ()
    extra_info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def skipped(self) -> bool:
        """Whether it was not even tried, because it cannot fit the GPU."""
        return self.error == NOT_TRIED

    def as_json(self) -> dict[str, Any]:
        """Plain JSON types; the inverse of `from_json`."""
        rest = {k: v for k, v in vars(self).items() if k not in ("case", "rows")}
        rest["instruments"] = list(self.instruments)
        rest |= {part: [entry.as_row() for entry in getattr(self, part)] for part in PARTS}
        rest["notes"] = list(self.notes)
        return {"case": asdict(self.case), **rest, "rows": as_rows(self.rows)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Outcome:
        """The outcome that `as_json` described."""
        rest = {k: v for k, v in data.items() if k not in ("case", "rows")}
        rest["instruments"] = tuple(rest["instruments"])
        for part, kind in PARTS.items():
            rest[part] = tuple(kind.from_row(row) for row in rest[part])
        rest["notes"] = tuple(rest["notes"])
        rows = tuple(Measurement.from_row(row) for row in data["rows"])
        return cls(case=Case.from_row(data["case"]), rows=rows, **rest)


def environment(
    gpu: Gpu | None = None, *, ncu: str | None = None, project: Path | None = None
) -> dict[str, Any]:
    """Which software and machine made a run; versions are read without importing anything.

    Args:
        gpu: what measured, if a GPU did; it knows its driver.
        ncu: the version of Nsight Compute, if it was used.
        project: a directory of the measured project, whose commit is to be recorded.
    """
    versions: dict[str, str | None] = {}
    for package in ("dpbench", "torch", "opacus", "pandas", "ncu-report"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": {
            "architecture": platform.machine(),
            "cpu": _cpu_model(),
            "cpus": os.cpu_count(),
        },
        "versions": {**versions, "ncu": ncu},
        "gpu": vars(gpu) if gpu else None,
        "code": code_state(project) if project else None,
    }


def _cpu_model() -> str | None:
    """What Linux calls the processor; launch-bound steps take as long as it needs for them."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return None


def document(
    outcomes: Sequence[Outcome],
    environment: Mapping[str, Any],
    session: Mapping[str, Any] | None = None,
    updates: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """A run as plain JSON types, every measurement under ``rows``.

    ``session`` says how it came about, ``updates`` what was written into it later; see
    `dpbench.results.run.Run`.
    """
    rows = [row for outcome in outcomes for row in outcome.rows]
    cases = []
    for outcome in outcomes:
        data = outcome.as_json()
        for part in ("rows", "log_tail", *PARTS):
            del data[part]
        if not outcome.extra_info:
            del data["extra_info"]
        cases.append({**data.pop("case"), **data})
    return {
        "schema": SCHEMA,
        "environment": dict(environment),
        "session": dict(session or {}),
        **({"updates": list(updates)} if updates else {}),
        "summary": trainer_summary(outcomes),
        "cases": cases,
        "devices": sorted({row.device for row in rows}),
        "rows": as_rows(rows),
        **{
            part: [
                {**asdict(outcome.case), **entry.as_row()}
                for outcome in outcomes
                for entry in getattr(outcome, part)
            ]
            for part in PARTS
        },
        **_derived(rows),
    }


def _derived(rows: Sequence[Measurement]) -> dict[str, Any]:
    """What follows from the rows, so that no reader has to work it out again.

    ``ratios``: each mean over that of standard training in the same cell, by case, instrument,
    metric and phase. ``measured_over_logical``: as `with_logical` says. ``throughputs``: as
    `throughputs` says.
    """
    from dpbench.results.frame import summarise, throughputs, to_frame, with_logical, with_ratios

    summary = summarise(to_frame(rows))
    ratios = with_ratios(summary).dropna(subset="ratio")
    against = with_logical(summary).dropna(subset="over_logical")
    by = [*AXES, "instrument", "device", "phase", "metric", "unit", "value"]
    return {
        "ratios": _records(ratios.loc[ratios.trainer != BASELINE_TRAINER, [*by, "ratio"]]),
        "measured_over_logical": _records(against[[*by, "logical", "over_logical"]]),
        "throughputs": _records(throughputs(summary)),
    }


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as plain JSON types, every digit kept; None for NaN."""
    plain = frame.astype(object).where(frame.notna(), None)
    return [{str(name): value for name, value in row.items()} for row in plain.to_dict("records")]


def trainer_summary(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """For each trainer: cases that succeeded, failed or were skipped, peak memory, and why.

    Cases that were measured and cases that were counted have lines of their own. Skipped cases,
    which cannot fit the GPU, don't count for ``success_rate``; they have their reason, too.
    ``peak_memory_bytes`` is the largest that was measured, ``logical_peak_memory_bytes`` the
    largest that was predicted without hardware; None where there is none.
    """
    groups: dict[tuple[str, tuple[str, ...]], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.case.trainer, outcome.instruments), []).append(outcome)
    order = sorted(groups, key=lambda group: TRAINERS.rank(group[0]))
    return [_summarise_trainer(*group, groups[group]) for group in order]


def _summarise_trainer(
    trainer: str, instruments: Sequence[str], outcomes: Sequence[Outcome]
) -> dict[str, Any]:
    skipped = sum(outcome.skipped for outcome in outcomes)
    failed = sum(outcome.error is not None for outcome in outcomes) - skipped
    tried = len(outcomes) - skipped
    return {
        "trainer": trainer,
        "instruments": list(instruments),
        "ok": tried - failed,
        "failed": failed,
        "skipped": skipped,
        "success_rate": (tried - failed) / tried if tried else None,
        "peak_memory_bytes": _peak(outcomes, "timing"),
        "logical_peak_memory_bytes": _peak(outcomes, "logical"),
        "failures": [
            {"case": o.case.id, "error": o.error, "message": o.message, "log": o.log}
            for o in outcomes
            if o.error
        ],
    }


def _peak(outcomes: Sequence[Outcome], instrument: str) -> float | None:
    rows = (row for outcome in outcomes for row in outcome.rows if row.instrument == instrument)
    return max((row.value for row in rows if row.metric == "peak_memory_bytes"), default=None)


def write_json(
    path: Path,
    outcomes: Sequence[Outcome],
    environment: Mapping[str, Any],
    session: Mapping[str, Any] | None = None,
    updates: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write a run's document."""
    write_document(path, document(outcomes, environment, session, updates))


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Write what `document` made; `dpbench.results.run.Heading` relies on its line breaks."""
    write_text(path, json.dumps(document, indent=1) + "\n")
