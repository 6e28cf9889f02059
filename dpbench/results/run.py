"""A run: everything that one session measured, as one JSON document on disk."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpbench.case import ADDED, ALL_PHASES, AXES, Case
from dpbench.errors import ConfigurationError
from dpbench.files import printable, read_file
from dpbench.metric import AGGREGATES, Metric
from dpbench.metrics import METRICS
from dpbench.results.outcome import COMPLETE, LISTS, STATUSES, Outcome, baseline_of, each_once
from dpbench.results.rows import COLUMNS, IDENTITY, INTEGERS, LATER, SCHEMA, STEP, as_rows

if TYPE_CHECKING:
    import pandas as pd

ROWS = b'\n "rows":'
"""Where a document goes on with what was measured; `dpbench.results.outcome` writes it so."""

PARTS = {"operators": "logical", "kernels": "ncu"}
"""What the name of the instrument begins with that saw what these lists of a document hold."""

_DEVICE = re.compile(rb'"device": ("(?:[^"\\]|\\.)*")')
"""Of a row, where it was measured."""


@dataclass(frozen=True)
class Run:
    """One saved session; what it holds was checked when it was loaded.

    Args:
        path: the file.
        document: what `dpbench.results.outcome.document` made.
        label: what it is called, instead of its file.
        repeated: how many rows the file has a second time, which were dropped.
    """

    path: Path
    document: Mapping[str, Any] = field(repr=False)
    label: str = ""
    repeated: int = 0

    @classmethod
    def load(cls, path: Path) -> Run:
        """Read a saved run, or a document of ``--dpbench-json``: whole or not at all."""
        with _naming(path):
            run = cls(path, _parsed(read_file(path)))
            for part in PARTS:
                for entry in run.document.get(part, ()):
                    LISTS[part].from_row(entry)
            rows = run.document["rows"]
            with METRICS.including(run.metrics):
                frame = checked_frame(rows)
            again = frame.duplicated(IDENTITY)
            rows[:] = compress(rows, ~again)
            vars(run).update(frame=frame[~again].reset_index(drop=True), repeated=int(again.sum()))
        return run

    @classmethod
    def load_head(cls, path: Path) -> Run:
        """Read what a list says of a run: all but what was measured, and on which devices.

        A document names its devices before its rows; of an older version's, the rows name them.
        """
        with _naming(path):
            data = read_file(path)
            head, is_ours, rows = data.partition(ROWS)
            if is_ours and data.rstrip().endswith(b"}"):
                run = cls(path, _parsed(head.rstrip().rstrip(b",") + b', "rows": []}'))
                in_rows = map(json.loads, {*_DEVICE.findall(rows)})
                vars(run)["devices"] = tuple(sorted(run.document.get("devices", in_rows)))
                return run
        return cls.load(path)  # another's, or cut off

    @classmethod
    def of(
        cls,
        name: str,
        outcomes: Iterable[Outcome] = (),
        environment: Mapping[str, Any] | None = None,
        session: Mapping[str, Any] | None = None,
    ) -> Run:
        """A session so far, which need not have a file."""
        listed = tuple(each_once(outcomes))
        rows = [row for outcome in listed for row in outcome.rows]
        document: dict[str, Any] = {"environment": environment or {}, "session": session or {}}
        document["metrics"] = METRICS.definitions({row.metric for row in rows})
        document["rows"] = as_rows(rows)
        run = cls(Path(name), document)
        vars(run)["outcomes"] = listed
        return run

    @classmethod
    def merge(cls, runs: Sequence[Run]) -> Run:
        """One run of several parts: of a session that broke off and went on, of shards.

        Each number counts once, and a case that failed in one part is that of a later one which
        measured it. Times add up; it is complete if all parts are, and has regressed if one has;
        what else the session says is the last part's. Where parts differ in environment or
        settings, ``parts`` of the session has those of each.
        """
        parts: list[dict[str, Any]] = []
        for part in (part for run in runs for part in run.parts):
            parts += [part] if part not in parts else []
        outcomes = [outcome for run in runs for outcome in run.outcomes]
        session = runs[-1].session | {
            "seconds": sum(run.session.get("seconds", 0.0) for run in runs),
            "cases_asked": max(len({o.case for o in outcomes}), *(r.cases_asked for r in runs)),
            "status": next((r.status for r in runs if r.status != COMPLETE), COMPLETE),
            "regressed": any(run.regressed for run in runs),
            **({"parts": parts} if len(parts) > 1 else {}),
        }
        return cls.of(runs[-1].name, outcomes, runs[-1].environment, session)

    @property
    def parts(self) -> list[dict[str, Any]]:
        """The ``environment`` and ``settings`` of each part; it has one if it was not merged."""
        own = {"environment": self.environment, "settings": self.session.get("settings", {})}
        return list(self.session.get("parts", [own]))

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
        """Grid, settings, workers, when and how long; empty in documents of older versions."""
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
        """Whether a comparison failed in its session; such a run is no reference by default."""
        return bool(self.session.get("regressed", False))

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
    def metrics(self) -> tuple[Metric, ...]:
        """The definitions of what it measured; none in documents of older versions."""
        return tuple(map(Metric.from_json, self.document.get("metrics", ())))

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The long table, with the columns of `Measurement.as_row`."""
        import pandas as pd

        return pd.DataFrame(self.document["rows"], columns=COLUMNS).astype({"value": float})

    @cached_property
    def numbers(self) -> pd.DataFrame:
        """What is compared of it; see `dpbench.results.frame.numbers`."""
        from dpbench.results.frame import numbers

        with METRICS.including(self.metrics):
            return numbers(self.frame, self.baseline)

    @cached_property
    def places(self) -> dict[Case, dict[str, list[str]]]:
        """By case and instrument, the devices on which it was measured."""
        places: dict[Case, dict[str, list[str]]] = {}
        measured = self.frame[[*AXES, "instrument", "device"]].drop_duplicates()
        for *axes, instrument, device in measured.itertuples(index=False, name=None):
            places.setdefault(Case(*axes), {}).setdefault(instrument, []).append(device)
        return places

    @cached_property
    def outcomes(self) -> tuple[Outcome, ...]:
        """What became of each case, in the order of the document."""
        rows: dict[Case, dict[str, list[Any]]] = defaultdict(dict)
        for row in self.document["rows"]:
            rows[Case.from_row(row)].setdefault(row["instrument"], []).append(row)
        parts: dict[tuple[str, Case], list[Any]] = defaultdict(list)
        for part in PARTS:
            for entry in self.document.get(part, ()):
                parts[part, Case.from_row(entry)].append(entry)
        outcomes = []
        for data in self.document.get("cases", ()):
            case = Case.from_row(data)
            # Documents of older versions do not say by which instruments: then by all.
            names = data.get("instruments") or [*rows[case]]
            lists = {"rows": [row for name in names for row in rows[case].pop(name, ())]}
            for part, by in PARTS.items():  # each in one outcome alone, or it would be saved twice
                if any(name.startswith(by) for name in names):
                    lists[part] = parts.pop((part, case), [])
            outcomes.append(Outcome.from_json({**data, **lists, "instruments": names}))
        left = [{**own[0], "rows": own} for by in rows.values() for own in by.values()]
        return (*outcomes, *map(Outcome.from_json, left))

    @cached_property
    def tests(self) -> dict[str, list[tuple[Case, str]]]:
        """What each test asked for, by its id: cases, each with the name of an instrument."""
        asked: dict[str, list[tuple[Case, str]]] = defaultdict(list)
        for outcome in self.outcomes:
            by_each = [(outcome.case, name) for name in outcome.instruments]
            for test in outcome.tests:
                asked[str(test.get("test"))] += by_each
        return asked

    def asked_by(self, tests: str, by: Collection[str]) -> list[tuple[Case, str]]:
        """What a test, or those of a module, asked these instruments for."""
        return [
            (case, name)
            for test, asked in self.tests.items()
            for case, name in asked
            if f"{test}::".startswith(f"{tests}::") and name in by
        ]


# --- reading a file --------------------------------------------------------------------------


_WRONG = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What a value of the wrong kind leads to."""


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn what goes wrong with a document into one line that names its file."""
    try:
        yield
    except (OSError, ConfigurationError, RuntimeError, *_WRONG) as error:
        why = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        why = str(error.strerror) if isinstance(error, OSError) else why
        raise ConfigurationError(f"run file {path} cannot be read: {why}") from error


_NUMBER = int | float

_ENVIRONMENT: dict[str, Any] = {"versions": {}, "gpu": dict | None, "code": dict | None}

_SHAPE: dict[str, Any] = {
    "environment": _ENVIRONMENT,
    "session": {
        "grid": {"baseline": str},
        "settings": dict,
        "parts": [{"environment": _ENVIRONMENT, "settings": dict}],
        "cases_asked": range(2**31),
        "seconds": _NUMBER,
        "status": STATUSES,
        "regressed": bool,
    },
    "cases": [
        {
            "seconds": _NUMBER,
            "error": str | None,
            "message": str,
            "log": str | None,
            "instruments": [str],
            "notes": [str],
            "extra_info": {},
            "tests": [{"test": str, "params": {}}],
            "labels": {},
        }
    ],
    "devices": [str],
    "metrics": [
        {"name": str, "header": str, "by": [str], "shown": [str], "expected": [_NUMBER]}
        | {"how": {"names": [str], "parts": [str]}, "repeats": AGGREGATES, "ranks": AGGREGATES}
    ],
    **{part: [{}] for part in LISTS},
}
"""What parts of a document are, if it has them: of a kind, one of some values, a list of such, or
an object of which these fields are known."""


def _check(value: Any, shape: Any, place: str = "") -> None:
    """Refuse a value that has not the shape that `_SHAPE` says; ``place`` is where it stands."""
    kind = type(shape) if isinstance(shape, list | dict) else shape
    if isinstance(kind, range | tuple):
        fits = type(value) is type(kind[0]) and value in kind
    else:
        fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if not fits:
        raise TypeError(f"{place} cannot be {value!r:.40}")
    if isinstance(shape, list):
        for number, entry in enumerate(value):
            _check(entry, shape[0], f"{place}[{number}]")
    elif isinstance(shape, dict):
        for name in shape.keys() & value.keys():
            _check(value[name], shape[name], f"{place}.{name}".lstrip("."))


def _parsed(data: bytes) -> dict[str, Any]:
    """The document in a file, if its schema is one that this version knows."""
    document = json.loads(data)
    schema = document.get("schema") if isinstance(document, dict) else None
    if type(schema) is not int or schema < 1:
        raise ValueError("no document of dpbench")
    if schema > SCHEMA:
        raise ValueError(f"schema {schema}, this dpbench reads up to {SCHEMA}; upgrade dpbench")
    _check(document, _SHAPE)
    for instrument, options in document.get("session", {}).get("settings", {}).items():
        _check(options, dict, f"session.settings.{instrument}")
    for part in ("cases", *LISTS):
        added = ADDED | LATER if part == "rows" else ADDED
        for entry in document.get(part, ()):
            entry.update(added | entry)
    for case in document.get("cases", ()):
        Case.from_row(case)
    return dict(document)


def checked_frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """The long table of rows that lack nothing, are possible, and say one thing of each number."""
    import numpy as np
    import pandas as pd

    frame = pd.DataFrame(rows, columns=COLUMNS)
    for column in COLUMNS if rows else ():
        allowed = ["integer" if column in INTEGERS else "string"]
        if column == "value":
            allowed = ["integer", "floating", "mixed-integer-float"]
        if frame[column].hasnans or pd.api.types.infer_dtype(frame[column]) not in allowed:
            raise TypeError(f"a row lacks {column!r}, or it is of the wrong kind")
    frame = frame.astype({"value": float})
    for axes in frame[list(AXES)].drop_duplicates().itertuples(index=False, name=None):
        Case(*axes)
    said = frame.drop_duplicates([*IDENTITY, "value", "unit"])
    units = frame.metric.map({metric.name: metric.unit for metric in METRICS.values()})
    signed = [metric.name for metric in METRICS.values() if metric.signed]
    may_fall = units.isna() | frame.metric.isin(signed)
    wrong = {
        "the phase {phase!r}": ~frame.phase.isin((STEP, *ALL_PHASES)),
        "the unit {unit!r}": units.notna() & (units != frame.unit),
        "the repeat {repeat}": frame.repeat < 0,
        "the rank {rank}": frame["rank"] < 0,
        "the value {value}": ~np.isfinite(frame.value) | (frame.value < 0) & ~may_fall,
        "a second value, {value},": frame.index.isin(said.index[said.duplicated(IDENTITY)]),
    }
    for what, where in wrong.items():
        if where.any():
            row = frame[where].iloc[0].to_dict()
            where_from = "of {metric}@{phase} of {id} by {instrument} cannot be"
            raise ValueError(f"{what} {where_from}".format(**row, id=Case.from_row(row).id))
    return frame
