"""Reads and writes names with parameters, such as ``dpsgd:clip=per_layer``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from itertools import product
from urllib.parse import quote

from dpbench.core.errors import ConfigurationError

Parameter = int | float | bool | str

_PARAMETERS = re.compile(r":(?=[^:=]*=)")
"""Matches the colon before the parameters of a name, which is the first colon with an
``=`` before the next colon. In ``mine=package.module:Class:depth=2``, this is the second
colon."""


def parted(spelling: str) -> tuple[str, str]:
    """Split a spelling such as ``dpsgd:clip=per_layer`` into its name and its parameters."""
    if not isinstance(spelling, str):
        raise ConfigurationError(
            f"{spelling!r} is not a name; write a name as package.module:Class"
        )
    name, *parameters = _PARAMETERS.split(spelling, maxsplit=1)
    return name, "".join(parameters)


def joined(name: str, parameters: str | Iterable[str]) -> str:
    """Join a name and its parameters, which are normalized with `parameters_text`."""
    return ":".join(filter(None, (name, parameters_text(parameters))))


def parameters_text(given: str | Iterable[str] | Mapping[str, object]) -> str:
    """Return parameters as one sorted text.

    Raises `ConfigurationError` for an invalid parameter, or for a parameter with two values.
    """
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
    """Split texts such as ``depth=50,image_size=64`` into names and values."""
    text = given if isinstance(given, str) else ",".join(filter(None, given))
    parts = (part.partition("=") for part in text.split(",") if text)
    return [(name.strip(), value.strip()) for name, _, value in parts]


def parameter_grid(given: Iterable[str]) -> tuple[str, ...]:
    """Return a text of parameters for every combination of the given values.

    ``given`` has texts ``NAME=VALUE``. Several texts with the same name give several values for
    the parameter.
    """
    values: dict[str, list[str]] = {}
    for name, value in _pairs(given):
        values.setdefault(name, []).append(value)
    combined = [dict(zip(values, each, strict=True)) for each in product(*values.values())]
    return tuple(dict.fromkeys(map(parameters_text, combined)))


def read_parameters(text: str) -> dict[str, Parameter]:
    """Read the values of parameters from the text that `parameters_text` wrote."""
    return {name: _read(value) for name, value in _pairs(text)}


def _read(text: str) -> Parameter:
    """Return the number or boolean that a text spells, or the text itself."""
    try:
        value = json.loads(text.lower())
    except ValueError:
        return text
    return value if isinstance(value, int | float) else text


def _written(value: object) -> str:
    return json.dumps(value) if isinstance(value, int | float) else str(value)


def file_name_part(text: str) -> str:
    """Quote a text for a file name, with ``@`` in place of ``%``.

    The tools ncu and nsys would replace ``%`` and the letter after it.
    """
    return quote(text, safe="=,+").replace("%", "@")
