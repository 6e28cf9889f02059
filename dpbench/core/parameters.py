"""Checks the parameters in a name such as ``dpsgd:clip=per_layer`` against the named class."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from contextlib import suppress
from types import SimpleNamespace, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from dpbench.core.errors import ConfigurationError, unknown
from dpbench.core.names import Parameter

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
