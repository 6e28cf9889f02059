"""What must be true of a saved document before anything relies on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, get_type_hints

import numpy as np
import pandas as pd
from pandas.api.types import infer_dtype

from dpbench.case import ALL_PHASES, AXES, Case
from dpbench.errors import ConfigurationError
from dpbench.metrics import METRICS
from dpbench.results.outcome import PARTS, STATUSES, Outcome
from dpbench.results.rows import COLUMNS, STEP

_KINDS = {
    "batch_size": ("integer",),
    "seq_len": ("integer",),
    "repeat": ("integer",),
    "value": ("integer", "floating", "mixed-integer-float"),
}
"""What a column of the long table holds, in `infer_dtype`'s words, where it is not text."""

_ONE_NUMBER = [*AXES, "instrument", "device", "phase", "metric", "repeat"]
"""The columns that say what a row's number is about."""

_PHASES = (STEP, *ALL_PHASES)

Check = Callable[[Any], bool]


def checked_frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """The long table of saved rows, column by column: 10 000 rows in a blink.

    Raises:
        ConfigurationError: a column is missing somewhere, or holds what it must not; or the same
            number is there twice, and not the same.
    """
    frame = pd.DataFrame(rows, columns=COLUMNS)
    if frame.empty:
        return frame
    for column in COLUMNS:
        expected = _KINDS.get(column, ("string",))
        found = infer_dtype(frame[column], skipna=False)
        if found not in expected or frame[column].isna().any():
            raise ConfigurationError(f"a row lacks {column!r}, or it is not {expected[0]}")
    if not np.isfinite(frame.value.to_numpy(dtype=float)).all():
        raise ConfigurationError("a row's 'value' is not finite")
    frame = frame.astype({"value": float})
    _check_numbers(frame)
    for case in frame[list(AXES)].drop_duplicates().to_dict("records"):
        Case.from_row(case)
    return frame


def _check_numbers(frame: pd.DataFrame) -> None:
    """The numbers of a long table can be what they say."""
    _refuse(frame, frame.repeat < 0, "repeat")
    _refuse(frame, ~frame.phase.isin(_PHASES), "phase")
    units = {metric.name: metric.unit for metric in METRICS.values()}
    may_fall = [metric.name for metric in METRICS.values() if metric.may_fall]
    known = frame.metric.isin(units)
    _refuse(frame, known & (frame.metric.map(units) != frame.unit), "unit")
    _refuse(frame, known & ~frame.metric.isin(may_fall) & (frame.value < 0), "value")
    again = frame[frame.duplicated(_ONE_NUMBER, keep=False)]
    other = ~again.duplicated([*_ONE_NUMBER, "value", "unit"], keep=False)
    _refuse(again, other, "value", "is not only")


def _refuse(
    frame: pd.DataFrame, wrong: pd.Series[bool], column: str, words: str = "cannot be"
) -> None:
    """Raise an error about the first row that is wrong in a column."""
    if wrong.any():
        row = frame[wrong].iloc[0]
        case = f"{row.trainer}-bs{row.batch_size}-seq{row.seq_len}"
        where = f"{row.metric}@{row.phase} of {case} by {row.instrument}"
        value = row[column]
        shown = repr(value) if isinstance(value, str) else value
        raise ConfigurationError(f"the {column} of {where} {words} {shown}")


def check_document(document: Mapping[str, Any]) -> None:
    """Everything in a document but its rows has the type that its readers rely on.

    Raises:
        ConfigurationError: something has not.
        KeyError, TypeError: something is missing.
    """
    for name in ("rows", "cases", "updates", *PARTS):
        _check(document.get(name, []), _objects, f"{name!r}")
    _check_environment(document.get("environment", {}))
    _check_part(document.get("session", {}), _SESSION, "session")
    for update in document.get("updates", ()):
        _check_part(update, _UPDATE, "update")
        _check_environment(update["environment"])
        _check(update["cases"], _each(_texts), "update's 'cases'")
    for case in document.get("cases", ()):
        _check_part(case, _CASE, "case")
        Case.from_row(case)
    for part, kind in PARTS.items():
        for entry in document.get(part, ()):
            _check_part(entry, _PARTS[part], part)
            kind.from_row(entry)


def _check_environment(environment: Any) -> None:
    _check_part(environment, _ENVIRONMENT, "environment")
    _check_part(environment.get("code") or {}, _CODE, "code")


def _check_part(part: Any, checks: Mapping[str, Check], where: str) -> None:
    """What an object has of these entries passes their checks."""
    _check(part, _object, where)
    for name, check in checks.items():
        if name in part:
            _check(part[name], check, f"{where}'s {name!r}")


def _check(value: Any, check: Check, what: str) -> None:
    if not check(value):
        text = repr(value)
        shown = text if len(text) <= 40 else f"{text[:40]}…"
        raise ConfigurationError(f"{what} cannot be {shown}")


# --- what an entry may be ------------------------------------------------------------------------


def _object(value: Any) -> bool:
    return isinstance(value, dict)


def _objects(value: Any) -> bool:
    return isinstance(value, list) and all(map(_object, value))


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_text, value))


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _amount(value: Any) -> bool:
    """A number that a float can hold."""
    return type(value) in (int, float) and 0 <= value <= float(np.finfo(float).max)


def _rate(value: Any) -> bool:
    """An amount, or what Nsight Compute says of a rate of nothing."""
    return _amount(value) or (isinstance(value, float) and math.isnan(value))


def _truth(value: Any) -> bool:
    return isinstance(value, bool)


def _time(value: Any) -> bool:
    try:
        return value == "" or bool(datetime.fromisoformat(value))
    except (TypeError, ValueError):
        return False


def _phase(value: Any) -> bool:
    return value in _PHASES if isinstance(value, str) else False


def _plain(value: Any) -> bool:
    """One thing: a text, a number, true, false or null."""
    if isinstance(value, int | float):
        return math.isfinite(value) and abs(value) < 2**63
    return value is None or isinstance(value, str)


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _each(check: Check) -> Check:
    """An object whose values pass a check."""
    return lambda value: _object(value) and all(map(check, value.values()))


def _list_of(check: Check, length: int) -> Check:
    return lambda value: isinstance(value, list) and len(value) == length and all(map(check, value))


def _axis(value: Any) -> bool:
    """The values along an axis of a grid, or its name."""
    return _text(value) or (isinstance(value, list) and all(map(_plain, value)))


_ENVIRONMENT: dict[str, Check] = {
    "python": _or_none(_text),
    "platform": _or_none(_text),
    "machine": _or_none(_each(_plain)),
    "versions": _each(_or_none(_text)),
    "gpu": _or_none(_each(_plain)),
    "code": _or_none(_object),
}

_CODE: dict[str, Check] = {"commit": _text, "dirty": _truth, "changes": _or_none(_text)}

_SESSION: dict[str, Check] = {
    "started": _time,
    "seconds": _or_none(_amount),
    "status": lambda value: _text(value) and value in STATUSES,
    "regressed": _truth,
    "regressions": _objects,
    "unjudged": _objects,
    "workers": _count,
    "cases_asked": _count,
    "grid": _each(_axis),
    "settings": _each(_object),
}

_UPDATE: dict[str, Check] = {"started": _time, "settings": _each(_object)}

_OF_TYPE: dict[Any, Check] = {
    int: _count,
    float: _amount,
    str: _text,
    str | None: _or_none(_text),
    tuple[str, ...]: _texts,
    tuple[int, int, int]: _list_of(_count, 3),
}
"""How JSON holds a value of a dataclass's field."""


def _fields(kind: type) -> dict[str, Check]:
    """The checks of a dataclass's fields, as far as they are plain values."""
    hints = get_type_hints(kind)
    found = {name: _OF_TYPE[hint] for name, hint in hints.items() if hint in _OF_TYPE}
    return found | ({"phase": _phase} if "phase" in hints else {})


_CASE = _fields(Case) | _fields(Outcome)
_PARTS = {part: _fields(kind) for part, kind in PARTS.items()}
_PARTS["speed_of_light"] |= {
    name: _rate for name, check in _PARTS["speed_of_light"].items() if check is _amount
}
