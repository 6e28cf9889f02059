"""A run: the outcomes and conditions of one session, which are saved as one JSON document."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dpbench.core.case import AXES
from dpbench.core.files import printable
from dpbench.core.metrics import METRICS, Metric
from dpbench.core.subject import Subject, subject_from
from dpbench.results.outcome import (
    COMPLETE,
    NUMBERED,
    REGRESSED,
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
    """The outcomes and conditions of a session that is saved or still running.

    Args:
        path: the path of the run's file. A session without a file has its name instead.
        document: the document, see `dpbench.results.outcome.document`.
        label: a name to use instead of the file's name.
        measured: the outcomes of a running session. If None, outcomes are read from the document.
    """

    path: Path
    document: Mapping[str, Any] = field(repr=False)
    label: str = ""
    measured: tuple[Outcome, ...] | None = field(default=None, repr=False)

    @classmethod
    def load(cls, path: Path) -> Run:
        """Read and check the file of a saved run, or a file that ``--dpbench-json`` wrote."""
        with naming(path):
            data = path.read_bytes()
        return cls.parse(data, path)

    @classmethod
    def parse(cls, data: bytes, path: Path) -> Run:
        """Read and check a run from the bytes of its file, which xz may have compressed."""
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
        """Make a run from outcomes and from the conditions under which they were measured."""
        merged = tuple(merge_duplicates(outcomes))
        return cls(Path(name), document(merged, environment or {}, session), measured=merged)

    @classmethod
    def merge(cls, runs: Sequence[Run]) -> Run:
        """Merge an interrupted run and its continuation, or the runs of shards, into one run.

        The outcomes of all runs are merged, see `merge_duplicates`. The duration is the sum of the
        durations of all runs. The merged run is complete if all runs are complete, and regressed if
        any run is regressed. ``unjudged`` has the entries of all runs. The grid keeps only the axes
        that have the same values in all runs. Environment and other fields of the session are those
        of the last run. If environment, settings or grid differ, ``session["parts"]`` records all
        different combinations of the three.
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
        """The different combinations of ``environment``, ``settings`` and ``grid`` in a merged run.

        A run that was not merged has one part.
        """
        own = {"environment": self.environment, "settings": self.session.get("settings", {})}
        return [{"grid": self.grid, **part} for part in self.session.get("parts", [own])]

    @property
    def grid(self) -> dict[str, Any]:
        """The values along each axis of the whole grid, of which a shard measures only a part."""
        return {n: v for n, v in self.session.get("grid", {}).items() if n != "shard"}

    @property
    def name(self) -> str:
        """The label, or the name of the file without its endings, e.g. ``0001_before``."""
        return self.label or printable(Path(self.path.name.removesuffix(".xz")).stem)

    @property
    def environment(self) -> dict[str, Any]:
        """The machine, the GPU, versions of software, and the state of the measured code."""
        return dict(self.document.get("environment", {}))

    @property
    def session(self) -> dict[str, Any]:
        """The grid, settings, status and duration, or nothing in documents of older versions."""
        return dict(self.document.get("session", {}))

    @property
    def baseline(self) -> str:
        """The trainer that ratios divide by."""
        return baseline_of(self.session)

    @property
    def status(self) -> str:
        """``complete`` or ``interrupted``. An interrupted run has the cases finished until then."""
        return str(self.session.get("status", COMPLETE))

    @property
    def regressed(self) -> bool:
        """True if a number exceeded a limit in the run's session."""
        return bool(self.session.get("regressed", False))

    @property
    def verdict(self) -> str:
        """The status, or ``regressed`` or ``unjudged`` if a limit made a complete run fail.

        A run is regressed if a limit was exceeded. Otherwise, it is unjudged if a limit could not
        be checked.
        """
        if self.status != COMPLETE:
            return self.status
        unjudged = UNJUDGED if self.session.get("unjudged") else COMPLETE
        return REGRESSED if self.regressed else unjudged

    @property
    def cases_asked(self) -> int:
        """The number of cases that the session should measure, or 0 if it was not recorded."""
        return int(self.session.get("cases_asked", 0))

    @cached_property
    def sources(self) -> tuple[tuple[str, str], ...]:
        """The pairs (device, instrument) that have rows, in sorted order."""
        return tuple(sorted({(row["device"], row["instrument"]) for row in self.document["rows"]}))

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """The devices that have rows, in sorted order."""
        in_rows = {device for device, _ in self.sources}
        return tuple(self.document.get("devices", sorted(in_rows)))

    @cached_property
    def metrics(self) -> tuple[Metric, ...]:
        """The definitions of the run's metrics, or nothing in documents of older versions."""
        return msgspec.convert(self.document.get("metrics", ()), tuple[Metric, ...])

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The long table, with the columns of `Measurement.as_row`."""
        import pandas as pd

        return pd.DataFrame(self.document["rows"], columns=COLUMNS).astype({"value": float})

    @cached_property
    def summary(self) -> pd.DataFrame:
        """The summary of the long table, see `dpbench.results.summary.summary`."""
        from dpbench.results.summary import summary

        with METRICS.including(self.metrics):
            return summary(self.frame, self.baseline)

    def with_derived(self) -> Run:
        """Return the run with derived metrics in its document, see `derived`."""
        return replace(self, document={**self.document, **derived(self.summary)})

    @cached_property
    def places(self) -> dict[tuple[Subject, str], list[str]]:
        """For each case and instrument, the devices that have rows."""
        places: dict[tuple[Subject, str], list[str]] = defaultdict(list)
        measured = self.frame[[*AXES, "instrument", "device"]].drop_duplicates()
        for row in measured.to_dict("records"):
            places[subject_from(row), row["instrument"]].append(row["device"])
        return dict(places)

    @cached_property
    def text(self) -> str:
        """The document as JSON text, in the form of a saved file."""
        return document_text(self.document)

    @cached_property
    def outcomes(self) -> tuple[Outcome, ...]:
        """The outcomes, in the order of the document. A case can have several outcomes."""
        if self.measured is not None:
            return self.measured
        rows: dict[Subject, dict[str, list[Any]]] = defaultdict(dict)
        for row in self.document["rows"]:
            rows[subject_from(row)].setdefault(row["instrument"], []).append(row)
        entries: dict[tuple[str, int], list[Any]] = defaultdict(list)
        for part in NUMBERED:
            for entry in self.document.get(part, ()):
                entries[part, entry["outcome"]].append(entry)
        outcomes = []
        for number, data in enumerate(self.document.get("cases", ())):
            by = rows[subject_from(data)]
            lists = {"rows": [row for name in data["instruments"] for row in by.pop(name, ())]}
            lists |= {part: entries[part, number] for part in NUMBERED}
            outcomes.append(Outcome.from_saved(data, **lists))
        return tuple(outcomes)
