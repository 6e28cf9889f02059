"""Checks and imports the trainer, model, workload and optimizer that a case names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from dpbench.core.case import Case
from dpbench.core.names import joined
from dpbench.core.registry import MODELS, OPTIMIZERS, TRAINERS, WORKLOADS, Registry
from dpbench.core.subject import Subject

Measured = TypeVar("Measured", bound=Subject)

NAMED = {"trainer": TRAINERS, "model": MODELS, "workload": WORKLOADS, "optimizer": OPTIMIZERS}
"""The registry of each axis whose values are names."""


def names_of(case: Subject) -> Iterator[tuple[str, Registry, str]]:
    """Yield the axis, the registry and the spelling of each name in a case.

    Yields nothing for a script.
    """
    if not isinstance(case, Case):
        return
    for axis, registry in NAMED.items():
        if axis != "model" or case.model:
            name = getattr(case, axis)
            if axis == "workload" and case.set:
                name = joined(registry.canonical(name), str(case.set))
            yield axis, registry, name


def resolve(case: Measured) -> Measured:
    """Return the case with short names; raise `ConfigurationError` if `locate` refuses a name."""
    names: dict[str, Any] = {axis: known.canonical(name) for axis, known, name in names_of(case)}
    case = replace(case, **names) if names else case
    locate([case])
    return case


def resolve_saved(case: Measured) -> Measured:
    """Return a case of a saved run like `resolve`, if each of its names is registered here.

    So a file cannot choose which module Python imports, or what Python calls.
    """
    if isinstance(case, Case):
        for axis, registry in NAMED.items():
            if axis != "model" or case.model:
                registry.check_registered(getattr(case, axis))
    return resolve(case)


def locate(cases: Iterable[Subject]) -> None:
    """Raise `ConfigurationError` if a module is missing or a class refuses its parameters."""
    for case in cases:
        for _, registry, name in names_of(case):
            registry.locate(name)


def import_named(case: Subject) -> None:
    """Import every class that a case names."""
    for _, registry, name in names_of(case):
        registry[name]


def is_builtin(case: Subject) -> bool:
    """Return True if a case names only classes that dpbench registers; True for scripts."""
    return all(registry.is_builtin(name) for _, registry, name in names_of(case))
