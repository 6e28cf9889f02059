"""A task: what a process should measure, in a JSON file written by its parent."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from pkgutil import resolve_name
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from dpbench.core.files import write_text
from dpbench.core.registry import folder_of, names_of, resolve
from dpbench.core.subject import Subject, subject_from

OF_PARENT = {"parent": True}
"""Metadata that marks an instrument's field as not needed by the measured process."""


@dataclass(frozen=True)
class Program:
    """A program to run, and which of its steps are counted."""

    program: tuple[str, ...]  # a script or module, and its arguments
    is_module: bool = False
    skip: int = 3  # number of first steps that are not counted
    steps: int = 5  # number of counted steps after these
    go_on: bool = False  # whether the program continues afterwards
    timeout: float | None = None  # seconds on its GPU after which it is ended


@dataclass(frozen=True)
class Task:
    """Measure the steps of a case or a script with an instrument."""

    case: Subject
    instrument: Any
    program: Program | None = None

    def as_json(self) -> dict[str, Any]:
        """The task as plain JSON types; names can be resolved without registration."""
        case = {**self.case.columns}
        for axis, known, spelled in names_of(self.case):
            case |= {axis: known.argument(spelled), "set": ""}  # part of the workload's spelling
        kind = type(self.instrument)
        folder = folder_of(kind.__module__)
        return {
            "case": case,
            "instrument": f"{kind.__module__}:{kind.__qualname__}",
            "folder": str(folder) if folder else None,
            "fields": plain(self.instrument),
            "program": self.program and plain(self.program, Program),
        }

    @classmethod
    def from_json(cls, task: Mapping[str, Any]) -> Task:
        """The inverse of `as_json`."""
        before = [*sys.path]
        sys.path += filter(None, [task["folder"]])
        try:
            kind = resolve_name(task["instrument"])
        finally:
            sys.path[:] = before
        program = task["program"] and typed(Program, task["program"])
        return cls(resolve(subject_from(task["case"])), typed(kind, task["fields"]), program)

    def write(self, path: Path) -> None:
        """Write the task to a file."""
        write_text(path, json.dumps(self.as_json(), indent=1))

    @classmethod
    def read(cls, path: Path) -> Task:
        """Read the task from a file."""
        return cls.from_json(json.loads(path.read_text(encoding="utf-8")))


def plain(value: Any, kind: Any = None) -> Any:
    """Convert a value to plain JSON types; a dataclass to its fields, or those of ``kind``."""
    if is_dataclass(value):
        own = [field.name for field in fields(kind or value) if field.metadata != OF_PARENT]
        return {name: plain(getattr(value, name)) for name in own}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def typed(kind: Any, value: Any) -> Any:
    """Convert plain JSON types back to a value of type ``kind``; the inverse of `plain`."""
    if get_origin(kind) in (Union, UnionType) and value is not None:
        kind = next(each for each in get_args(kind) if each is not NoneType)
    if isinstance(value, dict) and isinstance(kind, type):
        hints = get_type_hints(kind)
        return kind(**{name: typed(hints[name], each) for name, each in value.items()})
    if get_origin(kind) is tuple:
        return tuple(typed(get_args(kind)[0], each) for each in value)
    return Path(value) if kind is Path and value is not None else value
