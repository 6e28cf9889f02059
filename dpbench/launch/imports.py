"""Finds the import path that a case's process needs for user-defined classes."""

from __future__ import annotations

import os
import sys
import sysconfig
from itertools import takewhile
from pathlib import Path

from dpbench.core.registry import is_builtin, names_of
from dpbench.core.subject import Subject


def python_path(case: Subject) -> str | None:
    """``PYTHONPATH`` with which a child can import the case's classes; None if all are built in.

    Its entries are the ones of ``sys.path`` before the standard library (pytest adds some there)
    and the directories from which the case's classes were imported.
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
