"""What a saved document must hold before anything relies on it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, get_type_hints

from dpbench.case import ALL_PHASES, AXES, Case
from dpbench.errors import ConfigurationError
from dpbench.metrics import METRICS
from dpbench.results.outcome import PARTS, STATUSES, Outcome
from dpbench.results.rows import COLUMNS, STEP

Leaf = Callable[[Any], bool]
Kind = Leaf | list["Kind"] | dict[str, "Kind"]
"""A value that passes a check, a list of such, or an object; ``*`` stands for any of its names."""


def check(value: Any, kind: Kind, where: str) -> None:
    """Refuse a value that is not of its kind; what an object lacks is not its matter."""
    if isinstance(kind, dict) and isinstance(value, dict):
        for name in value:
            inner = kind.get(name, kind.get("*"))
            if inner is not None:
                check(value[name], inner, f"{where}'s {name!r}")
    elif isinstance(kind, list) and isinstance(value, list):
        for entry in value:
            check(entry, kind[0], where)
    elif isinstance(kind, dict | list) or not kind(value):
        text = repr(value)
        raise ConfigurationError(
            f"{where} cannot be {text if len(text) <= 40 else f'{text[:40]}…'}"
        )


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _amount(value: Any) -> bool:
    return _number(value) and value >= 0


def _rate(value: Any) -> bool:
    """An amount, or what Nsight Compute says of a rate of nothing."""
    return _amount(value) or (isinstance(value, float) and math.isnan(value))


def _truth(value: Any) -> bool:
    return isinstance(value, bool)


def _plain(value: Any) -> bool:
    return value is None or _text(value) or (_number(value) and abs(value) < 2**63)


def _time(value: Any) -> bool:
    try:
        return value == "" or bool(datetime.fromisoformat(value))
    except (TypeError, ValueError):
        return False


def _phase(value: Any) -> bool:
    return isinstance(value, str) and value in (STEP, *ALL_PHASES)


def _grid_axis(value: Any) -> bool:
    return _text(value) or (isinstance(value, list) and all(map(_plain, value)))


def _grid_of_blocks(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(map(_count, value))


def _or_none(leaf: Leaf) -> Leaf:
    return lambda value: value is None or leaf(value)


_LEAVES: dict[Any, Kind] = {
    int: _count,
    float: _amount,
    str: _text,
    str | None: _or_none(_text),
    tuple[str, ...]: [_text],
    tuple[int, int, int]: _grid_of_blocks,
}
"""How JSON holds a value of a dataclass's field."""


def _fields(of: type, **other: Kind) -> dict[str, Kind]:
    hints = get_type_hints(of)
    return {name: _LEAVES[hint] for name, hint in hints.items() if hint in _LEAVES} | other


_PARTS: dict[str, Kind] = {part: [_fields(of, phase=_phase)] for part, of in PARTS.items()}
_RATES = dict.fromkeys(("sm", "memory", "dram", "l2_hit", "occupancy"), _rate)
_PARTS["speed_of_light"] = [_fields(PARTS["speed_of_light"], phase=_phase) | _RATES]

_ENVIRONMENT: dict[str, Kind] = {
    "python": _or_none(_text),
    "platform": _or_none(_text),
    "machine": _or_none(lambda value: isinstance(value, dict)),
    "versions": {"*": _or_none(_text)},
    "gpu": _or_none(lambda value: isinstance(value, dict) and all(map(_plain, value.values()))),
    "code": _or_none(lambda value: isinstance(value, dict)),
}

HEAD: dict[str, Kind] = {
    "environment": _ENVIRONMENT,
    "session": {
        "started": _time,
        "seconds": _or_none(_number),
        "status": lambda value: value in STATUSES if _text(value) else False,
        "regressed": _truth,
        "regressions": [{}],
        "unjudged": [{}],
        "workers": _count,
        "cases_asked": _count,
        "not_measured": {"*": _text},
        "grid": {"*": _grid_axis},
        "settings": {"*": {}},
    },
    "cases": [_fields(Case) | _fields(Outcome, extra_info={})],
    "devices": [_text],
    "updates": [
        {
            "started": _time,
            "settings": {"*": {}},
            "environment": _ENVIRONMENT,
            "cases": {"*": [_text]},
        }
    ],
}
"""A document without what was measured."""

DOCUMENT: dict[str, Kind] = {**HEAD, **_PARTS}

_ROW: dict[str, Leaf] = {
    **dict.fromkeys(COLUMNS, _text),
    **dict.fromkeys(("batch_size", "seq_len", "repeat"), _count),
    "value": _number,
    "phase": _phase,
}


def check_document(document: Mapping[str, Any]) -> None:
    """Refuse a document that its readers could not rely on.

    Raises:
        ConfigurationError: something in it is not what it must be.
        KeyError: something is missing.
    """
    check(document, DOCUMENT, "the document")
    code = document.get("environment", {}).get("code") or {}
    check(code, {"commit": _text, "dirty": _truth, "changes": _or_none(_text)}, "code")
    for case in document.get("cases", ()):
        Case.from_row(case)
    for update in document.get("updates", ()):
        check([update["environment"], update["cases"]], [{}], "an update")
    for part, of in PARTS.items():
        for entry in document.get(part, ()):
            of.from_row(entry)
    check_rows(document["rows"])


def check_rows(rows: Iterable[Any]) -> None:
    """Refuse rows that lack something, are impossible, or say two things about one number."""
    check(rows, [{}], "rows")
    cases: dict[tuple[Any, ...], str] = {}
    seen: dict[tuple[Any, ...], tuple[float, str]] = {}
    for row in rows:
        for column, leaf in _ROW.items():
            if not leaf(row.get(column)):
                raise ConfigurationError(f"a row lacks {column!r}, or it is {row.get(column)!r}")
        axes = tuple(row[axis] for axis in AXES)
        if axes not in cases:
            cases[axes] = Case(*axes).id
        metric, value, unit = row["metric"], row["value"], row["unit"]
        about = (*axes, row["instrument"], row["device"], row["phase"], metric, row["repeat"])
        wrong = ""
        known = METRICS.get(metric)
        if known and known.unit != unit:
            wrong = f"the unit of {{}} cannot be {unit!r}"
        elif known and not known.may_fall and value < 0:
            wrong = f"the value of {{}} cannot be {value}"
        elif seen.setdefault(about, (value, unit)) != (value, unit):
            wrong = f"the value of {{}} is not only {seen[about][0]}"
        if wrong:
            name = f"{row['trainer']}-bs{row['batch_size']}-seq{row['seq_len']}"
            where = f"{metric}@{row['phase']} of {name} by {row['instrument']}"
            raise ConfigurationError(wrong.format(where))
