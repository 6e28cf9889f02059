"""A run's JSON document: its schema, checked when it is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from dpbench.core.case import ALL_PHASES, AXES, COUNTS, OPTIONAL_AXES, USUAL
from dpbench.core.errors import ConfigurationError
from dpbench.core.metric import AGGREGATES, AGGREGATIONS, Kind, Shown
from dpbench.core.subject import SCRIPT, Subject, subject_from
from dpbench.results.outcome import LISTS, SEEN, STATUSES
from dpbench.results.rows import IDENTITY, SCHEMA, STEP, impossible_number

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]

_TYPES: dict[str, Any] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "str | None": str | None,
}
"""Types of the fields of rows, operators and kernels, as they are written."""

_AXES: list[Any] = []
"""The fields of a case. A document may leave out `OPTIONAL_AXES` where the value is the default."""
for _axis in AXES:
    _kind: Any = int if _axis in COUNTS else str
    _AXES.append((_axis, _kind, *([_kind()] if _axis in OPTIONAL_AXES else [])))


class Environment(msgspec.Struct):
    """Machine, GPU, versions and the measured project's code."""

    versions: dict[str, Any] = {}
    gpu: dict[str, Any] | None = None
    code: dict[str, Any] | None = None


class Grid(msgspec.Struct):
    """The values along each axis, and the baseline of ratios."""

    baseline: str = ""


class Part(msgspec.Struct):
    """What differs in one of several merged runs."""

    environment: Environment = msgspec.field(default_factory=Environment)
    settings: dict[str, dict[str, Any]] = {}
    grid: dict[str, Any] = {}


class SessionPart(msgspec.Struct):
    """How a run was made."""

    grid: Grid = msgspec.field(default_factory=Grid)
    settings: dict[str, dict[str, Any]] = {}
    parts: list[Part] = []
    cases_asked: Count = 0
    seconds: float = 0.0
    status: Literal[STATUSES] = STATUSES[0]  # type: ignore[valid-type]
    regressed: bool = False
    unjudged: list[dict[str, Any]] = []


class TestPart(msgspec.Struct):
    """A test that asked for a case."""

    test: str
    params: dict[str, str] = {}


class HowPart(msgspec.Struct):
    """How a metric is computed."""

    kind: Literal[tuple(AGGREGATIONS)]  # type: ignore[valid-type]
    names: list[str] = []
    parts: list[str] = []
    scale: float = 1
    chips: list[list[Any]] = []
    less: str = ""


class MetricPart(msgspec.Struct, forbid_unknown_fields=True):
    """The definition of a metric."""

    name: str
    how: HowPart
    header: str = ""
    by: list[str] = []
    repeats: Literal[AGGREGATES] | None = None  # type: ignore[valid-type]
    ranks: Literal[AGGREGATES] | None = None  # type: ignore[valid-type]
    nvprof: str = ""
    logical: str = ""
    shown: list[Shown] = []
    giga: bool = False
    expected: list[float] | None = None
    higher_is_better: bool = False
    signed: bool = False
    throughput: bool = True
    spread: bool = False
    source: str = ""
    table: str = ""
    of: str = ""
    kind: Kind = "value"


@cache
def _schema() -> type[Any]:
    """The type of a whole document; its lists have the fields of the classes in `LISTS`."""
    phase = Literal[(STEP, *ALL_PHASES)]  # type: ignore[valid-type]
    lists: dict[str, Any] = {}
    for part, kind in LISTS.items():
        own: list[Any] = [("outcome", Count)] if part in SEEN else []
        for each in fields(kind):
            if each.name == "case":
                continue
            declared = phase if each.name == "phase" else _TYPES[str(each.type)]
            if each.name in ("repeat", "rank"):
                declared = Count
            optional = part in SEEN and each.default is not MISSING
            own.append((each.name, declared, each.default) if optional else (each.name, declared))
        strict = part != "kernels"  # those have derived names as well
        entry: Any = msgspec.defstruct(
            part, [*_AXES, *own], kw_only=True, forbid_unknown_fields=strict
        )
        lists[part] = list[entry]
    case: Any = msgspec.defstruct(
        "case",
        [
            *_AXES,
            ("seconds", float),
            ("error", str | None),
            ("message", str),
            ("log", str | None),
            ("instruments", list[str]),
            ("notes", list[str]),
            ("extra_info", dict[str, Any], {}),
            ("tests", list[TestPart], []),
            ("labels", dict[str, str], {}),
            ("imported", dict[str, str], {}),
        ],
        kw_only=True,
        forbid_unknown_fields=True,
    )
    parts: list[Any] = [
        ("environment", Environment, msgspec.field(default_factory=Environment)),
        ("session", SessionPart, msgspec.field(default_factory=SessionPart)),
        ("metrics", list[MetricPart], []),
        ("cases", list[case], []),
        ("devices", list[str], []),
        *((part, kind, []) for part, kind in lists.items() if part != "rows"),
    ]
    return msgspec.defstruct("Document", [("schema", int), ("rows", lists["rows"]), *parts])


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a run's document, by which it is checked when it is read.

    Further lists of a document, such as ``ratios``, are computed from its rows and not checked.
    """
    title = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A run of dpbench"}
    return title | msgspec.json.schema(_schema())


class _Head(msgspec.Struct):
    schema: int


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn whatever goes wrong with a document into one line that names its file."""
    try:
        yield
    except Exception as error:
        why = str(error.strerror) if isinstance(error, OSError) else str(error)
        raise ConfigurationError(f"run file {path} cannot be read: {why}") from error


def parsed(data: bytes) -> dict[str, Any]:
    """The document in a file, checked; an error names the field that is wrong."""
    head = msgspec.json.decode(data, type=_Head)
    if head.schema != SCHEMA:
        upgrade = "; upgrade dpbench" if head.schema > SCHEMA else ""
        raise ValueError(f"schema {head.schema}, this dpbench reads {SCHEMA}{upgrade}")
    msgspec.json.decode(data, type=_schema())
    document: dict[str, Any] = msgspec.json.decode(data)
    for part in ("cases", *LISTS):
        for entry in document.get(part, ()):
            for axis in OPTIONAL_AXES:
                usual = USUAL[axis]
                entry.setdefault(axis, usual if entry["workload"] != SCRIPT else type(usual)())
            subject_from(entry)
    known: set[tuple[Subject, tuple[str, ...]]] = set()
    for entry in document.get("cases", ()):
        key = (subject_from(entry), (*entry["instruments"],))
        if key in known and key[1]:
            raise ValueError(f"{key[0].id} by {' and '.join(key[1])} is there twice")
        known.add(key)
    return document


def check_rows(rows: Iterable[Mapping[str, Any]]) -> None:
    """Refuse rows of a document that are impossible, or that have the same number again."""
    known: set[tuple[Any, ...]] = set()
    for row in rows:
        key = tuple(row[name] for name in IDENTITY)
        why = impossible_number(row["metric"], row["value"], row["unit"])
        if not why and key in known:
            why = f"a second value, {float(row['value'])},"
        if why:
            where = f"{row['metric']}@{row['phase']} of {subject_from(row).id}"
            raise ValueError(f"{row['instrument']} has {why} for {where}")
        known.add(key)
