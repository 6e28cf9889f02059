"""A run: everything that one session measured, as one JSON document on disk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpbench.core.case import AXES
from dpbench.core.files import printable, read_file
from dpbench.core.metric import Metric
from dpbench.core.metrics import METRICS
from dpbench.core.subject import Subject, subject_from
from dpbench.results.outcome import (
    COMPLETE,
    REGRESSED,
    SEEN,
    UNJUDGED,
    Outcome,
    baseline_of,
    derived,
    document,
    document_text,
    merge_duplicates,
)
from dpbench.results.rows import COLUMNS
from dpbench.results.schema import check_rows, naming, parsed

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Run:
    """One session, saved or under way; a file is checked when it is loaded.

    Args:
        path: the file.
        document: what `dpbench.results.outcome.document` made.
        label: a name to use instead of the file's.
        measured: the outcomes of a session that has no document yet.
    """

    path: Path
    document: Mapping[str, Any] = field(repr=False)
    label: str = ""
    measured: tuple[Outcome, ...] | None = field(default=None, repr=False)

    @classmethod
    def load(cls, path: Path) -> Run:
        """Read a saved run, or a document of ``--dpbench-json``: whole or not at all."""
        with naming(path):
            data = read_file(path)
        return cls.parse(data, path)

    @classmethod
    def parse(cls, data: bytes, path: Path) -> Run:
        """Read a run out of what its file has, or had in another commit."""
        with naming(path):
            saved = parsed(data)
            with METRICS.including(cls(path, saved).metrics):
                check_rows(saved["rows"])
            return cls(path, saved)

    @classmethod
    def of(
        cls,
        name: str,
        outcomes: Iterable[Outcome] = (),
        environment: Mapping[str, Any] | None = None,
        session: Mapping[str, Any] | None = None,
    ) -> Run:
        """A session so far, which need not have a file."""
        listed = tuple(merge_duplicates(outcomes))
        whole = document(listed, environment or {}, session)
        return cls(Path(name), whole, measured=listed)

    @classmethod
    def merge(cls, runs: Sequence[Run]) -> Run:
        """Merge parts into one run: an interrupted session and its continuation, or shards.

        Each number counts once; of a case that failed in one part, the outcome of a later part that
        measured it is kept. Durations are summed; the run is complete if all parts are, and has
        regressed if one has; other session fields are the last part's, and the grid is what all
        parts share. If parts differ, ``parts`` of the session records each one's differences.
        """
        every = [part for run in runs for part in run.parts]
        parts = [part for place, part in enumerate(every) if part not in every[:place]]
        outcomes = [outcome for run in runs for outcome in run.outcomes]
        grid, *others = (run.session.get("grid", {}) for run in runs)
        session = runs[-1].session | {
            "seconds": sum(run.session.get("seconds", 0.0) for run in runs),
            "cases_asked": max(len({o.case for o in outcomes}), *(r.cases_asked for r in runs)),
            "status": next((r.status for r in runs if r.status != COMPLETE), COMPLETE),
            "regressed": any(run.regressed for run in runs),
            "unjudged": [each for run in runs for each in run.session.get("unjudged", ())],
            "grid": {n: v for n, v in grid.items() if all(o.get(n) == v for o in others)},
            **({"parts": parts} if len(parts) > 1 else {}),
        }
        return cls.of(runs[-1].name, outcomes, runs[-1].environment, session)

    @property
    def parts(self) -> list[dict[str, Any]]:
        """``environment``, ``settings``, ``grid`` of each part; an unmerged run has one."""
        own = {"environment": self.environment, "settings": self.session.get("settings", {})}
        return [{"grid": self.grid, **part} for part in self.session.get("parts", [own])]

    @property
    def grid(self) -> dict[str, Any]:
        """The whole grid of its session, whatever the shard: the values along each axis."""
        return {n: v for n, v in self.session.get("grid", {}).items() if n != "shard"}

    @property
    def name(self) -> str:
        """The file's name without its ending, e.g. ``0001_before``."""
        return self.label or printable(self.path.stem)

    @property
    def environment(self) -> dict[str, Any]:
        """Machine, GPU with its driver, versions, and the measured project's code."""
        return dict(self.document.get("environment", {}))

    @property
    def session(self) -> dict[str, Any]:
        """Grid, settings, workers, start and duration; empty in documents of older versions."""
        return dict(self.document.get("session", {}))

    @property
    def baseline(self) -> str:
        """The trainer that its ratios divide by."""
        return baseline_of(self.session)

    @property
    def status(self) -> str:
        """``complete``, or ``interrupted``: then it holds what was finished until then."""
        return str(self.session.get("status", COMPLETE))

    @property
    def regressed(self) -> bool:
        """Whether something got worse in its session by more than a limit."""
        return bool(self.session.get("regressed", False))

    @property
    def verdict(self) -> str:
        """Its status or, if complete, the limits' verdict: ``regressed`` or ``unjudged``."""
        if self.status != COMPLETE:
            return self.status
        unjudged = UNJUDGED if self.session.get("unjudged") else COMPLETE
        return REGRESSED if self.regressed else unjudged

    @property
    def cases_asked(self) -> int:
        """How many cases its session was to measure; 0 if the document does not say."""
        return int(self.session.get("cases_asked", 0))

    @cached_property
    def sources(self) -> tuple[tuple[str, str], ...]:
        """Each (device, instrument) that has rows, sorted."""
        return tuple(sorted({(row["device"], row["instrument"]) for row in self.document["rows"]}))

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """The devices that have rows, sorted."""
        in_rows = {device for device, _ in self.sources}
        return tuple(self.document.get("devices", sorted(in_rows)))

    @cached_property
    def metrics(self) -> tuple[Metric, ...]:
        """The definitions of what it measured; none in documents of older versions."""
        return tuple(map(Metric.from_json, self.document.get("metrics", ())))

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The long table, with the columns of `Measurement.as_row`."""
        import pandas as pd

        return pd.DataFrame(self.document["rows"], columns=COLUMNS).astype({"value": float})

    @cached_property
    def summary(self) -> pd.DataFrame:
        """Its summary; see `dpbench.results.summary.summary`."""
        from dpbench.results.summary import summary

        with METRICS.including(self.metrics):
            return summary(self.frame, self.baseline)

    def with_derived(self) -> Run:
        """The run with derived metrics (ratios, throughputs) in its document."""
        return replace(self, document={**self.document, **derived(self.summary)})

    @cached_property
    def places(self) -> dict[tuple[Subject, str], list[str]]:
        """The devices that measured each case by each instrument."""
        places: dict[tuple[Subject, str], list[str]] = defaultdict(list)
        measured = self.frame[[*AXES, "instrument", "device"]].drop_duplicates()
        for row in measured.to_dict("records"):
            places[subject_from(row), row["instrument"]].append(row["device"])
        return dict(places)

    @cached_property
    def text(self) -> str:
        """The document as it is written."""
        return document_text(self.document)

    @cached_property
    def outcomes(self) -> tuple[Outcome, ...]:
        """The outcome of each case, in the order of the document."""
        if self.measured is not None:
            return self.measured
        rows: dict[Subject, dict[str, list[Any]]] = defaultdict(dict)
        for row in self.document["rows"]:
            rows[subject_from(row)].setdefault(row["instrument"], []).append(row)
        seen: dict[tuple[str, int], list[Any]] = defaultdict(list)
        for part in SEEN:
            for entry in self.document.get(part, ()):
                seen[part, entry["outcome"]].append(entry)
        outcomes = []
        for number, data in enumerate(self.document.get("cases", ())):
            by = rows[subject_from(data)]
            lists = {"rows": [row for name in data["instruments"] for row in by.pop(name, ())]}
            lists |= {part: seen[part, number] for part in SEEN}
            outcomes.append(Outcome.from_json({**data, **lists}))
        return tuple(outcomes)
