"""Tasks: a task tells a process what to measure, in a JSON file written by the parent process."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import msgspec

from dpbench.core.errors import ConfigurationError
from dpbench.core.files import write_text
from dpbench.core.registry import folder_of, names_of, resolve
from dpbench.core.subject import Subject, subject_from

OF_PARENT = {"parent": True}
"""Metadata of an instrument's fields that the measured process does not need."""


@dataclass(frozen=True)
class Program:
    """A program to run, and the selection of its counted steps.

    Attributes:
        program: a script's path or a module's name, and the program's arguments.
        is_module: whether ``program`` begins with a module's name.
        skip: number of first steps that are not counted.
        steps: number of counted steps.
        go_on: whether the program continues after the counted steps.
        timeout: seconds, from the locking of the GPU, after which the program is ended.
    """

    program: tuple[str, ...]
    is_module: bool = False
    skip: int = 3
    steps: int = 5
    go_on: bool = False
    timeout: float | None = None


@dataclass(frozen=True)
class Task:
    """The task to measure the steps of a case or a script with an instrument."""

    case: Subject
    instrument: Any
    program: Program | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the task as plain JSON types, which another process can read.

        Registered names are replaced by module and class, because they may be registered only in
        this process.
        """
        case = {**self.case.columns}
        for axis, known, spelled in names_of(self.case):
            # The spelling of the workload contains the parameters of the column ``set``.
            case |= {axis: known.argument(spelled), "set": ""}
        kind = type(self.instrument)
        folder = folder_of(kind.__module__)
        return {
            "case": case,
            "instrument": f"{kind.__module__}:{kind.__qualname__}",
            "folder": str(folder) if folder else None,
            "fields": _plain(self.instrument, kind),
            "program": self.program and _plain(self.program, Program),
        }

    @classmethod
    def from_json(cls, task: Mapping[str, Any]) -> Task:
        """Return the task whose `as_json` is ``task``."""
        before = [*sys.path]
        sys.path += filter(None, [task["folder"]])
        try:
            kind = resolve_name(task["instrument"])
        finally:
            sys.path[:] = before
        if not is_dataclass(kind):  # `_typed` would call any other class
            raise ConfigurationError(f"{task['instrument']} is no instrument")
        program = task["program"] and _typed(task["program"], Program)
        return cls(resolve(subject_from(task["case"])), _typed(task["fields"], kind), program)

    def write(self, path: Path) -> None:
        """Write the task to a file."""
        write_text(path, json.dumps(self.as_json(), indent=1))

    @classmethod
    def read(cls, path: Path) -> Task:
        """Read the task from a file."""
        return cls.from_json(json.loads(path.read_text(encoding="utf-8")))


def _plain(value: Any, kind: Any) -> Any:
    """Return the fields of an instance of the dataclass ``kind``, as plain JSON types."""
    own = [field.name for field in fields(kind) if field.metadata != OF_PARENT]
    return msgspec.to_builtins({name: getattr(value, name) for name in own}, enc_hook=str)


def _typed(plain: Any, kind: Any) -> Any:
    """Return the instance of ``kind`` that `_plain` has converted to ``plain``."""
    return msgspec.convert(plain, kind, dec_hook=lambda kind, text: kind(text))  # e.g. a Path
