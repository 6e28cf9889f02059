"""The errors that dpbench raises on purpose; each message names what would work."""

from __future__ import annotations

import linecache
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType


class DpbenchError(Exception):
    """Base of every error that dpbench raises on purpose.

    ``exit_code`` is what a command ends with when the error reaches its top level.
    """

    exit_code = 1


class ConfigurationError(DpbenchError):
    """Something asked for does not exist or does not fit together."""

    exit_code = 2


def unknown(kind: str, name: object, known: Iterable[str], hint: str = "") -> ConfigurationError:
    """The error for a name that is not in a list of names, with the list."""
    return ConfigurationError(
        f"unknown {kind} {str(name)!r}; choose from {', '.join(known)}{hint and f' ({hint})'}"
    )


def own_line(trace: TracebackType | None) -> str:
    """The innermost line of an error in code that is neither installed nor dpbench's."""
    others = (sysconfig.get_paths()["stdlib"], str(Path(__file__).parent), "<")
    for frame, line in reversed(list(traceback.walk_tb(trace))):
        file = frame.f_code.co_filename
        if not file.startswith(others) and "-packages" not in file:
            return f"{Path(file).name}:{line}: {linecache.getline(file, line).strip()}"
    return ""
