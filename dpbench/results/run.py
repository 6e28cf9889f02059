"""A run: everything that one session measured, as one JSON document on disk."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpbench.case import AXES, Case
from dpbench.errors import ConfigurationError
from dpbench.files import printable
from dpbench.results.outcome import COMPLETE, PARTS, Outcome, belongs
from dpbench.results.rows import COLUMNS, OWN_COLUMNS, SCHEMA, Measurement, as_rows
from dpbench.results.schema import HEAD, check, check_document

if TYPE_CHECKING:
    import pandas as pd

ROWS = b'\n "rows":'
"""Where a document goes on with what was measured; `dpbench.results.outcome` writes it so."""


@dataclass(frozen=True)
class Run:
    """One saved session; everything in it was checked when it was loaded.

    Args:
        path: the file.
        document: what `dpbench.results.outcome.document` made.
    """

    path: Path
    document: Mapping[str, Any] = field(repr=False)

    @classmethod
    def load(cls, path: Path) -> Run:
        """Read a saved run, or a document of ``--dpbench-json``.

        Raises:
            ConfigurationError: the file cannot be read, is no run, or has a newer schema; the
                message names it. Nothing is read by half.
        """
        path = Path(path)
        document = _parsed(path, _read(path))
        _check(path, document, check_document)
        return cls(path, document)

    @property
    def name(self) -> str:
        """The file's name without its ending, e.g. ``0001_before``."""
        return self.path.stem

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The long table, with the columns of `Measurement.as_row`."""
        import pandas as pd

        return pd.DataFrame(self.document["rows"], columns=COLUMNS).astype({"value": float})

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
        rows = as_rows(row for outcome in found for row in outcome.rows)
        document = {"environment": environment or {}, "session": session or {}, "rows": rows}
        run = cls(Path(name), document)
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
        seconds = self.session.get("seconds")
        return None if seconds is None else max(0.0, seconds)  # a clock can be put back

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


@dataclass(frozen=True)
class Heading:
    """What a list says of a run, read without what was measured."""

    run: Run
    devices: tuple[str, ...]

    @classmethod
    def load(cls, path: Path) -> Heading:
        """Read the beginning of a saved run; an older one says its devices only in its rows."""
        data = b""
        try:
            with path.open("rb") as stream:
                while ROWS not in data and (block := stream.read(1 << 15)):
                    data += block
                beginning, found, rows = data.partition(ROWS)
                document = _parsed(path, beginning.rstrip().rstrip(b",") + b"}") if found else {}
                if "devices" in document:
                    stream.seek(-2, os.SEEK_END)
                rows += stream.read()
        except OSError as error:
            raise ConfigurationError(f"run file {path}: {error.strerror}") from error
        if not rows.rstrip().endswith(b"}"):  # another's, or cut off
            run = Run.load(path)
            return cls(run, run.devices)
        _check(path, document, lambda document: check(document, HEAD, "the document"))
        named = document.get("devices") or {
            printable(json.loads(text)) for text in set(_DEVICE.findall(rows))
        }
        return cls(Run(path, document), tuple(sorted(named)))


_DEVICE = re.compile(rb'"device": ("(?:[^"\\]|\\.)*")')
_ESCAPED_CONTROL = re.compile(rb"\\u00(?:[01][0-9a-f]|7f|[89][0-9a-f])|\x7f|\xc2[\x80-\x9f]", re.I)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"run file {path}: {error.strerror}") from error


def _parsed(path: Path, data: bytes) -> dict[str, Any]:
    """The document in a file, if its schema is one that this version knows."""
    try:
        document = json.loads(data.decode("utf-8"))
        if _ESCAPED_CONTROL.search(data):  # seldom, so only then is everything looked at
            document = _printable(document)
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
    found: dict[str, Any] = document
    return found


def _printable(value: Any) -> Any:
    """A parsed document whose texts, names included, can be shown."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_printable(entry) for entry in value]
    if isinstance(value, dict):
        return {printable(name): _printable(entry) for name, entry in value.items()}
    return value


def _check(
    path: Path, document: Mapping[str, Any], how: Callable[[Mapping[str, Any]], None]
) -> None:
    try:
        how(document)
    except (ConfigurationError, KeyError, TypeError, OverflowError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else error
        raise ConfigurationError(f"run file {path} is damaged: {what}") from error


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
