"""The path of imports by which a process of its own finds what a case names."""

from __future__ import annotations

import os
import sys
import sysconfig
from itertools import takewhile
from pathlib import Path

from dpbench.core.registry import is_builtin, names_of
from dpbench.core.subject import Subject


def python_path(case: Subject) -> str | None:
    """``PYTHONPATH`` for a child to import what the case names; None if all of it is built in.

    Its entries are those of ``sys.path`` before the standard library, where e.g. pytest adds some,
    and the directories that named classes were imported from.
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
