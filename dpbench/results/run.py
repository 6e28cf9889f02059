"""A run: everything that one session measured, as one JSON document on disk."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from dpbench.case import AXES, Case
from dpbench.errors import ConfigurationError
from dpbench.results.checks import check_document, checked_frame
from dpbench.results.frame import to_frame
from dpbench.results.outcome import COMPLETE, PARTS, Outcome, belongs
from dpbench.results.rows import OWN_COLUMNS, SCHEMA, Measurement


@dataclass(frozen=True)
class Run:
    """One saved session; everything in it was checked when it was loaded.

    Args:
        path: the file.
        name: the file's name without its ending, e.g. ``0001_before``.
        document: what `dpbench.results.outcome.document` made.
        frame: the long table, with the columns of `Measurement.as_row`.
    """

    path: Path
    name: str
    document: Mapping[str, Any] = field(repr=False)
    frame: pd.DataFrame = field(repr=False, compare=False)

    @classmethod
    def load(cls, path: Path) -> Run:
        """Read a saved run, or a document of ``--dpbench-json``.

        Raises:
            ConfigurationError: the file cannot be read, is no run, or has a newer schema; the
                message names it. Nothing is read by half.
        """
        path = Path(path)
        document = _read(path)
        try:
            check_document(document)
            frame = checked_frame(document["rows"])
        except (ConfigurationError, KeyError, TypeError, OverflowError) as error:
            what = f"lacks {error}" if isinstance(error, KeyError) else error
            raise ConfigurationError(f"run file {path} is damaged: {what}") from error
        return cls(path, path.stem, document, frame)

    @classmethod
    def of(
        cls,
        name: str,
        outcomes: Iterable[Outcome] = (),
        environment: Mapping[str, Any] | None = None,
        session: Mapping[str, Any] | None = None,
    ) -> Run:
        """A session so far, which need not have a file."""
        found = tuple(outcomes)
        document = {"environment": environment or {}, "session": session or {}}
        run = cls(Path(), name, document, to_frame(row for o in found for row in o.rows))
        vars(run)["outcomes"] = found
        return run

    @property
    def environment(self) -> Mapping[str, Any]:
        """Machine, GPU with its driver, versions, and the measured project's code."""
        found: Mapping[str, Any] = self.document.get("environment", {})
        return found

    @property
    def session(self) -> Mapping[str, Any]:
        """Grid, settings, workers, when and how long; empty in documents of older versions."""
        found: Mapping[str, Any] = self.document.get("session", {})
        return found

    @property
    def updates(self) -> Sequence[Mapping[str, Any]]:
        """What was written into it after its session, oldest first.

        Each entry has its own ``environment``, ``settings`` and ``started``; ``cases`` are ids
        with the instruments whose rows it wrote. The run's environment is not that of these.
        """
        found: Sequence[Mapping[str, Any]] = self.document.get("updates", ())
        return found

    @property
    def status(self) -> str:
        """``complete``, or ``interrupted``: then it holds what was finished until then."""
        return str(self.session.get("status", COMPLETE))

    @property
    def regressed(self) -> bool:
        """Whether a comparison failed in its session; such a run is no reference by default."""
        return bool(self.session.get("regressed", False))

    @property
    def started(self) -> str:
        """When the session began, ISO 8601 in UTC; empty if the document does not say."""
        return str(self.session.get("started", ""))

    @property
    def seconds(self) -> float | None:
        """How long the session took, s; None if the document does not say."""
        return self.session.get("seconds")

    @property
    def cases_asked(self) -> int:
        """How many cases its session was to measure; 0 if the document does not say."""
        return int(self.session.get("cases_asked", 0))

    @cached_property
    def sources(self) -> tuple[tuple[str, str], ...]:
        """Each (device, instrument) that has rows, sorted."""
        pairs = self.frame[["device", "instrument"]].drop_duplicates()
        return tuple(sorted(pairs.itertuples(index=False, name=None)))

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """The devices that have rows, sorted."""
        return tuple(sorted({device for device, _ in self.sources}))

    @cached_property
    def outcomes(self) -> tuple[Outcome, ...]:
        """What became of each case, in the order of the document."""
        rows: dict[tuple[Case, str], list[Measurement]] = {}
        cases: dict[tuple[Any, ...], Case] = {}  # each is made once, however many rows it has
        for row in self.document["rows"]:
            axes = tuple(row[axis] for axis in AXES)
            if axes not in cases:
                cases[axes] = Case(*axes)
            measurement = Measurement(cases[axes], **{name: row[name] for name in OWN_COLUMNS})
            rows.setdefault((measurement.case, measurement.instrument), []).append(measurement)
        found = []
        for data in _cases(self.document):
            case = Case.from_row(data)
            # Documents of older versions do not say by which instruments: then by all.
            names = data.get("instruments") or [name for of, name in rows if of == case]
            mine = [row for name in names for row in rows.pop((case, name), ())]
            parts = _parts_of(case, names, self.document)
            found.append(_outcome(case, mine, {**data, **parts, "instruments": names}))
        return (*found, *(_outcome(of, left, {}) for (of, _), left in rows.items()))


def _outcome(case: Case, rows: list[Measurement], data: Mapping[str, Any]) -> Outcome:
    """An outcome from a case's entry in a document."""
    known = [f.name for f in fields(Outcome) if f.name in data]
    rest: dict[str, Any] = {
        name: tuple(v) if isinstance(v := data[name], list) else v for name in known
    }
    return Outcome(case, tuple(rows), rest.pop("seconds", 0.0), **rest)


def _read(path: Path) -> dict[str, Any]:
    """The document in a file, if its schema is one that this version knows."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"run file {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"run file {path} is damaged: {error}") from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if type(schema) is not int or schema < 1:
        raise ConfigurationError(f"run file {path} is damaged: no document of dpbench")
    if schema > SCHEMA:
        raise ConfigurationError(
            f"run file {path} has schema {schema}, and this dpbench reads up to {SCHEMA}; "
            f"upgrade dpbench"
        )
    assert isinstance(document, dict)
    return document


def _parts_of(
    case: Case, instruments: Sequence[str], document: Mapping[str, Any]
) -> dict[str, tuple[Any, ...]]:
    """What a document says of a case's operators and kernels; nothing if it is older.

    Of several outcomes of the case each is in one alone, or it would be saved twice.
    """
    axes = asdict(case)
    return {
        part: tuple(
            kind.from_row(row)
            for row in document.get(part, ())
            if all(row.get(axis) == value for axis, value in axes.items())
        )
        for part, kind in PARTS.items()
        if belongs(part, instruments)
    }


def _cases(document: Mapping[str, Any]) -> list[dict[Any, Any]]:
    found: list[dict[Any, Any]] = document.get("cases", [])
    return found
