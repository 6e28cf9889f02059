"""Names with parameters, such as ``dpsgd:clip=per_layer``, as text and in parts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from itertools import product
from urllib.parse import quote

from dpbench.core.errors import ConfigurationError

Parameter = int | float | bool | str

_PARAMETERS = re.compile(r":(?=[^:=]*=)")
"""The parameters of a name begin at a colon that is followed by ``=`` before another colon.
In ``mine=package.module:Class:depth=2`` it is the second colon."""


def parted(spelling: str) -> tuple[str, str]:
    """The name and the parameters in a spelling such as ``dpsgd:clip=per_layer``."""
    if not isinstance(spelling, str):
        raise ConfigurationError(f"{spelling!r} is no name; write it as package.module:Class")
    name, *parameters = _PARAMETERS.split(spelling, maxsplit=1)
    return name, "".join(parameters)


def joined(name: str, parameters: str | Iterable[str]) -> str:
    """The inverse of `parted`; the parameters are written as by `parameters_text`."""
    return ":".join(filter(None, (name, parameters_text(parameters))))


def parameters_text(given: str | Iterable[str] | Mapping[str, object]) -> str:
    """Parameters as one text, sorted; the same parameter with two values is refused."""
    if isinstance(given, Mapping):
        pairs = [(str(name), _written(value).strip()) for name, value in given.items()]
    else:
        pairs = _pairs(given)
    read: dict[str, str] = {}
    for name, value in pairs:
        if not name.isidentifier() or not value.isprintable() or not value or "," in value:
            raise ConfigurationError(
                f"a parameter is NAME=VALUE in printable text without commas, not "
                f"{f'{name}={value}'!r}"
            )
        written = _written(_read(value))
        if read.setdefault(name, written) != written:
            raise ConfigurationError(f"{name} is given twice, as {read[name]} and as {written}")
    return ",".join(f"{name}={value}" for name, value in sorted(read.items()))


def _pairs(given: str | Iterable[str]) -> list[tuple[str, str]]:
    """The names and values in one or more texts such as ``depth=50,image_size=64``."""
    text = given if isinstance(given, str) else ",".join(filter(None, given))
    parts = (part.partition("=") for part in text.split(",") if text)
    return [(name.strip(), value.strip()) for name, _, value in parts]


def parameter_grid(given: Iterable[str]) -> tuple[str, ...]:
    """Every combination of parameters, some of which are given several times."""
    values: dict[str, list[str]] = {}
    for name, value in _pairs(given):
        values.setdefault(name, []).append(value)
    combined = [dict(zip(values, each, strict=True)) for each in product(*values.values())]
    return tuple(dict.fromkeys(map(parameters_text, combined)))


def read_parameters(text: str) -> dict[str, Parameter]:
    """The values of parameters that `parameters_text` wrote."""
    return {name: _read(value) for name, value in _pairs(text)}


def _read(text: str) -> Parameter:
    """The number or boolean that a text spells; otherwise the text itself."""
    try:
        value = json.loads(text.lower())
    except ValueError:
        return text
    return value if isinstance(value, int | float) else text


def _written(value: object) -> str:
    return json.dumps(value) if isinstance(value, int | float) else str(value)


def quoted(text: str) -> str:
    """A text as part of a file's name, without ``%``, which ncu and nsys would interpret."""
    return quote(text, safe="=,+").replace("%", "@")
