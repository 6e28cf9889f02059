"""Reads and writes names with parameters, such as ``dpsgd:clip=per_layer``.

`arguments` checks the parameters against the named class.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from itertools import product
from types import SimpleNamespace, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints
from urllib.parse import quote

from dpbench.core.errors import ConfigurationError, unknown

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


_IN_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "text"}


def arguments(
    what: str, named: Any, given: Mapping[str, Parameter], reserved: Collection[str] = ()
) -> dict[str, Parameter]:
    """Return parameters as arguments of a class; raise an error if its annotations refuse a value.

    Args:
        what: the class in words, such as ``trainer dpsgd``, for error messages.
        named: the class, or a function.
        given: the values by parameter name.
        reserved: arguments that the caller passes, so that a parameter cannot have their names.
    """
    types, takes_any = _keywords(named)
    known = [name for name in types if name not in reserved]
    for name in given:
        if name in reserved or not (takes_any or name in known):
            raise unknown(f"parameter of {what}", name, known or ["none"])
    return {
        name: _fitting(f"parameter {name} of {what}", value, types.get(name, Any))
        for name, value in given.items()
    }


def accepts(named: Any, name: str) -> bool:
    """Return True if a class or function has a keyword argument, or accepts other names, too."""
    types, takes_any = _keywords(named)
    return takes_any or name in types


def _keywords(named: Any) -> tuple[dict[str, Any], bool]:
    """Return the types of a class's keyword arguments, and True if it also accepts other names.

    If a constructor has ``**options``, the arguments of the next base class are included.
    """
    classes = getattr(named, "__mro__", ())[:-1]  # without object
    inits = [init for each in classes if (init := vars(each).get("__init__"))]
    types: dict[str, Any] = {}
    for function in inits if classes else [named]:
        known = inspect.signature(function).parameters.values()
        for each in known:
            if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY) and each.name != "self":
                types.setdefault(each.name, _type_of(each, function))
        if all(each.kind is not each.VAR_KEYWORD for each in known):
            return types, False
    return types, bool(inits or not classes)


def _type_of(parameter: inspect.Parameter, function: Any) -> Any:
    """Return the annotation of a parameter, or `Any` if it is missing or cannot be evaluated."""
    if parameter.annotation is parameter.empty:
        return Any
    annotated: Any = SimpleNamespace(__annotations__={"it": parameter.annotation})
    with suppress(Exception):  # e.g. a name that is imported for type checks only
        return get_type_hints(annotated, getattr(function, "__globals__", {}))["it"]
    return Any


def _fitting(what: str, value: Parameter, annotated: Any) -> Parameter:
    """Return a value that fits the annotation, or raise `ConfigurationError`.

    Converts a number or boolean to text if the annotation accepts only text. Accepts any value if
    the annotation names none of the types in `_IN_WORDS` and no `Literal`.
    """
    kinds = get_args(annotated) if get_origin(annotated) in (Union, UnionType) else (annotated,)
    choices = [each for kind in kinds if get_origin(kind) is Literal for each in get_args(kind)]
    simple = [kind for kind in kinds if kind in _IN_WORDS]
    fits = type(value) in simple or (type(value) is int and float in simple) or value in choices
    if fits or Any in kinds or object in kinds or not (simple or choices):
        return value
    if str in simple:
        return str(value)
    if choices and not simple:
        raise unknown(what, value, map(str, choices))
    must = " or ".join([*(_IN_WORDS[kind] for kind in simple), *map(repr, choices)])
    raise ConfigurationError(f"{what} must be {must}, not {value!r}")
