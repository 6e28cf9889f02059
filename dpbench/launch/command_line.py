"""The words, and the path of imports, by which a process of its own gets a case."""

from __future__ import annotations

import os
import sys
import sysconfig
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path

from dpbench.case import OF_TRANSFORMER, USUAL, Case
from dpbench.registry import is_builtin, names_of


def arguments(case: Case) -> list[str]:
    """A case as command-line options that any dpbench process understands."""
    named = asdict(case) | {axis: known.argument(name) for axis, known, name in names_of(case)}
    del named["set"]  # with the workload's name
    return [
        text
        for name, value in named.items()
        if value not in (USUAL[name], OF_TRANSFORMER.get(name)) or (name == "model_size" and value)
        for text in (f"--{name.replace('_', '-')}", str(value))
    ]


def python_path(case: Case) -> str | None:
    """``PYTHONPATH`` for a child to import what the case names; None if all of it is built in.

    It has the entries of ``sys.path`` before the standard library, where pytest, for one, adds
    some, and the directories that named classes came from, which may be elsewhere or not in it.
    """
    if is_builtin(case):
        return None
    own = sysconfig.get_paths()
    added = takewhile(lambda entry: entry != own["stdlib"], sys.path)
    others = [(known, name) for _, known, name in names_of(case) if not known.is_builtin(name)]
    imported = [str(path) for known, name in others if (path := known.import_path(name))]
    entries = [*added, *imported, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    wanted = [e for e in entries if e and e not in own.values() and Path(e).exists()]
    return os.pathsep.join(dict.fromkeys(wanted))
