"""A task: what a process should measure, in a JSON file written by its parent."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import msgspec

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
            "fields": _plain(self.instrument, kind),
            "program": self.program and _plain(self.program, Program),
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
    """The fields of a dataclass ``kind`` as plain JSON types."""
    own = [field.name for field in fields(kind) if field.metadata != OF_PARENT]
    return msgspec.to_builtins({name: getattr(value, name) for name in own}, enc_hook=str)


def _typed(given: Any, kind: Any) -> Any:
    """The inverse of `_plain`; a type that JSON lacks, such as `Path`, is made of a text."""
    return msgspec.convert(given, kind, dec_hook=lambda kind, text: kind(text))
