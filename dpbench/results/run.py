"""A run: everything that one session measured, as one JSON document on disk."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any

from dpbench.case import ADDED, ALL_PHASES, AXES, COUNTS, Case
from dpbench.errors import ConfigurationError
from dpbench.files import printable
from dpbench.metrics import METRICS
from dpbench.results.outcome import COMPLETE, PARTS, STATUSES, Outcome, baseline_of
from dpbench.results.rows import COLUMNS, OWN_COLUMNS, SCHEMA, STEP, Measurement, as_rows

if TYPE_CHECKING:
    import pandas as pd

ROWS = b'\n "rows":'
"""Where a document goes on with what was measured; `dpbench.results.outcome` writes it so."""

_DEVICE = re.compile(rb'"device": ("(?:[^"\\]|\\.)*")')
_CONTROL = re.compile(r"(\\\\)|\\u00(?:0[0-8b-f]|1[0-9a-f]|7f|[89][0-9a-f])|[\x7f-\x9f]", re.I)
"""A character that a terminal obeys, as JSON spells it; an escaped backslash is none."""


@dataclass(frozen=True)
class Run:
    """One saved session; what it holds was checked when it was loaded.

    Args:
        path: the file.
        document: what `dpbench.results.outcome.document` made.
    """

    path: Path
    document: Mapping[str, Any] = field(repr=False)

    @classmethod
    def load(cls, path: Path) -> Run:
        """Read a saved run, or a document of ``--dpbench-json``: whole or not at all."""
        run = cls(path, _parsed(path, _read(path)))
        with _naming_damage(path):
            _check_head(run.document)
            for case in run.document.get("cases", ()):
                Case.from_row(case)
            for part, kind in PARTS.items():
                for entry in run.document.get(part, ()):
                    kind.from_row(entry)
            vars(run)["frame"] = checked_frame(run.document["rows"])
        return run

    @classmethod
    def load_head(cls, path: Path) -> Run:
        """Read what a list says of a run: all but what was measured, and on which devices.

        A document names its devices before its rows; of an older one the rows are searched.
        """
        data = _read(path)
        head, found, _ = data.partition(ROWS)
        if not found or not data.rstrip().endswith(b"}"):  # another's, or cut off
            return cls.load(path)
        document = _parsed(path, head.rstrip().rstrip(b",") + b"}")
        devices = document.get("devices")
        if devices is None:
            devices = [json.loads(text) for text in set(_DEVICE.findall(data))]
        with _naming_damage(path):
            _check_head(document | {"rows": []})
            run = cls(path, document)
            vars(run)["devices"] = tuple(sorted(map(printable, devices)))
        return run

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
    def name(self) -> str:
        """The file's name without its ending, e.g. ``0001_before``."""
        return self.path.stem

    @property
    def environment(self) -> dict[str, Any]:
        """Machine, GPU with its driver, versions, and the measured project's code."""
        return dict(self.document.get("environment", {}))

    @property
    def session(self) -> dict[str, Any]:
        """Grid, settings, workers, when and how long; empty in documents of older versions."""
        return dict(self.document.get("session", {}))

    @property
    def baseline(self) -> str:
        """The trainer that its ratios divide by."""
        return baseline_of(self.session)

    @property
    def updates(self) -> list[dict[str, Any]]:
        """What an older version wrote into it after its session, under other conditions.

        Each has its own ``environment``; ``cases`` are ids with the instruments whose rows it
        wrote.
        """
        return list(self.document.get("updates", ()))

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
    def seconds(self) -> float:
        """How long the session took, s; 0 if the document does not say."""
        return max(0.0, self.session.get("seconds") or 0.0)  # a clock can be put back

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
    def frame(self) -> pd.DataFrame:
        """The long table, with the columns of `Measurement.as_row`."""
        import pandas as pd

        return pd.DataFrame(self.document["rows"], columns=COLUMNS).astype({"value": float})

    @cached_property
    def numbers(self) -> pd.DataFrame:
        """What is compared of it; see `dpbench.results.frame.numbers`."""
        from dpbench.results.frame import numbers

        return numbers(self.frame, self.baseline)

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
        for data in self.document.get("cases", ()):
            case = Case.from_row(data)
            # Documents of older versions do not say by which instruments: then by all.
            names = data.get("instruments") or [name for of, name in rows if of == case]
            mine = [row for name in names for row in rows.pop((case, name), ())]
            known: dict[str, Any] = {
                f.name: tuple(value) if isinstance(value := data[f.name], list) else value
                for f in fields(Outcome)
                if f.name in data
            }
            known |= self._parts_of(case, names) | {"instruments": tuple(names)}
            found.append(Outcome(case, tuple(mine), known.pop("seconds", 0.0), **known))
        return (*found, *(Outcome(of, tuple(left), 0.0) for (of, _), left in rows.items()))

    def _parts_of(self, case: Case, instruments: Sequence[str]) -> dict[str, tuple[Any, ...]]:
        """Its operators and kernels: each in one outcome alone, or it would be saved twice."""
        by_ncu = any(name.startswith("ncu") for name in instruments)
        axes = asdict(case).items()
        return {
            part: tuple(kind.from_row(r) for r in self.document.get(part, ()) if axes <= r.items())
            for part, kind in PARTS.items()
            if ("logical" in instruments if part == "operators" else by_ncu)
        }


# --- reading a file --------------------------------------------------------------------------


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"run file {path}: {error.strerror}") from error


def _parsed(path: Path, data: bytes) -> dict[str, Any]:
    """The document in a file, if its schema is one that this version knows."""
    try:
        text = _CONTROL.sub(lambda found: found[1] or "\N{REPLACEMENT CHARACTER}", data.decode())
        document = json.loads(text)
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
    for part in ("rows", "cases", *PARTS):
        entries = document.get(part)
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict):
                entry.update(ADDED | entry)
    return dict(document)


@contextmanager
def _naming_damage(path: Path) -> Iterator[None]:
    """Turn what goes wrong with a document into one line that names its file."""
    try:
        yield
    except KeyError as error:
        raise ConfigurationError(f"run file {path} is damaged: lacks {error}") from error
    except (ConfigurationError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConfigurationError(f"run file {path} is damaged: {error}") from error


_KINDS: dict[str, type | UnionType] = {
    "environment": dict,
    "environment.versions": dict,
    "environment.gpu": dict | None,
    "environment.code": dict | None,
    "session": dict,
    "session.grid": dict,
    "session.settings": dict,
    "session.started": str,
    "session.seconds": int | float | None,
    "session.regressed": bool,
    "session.cases_asked": int,
    "cases": list,
    "updates": list,
}
"""What a document's parts must be, if they are there."""


def _check_head(document: Mapping[str, Any]) -> None:
    for place, kind in _KINDS.items():
        *parents, name = place.split(".")
        holder = document
        for parent in parents:
            holder = holder.get(parent, {})
        if name in holder and not isinstance(holder[name], kind):
            raise TypeError(f"{place} cannot be {holder[name]!r:.40}")
    if not isinstance(document["rows"], list):
        raise TypeError("rows is no list")
    status = document.get("session", {}).get("status", COMPLETE)
    if status not in STATUSES:
        raise ValueError(f"session.status cannot be {status!r}")


def checked_frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """The long table of rows that lack nothing, are possible, and say one thing of each number."""
    import numpy as np
    import pandas as pd

    frame = pd.DataFrame(rows, columns=COLUMNS)
    for column in COLUMNS if rows else ():
        allowed = ["integer" if column in (*COUNTS, "repeat") else "string"]
        if column == "value":
            allowed = ["integer", "floating", "mixed-integer-float"]
        kind = pd.api.types.infer_dtype(frame[column])
        if frame[column].hasnans or kind not in allowed:
            raise TypeError(f"a row lacks {column!r}, or it is of the wrong kind")
    for axes in frame[list(AXES)].drop_duplicates().itertuples(index=False, name=None):
        Case(*axes)
    frame["value"] = frame.value.astype(float)
    keys = [column for column in COLUMNS if column not in ("value", "unit", "tool")]
    said = frame.drop_duplicates([*keys, "value", "unit"])
    metrics = METRICS.values()
    units = frame.metric.map({metric.name: metric.unit for metric in metrics})
    never_negative = {metric.name for metric in metrics if not metric.may_fall}
    wrong = {
        "the phase {phase!r}": ~frame.phase.isin((STEP, *ALL_PHASES)),
        "the repeat {repeat}": frame.repeat < 0,
        "the unit {unit!r}": units.notna() & (units != frame.unit),
        "the value {value}": ~np.isfinite(frame.value)
        | ((frame.value < 0) & frame.metric.isin(never_negative)),
        "a second value, {value},": frame.index.isin(said.index[said.duplicated(keys)]),
    }
    for what, where in wrong.items():
        if where.any():
            row = frame[where].iloc[0].to_dict()
            where_from = "of {metric}@{phase} of {id} by {instrument} cannot be"
            raise ValueError(f"{what} {where_from}".format(**row, id=Case.from_row(row).id))
    return frame
