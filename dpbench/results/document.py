"""A run's JSON document: what it must look like, checked when it is read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from dpbench.core.case import ADDED, ALL_PHASES, AXES, Case
from dpbench.core.errors import ConfigurationError
from dpbench.core.metric import AGGREGATES, Kind, Shown
from dpbench.core.metrics import METRICS
from dpbench.results.outcome import LISTS, STATUSES
from dpbench.results.rows import COLUMNS, IDENTITY, INTEGERS, LATER, SCHEMA, STEP

if TYPE_CHECKING:
    import pandas as pd


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn whatever goes wrong with a document into one line that names its file."""
    try:
        yield
    except Exception as error:
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
        "parts": [{"environment": _ENVIRONMENT, "settings": dict, "grid": dict}],
        "cases_asked": range(2**31),
        "seconds": _NUMBER,
        "status": STATUSES,
        "regressed": bool,
        "unjudged": [dict],
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
            "imported": {},
        }
    ],
    "devices": [str],
    "metrics": [
        {
            **dict.fromkeys(("name", "header", "nvprof", "logical", "source"), str),
            **dict.fromkeys(("of", "table"), str),
            **dict.fromkeys(("giga", "higher_is_better", "signed", "throughput", "spread"), bool),
            "by": [str],
            "how": {"names": [str], "parts": [str], "scale": _NUMBER, "chips": [list], "less": str},
            "repeats": AGGREGATES,
            "ranks": AGGREGATES,
            "shown": [get_args(Shown)],
            "expected": [_NUMBER],
            "kind": get_args(Kind),
        }
    ],
    **{part: [{}] for part in LISTS},
}
"""What each part of a document is, if it is there: of a type, one of some values, a list of such,
or an object of which these fields are known."""


def _check(value: Any, shape: Any, place: str = "") -> None:
    """Refuse a value that does not fit its part of `_SHAPE`; ``place`` is where it stands."""
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


def parsed(data: bytes) -> dict[str, Any]:
    """The document in a file, checked, with later axes and columns added to an older one."""
    try:
        document = json.loads(data)
    except ValueError as error:
        raise ValueError(f"it is no JSON ({error})") from error
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
    for axes in frame[list(AXES)].drop_duplicates().to_dict("records"):
        Case.from_row(axes)
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
