"""The schema of a run's JSON document, which is checked when the document is read."""

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
from dpbench.core.metrics import Metric
from dpbench.core.subject import SCRIPT, Subject, subject_from
from dpbench.results.kernels import Packed
from dpbench.results.outcome import DERIVED, LISTS, NUMBERED, STATUSES
from dpbench.results.rows import IDENTITY, READ, SCHEMA, STEP, impossible_number

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]

_TYPES: dict[str, Any] = {
    "int": int,
    "Number": float,
    "str": str,
    "bool": bool,
    "str | None": str | None,
}
"""For each annotation in the dataclasses of `LISTS`, the type that the schema has for the field."""

_AXES: list[Any] = []
"""The fields of a case. A document may leave out `OPTIONAL_AXES` that have the default value."""
for _axis in AXES:
    _kind: Any = int if _axis in COUNTS else str
    _AXES.append((_axis, _kind, *([_kind()] if _axis in OPTIONAL_AXES else [])))


class Environment(msgspec.Struct):
    """The GPU, versions of software, and the state of the measured code."""

    versions: dict[str, Any] = {}
    gpu: dict[str, Any] | None = None
    code: dict[str, Any] | None = None


class Grid(msgspec.Struct):
    """The grid of a session. Only the field ``baseline`` of the grid is checked."""

    baseline: str = ""


class Part(msgspec.Struct):
    """The environment, settings and grid of one run that was merged with other runs."""

    environment: Environment = msgspec.field(default_factory=Environment)
    settings: dict[str, dict[str, Any]] = {}
    grid: dict[str, Any] = {}


class SessionPart(msgspec.Struct):
    """The grid, settings and status of a session."""

    grid: Grid = msgspec.field(default_factory=Grid)
    settings: dict[str, dict[str, Any]] = {}
    parts: list[Part] = []
    cases_asked: Count = 0
    seconds: float = 0.0
    status: Literal[STATUSES] = STATUSES[0]  # type: ignore[valid-type]
    regressed: bool = False
    unjudged: list[dict[str, Any]] = []


class TestPart(msgspec.Struct):
    """A test that requested a case."""

    test: str
    params: dict[str, str] = {}


@cache
def _schema() -> type[Any]:
    """Make the type of a whole document. The classes in `LISTS` define list entries."""
    phase = Literal[(STEP, *ALL_PHASES)]  # type: ignore[valid-type]
    lists: dict[str, Any] = {}
    for part, kind in LISTS.items():
        own: list[Any] = [("outcome", Count)] if part in NUMBERED else []
        for each in fields(kind):
            if each.name == "case":
                continue
            declared = phase if each.name == "phase" else _TYPES[str(each.type)]
            if each.name in ("repeat", "rank"):
                declared = Count
            optional = part in NUMBERED and each.default is not MISSING
            own.append((each.name, declared, each.default) if optional else (each.name, declared))
        strict = part != "kernels"  # entries of kernels also have a short name and a category
        entry: Any = msgspec.defstruct(
            part, [*_AXES, *own], kw_only=True, forbid_unknown_fields=strict
        )
        lists[part] = list[entry] | Packed
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
            ("examples", list[int], []),
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
        ("metrics", list[Metric], []),
        ("cases", list[case], []),
        ("devices", list[str], []),
        *((part, kind, []) for part, kind in lists.items() if part != "rows"),
        *((part, list[dict[str, Any]] | Packed, []) for part in DERIVED),
    ]
    return msgspec.defstruct("Document", [("schema", int), ("rows", lists["rows"]), *parts])


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a run's document.

    The schema leaves out ``summary``, which is computed from other fields.
    """
    title = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A run of dpbench"}
    return title | msgspec.json.schema(_schema())


class _Head(msgspec.Struct):
    schema: int


LARGEST = 2**28
"""Largest number of bytes to which the compressed file of a run may unpack."""

_XZ = b"\xfd7zXZ\0"
"""The first bytes of every xz file."""


def unpacked(data: bytes) -> bytes:
    """Return the text of a run from the bytes of its file, which xz may have compressed.

    Raises:
        ValueError: the file is incomplete, or its text has more than `LARGEST` bytes.
        lzma.LZMAError: the file is damaged, or unpacking it needs more than 128 MiB of memory.
    """
    if not data.startswith(_XZ):
        return data
    import lzma  # some builds of Python lack it

    unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=2**27)
    text = unpacker.decompress(data, LARGEST + 1)
    if len(text) > LARGEST:
        raise ValueError(f"it unpacks to more than {LARGEST / 1e6:.0f} MB; unpack it with unxz")
    if not unpacker.eof or unpacker.unused_data:
        raise ValueError("it is not one complete xz file; write it again with xz")
    return text


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn any error while a run's file is read into a `ConfigurationError` that names the file."""
    try:
        yield
    except Exception as error:
        why = str(error.strerror) if isinstance(error, OSError) else str(error)
        raise ConfigurationError(f"run file {path} cannot be read: {why}") from error


def parsed(data: bytes) -> dict[str, Any]:
    """Decode and check a document, and fill in optional axes that the document leaves out.

    xz may have compressed the document.
    """
    data = unpacked(data)
    head = msgspec.json.decode(data, type=_Head)
    if head.schema not in READ:
        upgrade = "; upgrade dpbench" if head.schema > SCHEMA else ""
        raise ValueError(f"it has schema {head.schema}, this dpbench reads {SCHEMA}{upgrade}")
    document: dict[str, Any] = msgspec.json.decode(data)
    checked = msgspec.convert(document, _schema())
    for name in (*LISTS, *DERIVED):
        if isinstance(part := getattr(checked, name), Packed):
            document[name] = [*part.entries()]
    msgspec.convert(document, _schema())
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
            raise ValueError(f"it has {key[0].id} by {' and '.join(key[1])} twice")
        known.add(key)
    return document


def check_rows(rows: Iterable[Mapping[str, Any]]) -> None:
    """Raise ValueError if a row of a document is impossible or repeats a number."""
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
